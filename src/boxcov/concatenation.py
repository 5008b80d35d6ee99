"""Several Detections in one, and the check that boxes are of one frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from boxcov.detections import Detections
from boxcov.errors import BoxcovError

_SAME = ("signals", "error_model", "method", "weights_sha256", "configuration")  # of the meta data
_WHICH_FRAMES = ("source", "files", "names", "milliseconds", "block")  # of the meta data of a file


def check_single_frame(found: Detections, user: str) -> None:
    """Raise if the boxes are of several frames; user: what takes those of one."""
    if len(found.frame.unique()) > 1:
        raise BoxcovError(
            f"{user}: boxes of several frames, expected one: give each of detections.frames()"
        )


def join_frames(parts: Iterable[Detections]) -> Detections:
    """Return the detections of several frames in one: ``parts[i]``, of one frame, becomes frame i.

    ``meta["frames"]`` is the number of frames, so that the last ones may be empty. Meta data of a
    file that say which frames it holds are left out: they are those of the first part alone.

    >>> one, index = torch.ones(1), torch.zeros(1, dtype=torch.long)
    >>> found = Detections(torch.ones(1, 2), one, index, index, ("x", "y"), ("car",))
    >>> joined = join_frames([found, found[:0], found])
    >>> joined.frame.tolist(), joined.meta["frames"]
    ([0, 2], 3)
    """
    parts = list(parts)
    for number, part in enumerate(parts):
        check_single_frame(part, f"part {number}")
    numbered = [replace(p, frame=torch.full_like(p.frame, i)) for i, p in enumerate(parts)]
    joined = concatenate(numbered)
    meta = {name: entry for name, entry in joined.meta.items() if name not in _WHICH_FRAMES}
    return replace(joined, meta={**meta, "frames": len(parts)})


def concatenate(parts: Sequence[Detections]) -> Detections:
    """Return the boxes of all parts in one; ``meta`` is that of the first part.

    The frame numbers of the parts are kept as they are. Parts of another detector, method or error
    model, or with other signals, are refused.
    """
    if not parts:
        raise BoxcovError(
            "nothing to concatenate: give at least one Detections, which may be empty"
        )
    first, *others = parts
    expected = _kind(first)
    for number, part in enumerate(others, 1):
        for what, value in _kind(part).items():
            if value != expected[what]:
                raise BoxcovError(
                    f"part {number} has the {what} {value}, part 0 {expected[what]}: "
                    "they cannot be one Detections"
                )
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in expected["tensors"]
    }
    return replace(first, **tensors)


def _kind(part: Detections) -> dict[str, Any]:
    """What the parts of one Detections have in common."""
    tensors = [name for name, _ in part._tensors()]
    meta = {key.replace("_", " "): part.meta.get(key) for key in _SAME}
    return {"fields": part.fields, "classes": part.classes, "tensors": tensors, **meta}
