"""Names of the box fields that boxcov knows, and where they are in a detector's boxes."""

from __future__ import annotations

from collections.abc import Sequence

from boxcov.errors import BoxcovError

SPACE = ("x", "y", "z", "w", "l", "h", "yaw")  # metres and radians
PLANE = ("x", "y", "w", "l", "yaw")
IMAGE = ("x1", "y1", "x2", "y2")  # pixels


def columns(fields: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the columns of ``names`` in boxes with these fields."""
    return [list(fields).index(name) for name in names]


def find_layout(
    fields: Sequence[str], layouts: Sequence[tuple[str, ...]], reader: str
) -> tuple[str, ...]:
    """Return the first of ``layouts`` that boxes with these fields have; raise if they have none.

    reader: what takes the boxes, for the message.

    >>> find_layout(("x", "y", "z", "w", "l", "h", "yaw"), (IMAGE, PLANE), "a plot")
    ('x', 'y', 'w', 'l', 'yaw')
    >>> find_layout(("x", "y"), (IMAGE, PLANE), "a plot")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: a plot takes boxes of x1 y1 x2 y2 or x y w l yaw; these are x y
    """
    for names in layouts:
        if set(names) <= set(fields):
            return names
    known = " or ".join(" ".join(names) for names in layouts)
    raise BoxcovError(f"{reader} takes boxes of {known}; these are {' '.join(fields)}")
