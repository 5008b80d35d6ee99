"""Bodies made of parts: upright boxes and tubes, in fractions of the enclosing box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Material(NamedTuple):
    """The surface of a part; ``shade`` is the effect of the object's colour on the reflectivity."""

    reflectivity: float
    depth: float = 0.0  # mean free path of a ray inside, metres: 0 for a solid
    shade: float = 0.0


PAINT = Material(0.18, shade=1.0)
CLOTH = Material(0.16, shade=0.8)
GLASS = Material(0.0008)  # transmits or deflects most of the light
RUBBER = Material(0.04)
METAL = Material(0.15, shade=0.3)
PLASTIC = Material(0.2, shade=0.3)
RETRO = Material(0.9)
CONCRETE = Material(0.12, shade=0.4)
BARK = Material(0.1, shade=0.3)
LEAVES = Material(0.12, depth=0.6, shade=0.3)
SPOKES = Material(0.2, depth=0.1)
LATTICE = Material(0.2, depth=0.3)
SPRAY = Material(0.01, depth=9.0)


class Part(NamedTuple):
    """A box, or a tube (an elliptic cylinder) where ``round`` is 1.

    x runs along the length from -0.5 (rear) to 0.5 (front), y along the width from -0.5 to 0.5
    (left), z along the height from 0 to 1.
    """

    x0: float
    x1: float
    y0: float
    y1: float
    z0: float
    z1: float
    material: Material
    round: float = 0.0


@dataclass(frozen=True)
class Body:
    """One shape of a kind of object. Its parts reach every face of the enclosing box."""

    kind: str
    size: tuple[float, float, float]  # mean width, length, height in metres
    parts: tuple[Part, ...]
    spread: float = 0.07  # relative standard deviation of the sizes
    share: float = 1.0  # relative frequency among the bodies of its kind
    moves: bool = True  # False for example for a bicycle without a rider


def box(
    x0: float, x1: float, width: float, z0: float, z1: float, material: Material, y: float = 0.0
) -> Part:
    """Return a box of this width around ``y``."""
    return Part(x0, x1, y - width / 2, y + width / 2, z0, z1, material)


def tube(
    x0: float, x1: float, width: float, z0: float, z1: float, material: Material, y: float = 0.0
) -> Part:
    """Return an upright elliptic cylinder inside the box of the same arguments."""
    return Part(x0, x1, y - width / 2, y + width / 2, z0, z1, material, 1.0)


def pair(part: Part) -> tuple[Part, Part]:
    """Return a part and its mirror image on the other side."""
    return part, part._replace(y0=-part.y1, y1=-part.y0)


def axles(
    radius: float, *places: float, length: float = 0.07, width: float = 1.0
) -> tuple[Part, ...]:
    """Return wheels: a box across the width at each place along the length.

    ``radius`` is a fraction of the height.
    """
    return tuple(box(x - length, x + length, width, 0.0, 2 * radius, RUBBER) for x in places)
