"""Checks of the optional selections: candidates of NMS, and a fixed number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from boxcov.checks.report import Finding
from boxcov.checks.subject import NotChecked, Subject, bad, good, moved, named_floats, size_problem
from boxcov.detector import Candidates, Detector
from boxcov.errors import BoxcovError
from boxcov.static_selection import StaticLimits, check_static_selection

# Variants of the raw outputs: the share of the numbers that move, and how far at most, relative to
# the way to the largest or smallest one. Few candidates first.
_SHARES, _WAYS = (0.004, 0.02, 0.1, 0.5), (0.25, 0.5, 0.75, 1.0)
_MOST_MOVED = 100_000  # numbers of a tensor
_TINY = 1e-5  # relative to a tensor's spread: far above rounding, far below a wrong limit
_SATURATED = 1 - 1e-5  # such scores may be equal, which leaves the order of boxes undefined


def static_selection(subject: Subject) -> Finding:
    """``select_static()`` reports what ``select()`` does."""
    subject.needed_boxes()
    chosen, raw, detector = subject.needed_selection(), subject.needed_raw(), subject.shadow()
    limits = wide_limits(len(chosen))
    if int(chosen.frame.max()):
        raise NotChecked("needs a batch of one frame")
    with torch.no_grad():
        static = detector.select_static(raw, limits)
        if static is None:
            raise NotChecked(
                "not implemented (optional): no ONNX file (boxcov export) and no boxcov.compile; "
                "docs/guide/deploy.md shows one"
            )
        check_static_selection(detector, raw, static)
    if excess := int(static.left_off):
        raise NotChecked(f"{excess} boxes or candidates are beyond {limits}: give another frame")
    compared = check_variants(detector, raw, limits, subject.moving_floats())
    same_order = torch.equal(static.selection.scores[: len(chosen)], chosen.scores)
    order = "" if same_order else ", in another order, which boxcov.compile does not take"
    variants = f"{compared} variants of its raw outputs"
    return good(f"boxes, scores and labels of select() in this frame and {variants}{order}")


def wide_limits(boxes: int) -> StaticLimits:
    """Return limits that most variants of a frame with so many boxes keep."""
    return StaticLimits(max(100, boxes), candidates=1000, pairs=200_000)


def check_variants(
    detector: Detector, raw: Any, limits: StaticLimits, moving: Sequence[bool]
) -> int:
    """Return the number of varied raw outputs in which both selections agree; raise if they differ.

    A single frame may have no score and no overlap near a limit of the selection's rules. moving:
    which floating-point tensors of ``raw`` vary, those that depend on the weights.
    """
    generator, compared = torch.Generator().manual_seed(0), 0
    if any(leaf.element_size() < 4 for _, leaf in named_floats(raw)):
        return 0  # numbers of so few digits are often equal
    for share, way in product(_SHARES, _WAYS):
        far = partial(_towards_ends, share=share, way=way, generator=generator)
        near = partial(_tiny_step, generator=generator)
        variant = _vary(raw, moving, far)
        found = _difference(detector, variant, limits)
        compared += found == ""
        for _ in range(2):  # no difference remains if rounding made it
            found = found and _difference(detector, _vary(variant, moving, near), limits)
        if found:
            raise BoxcovError(
                f"{found}. This is so for other raw outputs than this frame's: compare threshold, "
                "NMS overlap, classes and limits of both"
            )
    return compared


def _difference(detector: Detector, raw: Any, limits: StaticLimits) -> str | None:
    """Return in what the selections differ, "" if they agree, None if they cannot be compared."""
    try:
        with torch.no_grad():
            static = detector.select_static(raw, limits)
            if static is None or int(static.left_off):
                return None
            chosen = detector.select(raw)
            boxes = detector.decode(raw, chosen)
            odd = not bool(boxes.isfinite().all()) or size_problem(detector.box_fields, boxes)
            if odd or bool((chosen.scores > _SATURATED).any()):
                return None
            check_static_selection(detector, raw, static)
    except BoxcovError as error:
        return str(error)
    except Exception:  # of raw outputs that no network gives
        return None
    return ""


def _vary(raw: Any, moving: Sequence[bool], step: Callable[[Tensor], Tensor]) -> Any:
    """The raw outputs, with a step of each that depends on the weights."""
    leaves = [leaf.detach() for _, leaf in named_floats(raw)]
    steps = [step(leaf) if moves else torch.zeros_like(leaf) for leaf, moves in zip(leaves, moving)]
    return moved(raw, steps)


def _towards_ends(leaf: Tensor, *, share: float, way: float, generator: torch.Generator) -> Tensor:
    """A step of some numbers towards the largest or the smallest: no number leaves the range."""
    step, flat = torch.zeros_like(leaf).flatten(), leaf.flatten()
    if not len(flat):
        return leaf
    count = min(int(share * len(flat)) + 1, _MOST_MOVED)
    at = torch.randint(len(flat), (count,), generator=generator).unique()
    end, size = torch.rand(2, len(at), generator=generator).to(leaf)
    at = at.to(leaf.device)
    step[at] = way * size * (torch.where(end < 0.5, flat.min(), flat.max()) - flat[at])
    return step.view_as(leaf)


def _tiny_step(leaf: Tensor, *, generator: torch.Generator) -> Tensor:
    noise = torch.randn(leaf.shape, generator=generator).to(leaf)
    return _TINY * leaf.std().nan_to_num(0.0) * noise


def candidates(subject: Subject) -> Finding:
    """``candidates()`` returns the instances before NMS."""
    chosen = subject.needed_selection()
    found = subject.shadow().candidates(subject.needed_raw())
    if found is None:
        raise NotChecked("not implemented (optional, for NMSSpread)")
    if not isinstance(found, Candidates) or found.removed_by.shape != found.scores.shape:
        todo = "return Candidates with removed_by (c,)"
        return bad(f"candidates() gives a {type(found).__name__}", todo)
    rows = found.removed_by
    if bool(((rows < -1) | (rows >= len(chosen))).any()):
        todo = "use the row in select(raw), or -1"
        return bad("removed_by names rows that select() does not report", todo)
    return good(f"{len(found)} candidates, {int((rows >= 0).sum())} removed by NMS")
