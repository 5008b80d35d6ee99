"""Checks of batches: boxes and signals of a frame are the same in a batch of two as alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from boxcov._torch.modules import fresh
from boxcov.checks.report import Finding
from boxcov.checks.subject import NotChecked, Subject, bad, form_of, good, nearest, one_line
from boxcov.data.sequence import batched
from boxcov.detector import Detector, Selection
from boxcov.errors import counted
from boxcov.kfac.losses import most_frames

_SIGNAL_SLACK = 0.01  # relative to 1 + the value: batched convolutions round differently


def boxes(subject: Subject) -> Finding:
    """A frame's boxes are the same in a batch as alone, with the right frame index."""
    found, chosen = subject.needed_boxes(), subject.needed_selection()
    for place in ("first", "last"):  # NMS would suppress a copy of the frame
        raw, selection, own = _batch_of_two(subject, subject.inputs, place == "last")
        there = subject.shadow().decode(raw, selection)[own]
        near = int((nearest(found, there)[0] < 1e-3).sum()) if len(there) else 0
        if near < 0.9 * len(chosen) or abs(len(there) - len(chosen)) > 0.1 * len(chosen):
            seen = (
                f"{near} of a frame's {len(chosen)} boxes are found in a batch of two, as its "
                f"{place} frame; the batch has {counted(len(there), 'box')} of that frame"
            )
            todo = (
                "do frames mix in forward() or in NMS, does select() read the first frame alone, "
                "or is selection.frame wrong?"
            )
            return bad(seen, todo)
    return good(f"{near} of {len(chosen)} boxes are the same in a batch of two")


def signals(subject: Subject) -> Finding:
    """``signals()`` returns finite numbers (m,), whatever else is in the batch."""
    found, chosen, detector = subject.needed_boxes(), subject.needed_selection(), subject.shadow()
    with torch.no_grad():
        alone = detector.signals(subject.needed_raw(), chosen)
    if problem := _signals_problem(alone, len(chosen)):
        return bad(problem, "return a dict of finite floats (m,): guard logarithms and divisions")
    if not alone:
        raise NotChecked("not implemented (optional, for the error model)")
    summary = f"{counted(len(alone), 'number')} per box"
    try:
        raw, selection, own = _batch_of_two(subject, perturb(subject.inputs))
    except NotChecked as why:
        return good(f"{summary}; {why}")
    with torch.no_grad():
        both = detector.signals(raw, selection)
        distance, row = nearest(found, detector.decode(raw, selection)[own])
    if list(both) != list(alone):
        seen = f"a batch of two has the signals {list(both)}, one frame {list(alone)}"
        return bad(seen, "return the same names in the same order for every input")
    for name, values in alone.items() if len(row) else ():
        apart = (both[name][own][row] - values).abs() / (1 + values.abs())
        if int((apart[distance < 1e-3] > _SIGNAL_SLACK).sum()) > 0.1 * len(chosen):
            seen = f"{name!r} changes when another frame is in the batch"
            todo = "compute the numbers of a box from its own frame alone"
            return bad(f"{seen}, by up to {float(apart.max()):.2g}", todo)
    return good(f"{summary}, the same in a batch of two")


def _signals_problem(found: Any, m: int) -> str:
    if not isinstance(found, dict):
        return f"signals() gives a {type(found).__name__}"
    for name, values in found.items():
        if form_of(values) != (m,):
            return f"{name!r} is {form_of(values)}, expected ({m},)"
        if values.dtype not in (torch.float32, torch.float64):
            return f"{name!r} is {values.dtype}, expected float32 or float64"
        if not bool(values.isfinite().all()):
            return f"{name!r} holds {int((~values.isfinite()).sum())} NaN or infinite values"
    return ""


def _batch_of_two(
    subject: Subject, mate: Any, is_last: bool = False
) -> tuple[Any, Selection, Tensor]:
    """Return raw outputs and selection of a batch of two, and which boxes are the checked frame's.

    mate: the other frame's inputs if the user gave none. is_last: the checked frame comes second.
    """
    frames = most_frames(subject.inputs, subject.targets)
    if frames is None:
        raise NotChecked("the number of frames cannot be read off these inputs")
    others = frames
    if subject.other is not None:
        mate, others = subject.other[0], most_frames(*subject.other) or frames
    both = [mate, subject.inputs] if is_last else [subject.inputs, mate]
    with torch.no_grad():
        detector = subject.shadow()
        raw = forward_batch(detector, merge(both))
        selection = detector.select(raw)
    return raw, selection, selection.frame >= others if is_last else selection.frame < frames


def merge(items: list[Any]) -> Any:
    try:
        return fresh(batched(items, len(items))[0])
    except Exception as error:
        raise NotChecked(f"two frames cannot be merged into a batch: {error}") from None


def forward_batch(detector: Detector, inputs: Any) -> Any:
    try:
        return detector(inputs)
    except Exception as error:
        raise NotChecked(f"two frames do not go into one batch: {one_line(error)}") from None


def perturb(inputs: Any) -> Any:
    """Perturbed inputs of the same shapes: noise on floats, integer images mirrored.

    >>> perturb([torch.ones(2, 3)])[0].shape
    torch.Size([2, 3])
    """
    generator = torch.Generator().manual_seed(0)

    def other(t: Tensor) -> Tensor:
        if t.is_floating_point() and t.numel() > 1:
            noise = torch.randn(t.shape, generator=generator).to(t)
            return 0.9 * t + 0.05 * t.std().nan_to_num(0.0) * noise
        return t.flip(-1) if t.dim() > 2 else t.clone()

    return tree_map_only(Tensor, other, inputs)
