"""What bodies are made of: upright boxes and tubes of a material, in fractions of the box that encloses the body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Material(NamedTuple):
    """``shade``: how much an object's own colour, drawn for each object, changes the reflectivity."""

    reflectivity: float
    depth: float = 0.0  # mean free path of a ray inside, metres: 0 for a solid
    shade: float = 0.0


PAINT = Material(0.18, shade=1.0)
CLOTH = Material(0.16, shade=0.8)
GLASS = Material(0.0008)  # most of the light goes through or elsewhere
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

    x runs along the length from -0.5 (rear) to 0.5 (front), y along the width from -0.5 to 0.5 (left), z along the height from 0 to 1.
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
    """One make of a kind of object: how large it is, how much that varies, how common it is, and its parts.

    The parts reach every face of the enclosing box.

    >>> Body("crate", (1.0, 1.0, 1.0), (box(-0.5, 0.5, 1.0, 0.0, 1.0, PAINT),)).share
    1.0
    """

    kind: str
    size: tuple[float, float, float]  # mean width, length, height in metres
    parts: tuple[Part, ...]
    spread: float = 0.07  # relative standard deviation of the sizes
    share: float = 1.0  # among the bodies of its kind
    moves: bool = True  # whether what moves may have this body: a bicycle without a rider does not


def box(
    x0: float, x1: float, width: float, z0: float, z1: float, material: Material, y: float = 0.0
) -> Part:
    """A box of a width (as a fraction of the whole) around ``y``.

    >>> box(-0.5, 0.5, 0.8, 0.0, 1.0, PAINT).y1
    0.4
    """
    return Part(x0, x1, y - width / 2, y + width / 2, z0, z1, material)


def tube(
    x0: float, x1: float, width: float, z0: float, z1: float, material: Material, y: float = 0.0
) -> Part:
    """An elliptic cylinder inside the box of the same arguments.

    >>> tube(-0.5, 0.5, 1.0, 0.0, 1.0, BARK).round
    1.0
    """
    return Part(x0, x1, y - width / 2, y + width / 2, z0, z1, material, 1.0)


def pair(part: Part) -> tuple[Part, Part]:
    """A part and its mirror image on the other side.

    >>> [p.y1 for p in pair(box(0.0, 0.1, 0.2, 0.0, 1.0, CLOTH, y=0.3))]
    [0.4, -0.19999999999999998]
    """
    return part, part._replace(y0=-part.y1, y1=-part.y0)


def axles(
    radius: float, *places: float, length: float = 0.07, width: float = 1.0
) -> tuple[Part, ...]:
    """Wheels: a box across the width at each place along the length, ``radius`` a fraction of the height.

    >>> len(axles(0.2, -0.3, 0.3))
    2
    """
    return tuple(box(x - length, x + length, width, 0.0, 2 * radius, RUBBER) for x in places)
