"""The bodies of everything in a scene: the ten classes, and the backdrop without labels.

``bodies.json`` lists them. Numbers are fractions of the enclosing box: x along the length from -0.5
(rear) to 0.5 (front), y along the width from -0.5 to 0.5 (left), z along the height from 0 to 1. A
row of ``parts`` is one of

    ["box" | "tube", material, x0, x1, width, z0, z1, y]       around y, by default 0
    ["box pair" | "tube pair", material, ...]                  the same, and its mirror image
    ["axles", radius, places, length, width]                   wheels: a box at each place along x

A tube is an upright elliptic cylinder. A material is reflectivity, mean free path of a ray inside
in metres (0 for a solid), and the effect of the object's colour on the reflectivity.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from boxcov._files.input_file import read_json
from boxcov.data.nuscenes.classes import CLASSES

BACKDROP = ("ego", "building", "wall", "pole", "sign", "bin", "tree", "bush", "spray")
KINDS = CLASSES + BACKDROP  # a body's kind; those of the backdrop have no label


class Part(NamedTuple):
    """A box, or a tube where ``round`` is 1."""

    x0: float
    x1: float
    y0: float
    y1: float
    z0: float
    z1: float
    material: tuple[float, float, float]  # reflectivity, depth, shade
    round: float = 0.0


@dataclass(frozen=True)
class Body:
    """One shape of a kind of object. Its parts reach every face of the enclosing box."""

    kind: str
    name: str
    size: list[float]  # mean width, length, height in metres
    parts: tuple[Part, ...]
    spread: float = 0.07  # relative standard deviation of the sizes
    share: float = 1.0  # relative frequency among the bodies of its kind
    moves: bool = True  # False for example for a bicycle without a rider


def read_bodies(unseen: bool = False) -> tuple[Body, ...]:
    """Return the bodies of all scenarios but ``unseen``, or those of ``unseen`` alone."""
    table = read_json(Path(__file__).parent / "bodies.json")
    materials = {name: tuple(numbers) for name, numbers in table["materials"].items()}
    rows = [*table["unseen" if unseen else "seen"], *table["backdrop"]]
    parts = [tuple(p for part in row.pop("parts") for p in _parts(part, materials)) for row in rows]
    return tuple(Body(**row, parts=own) for row, own in zip(rows, parts))


def _parts(row: list[Any], materials: dict[str, Any]) -> list[Part]:
    """Return the parts that a row of the table describes."""
    if row[0] == "axles":
        _, radius, places, length, width = row
        wheels = (["box", "rubber", x - length, x + length, width, 0.0, 2 * radius] for x in places)
        return [part for wheel in wheels for part in _parts(wheel, materials)]
    shape, material, x0, x1, width, z0, z1, *rest = row
    y = rest[0] if rest else 0.0
    sides = (x0, x1, y - width / 2, y + width / 2, z0, z1)
    part = Part(*sides, materials[material], float(shape.startswith("tube")))
    mirror = part._replace(y0=-part.y1, y1=-part.y0)
    return [part, mirror] if shape.endswith("pair") else [part]
