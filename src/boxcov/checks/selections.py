"""Checks of the optional selections: candidates of NMS, and a fixed number of rows."""

from __future__ import annotations

import torch

from boxcov.checks.report import Finding
from boxcov.checks.subject import NotChecked, Subject, bad, good
from boxcov.detector import Candidates
from boxcov.static_selection import StaticLimits, check_static_selection


def static_selection(subject: Subject) -> Finding:
    """``select_static()`` reports what ``select()`` does."""
    subject.needed_boxes()
    chosen, detector = subject.needed_selection(), subject.shadow()
    limits = StaticLimits(max(100, len(chosen)), candidates=1000, pairs=200_000)
    if int(chosen.frame.max()):
        raise NotChecked("needs a batch of one frame")
    with torch.no_grad():
        static = detector.select_static(subject.needed_raw(), limits)
        if static is None:
            raise NotChecked(
                "not implemented (optional): no ONNX file (boxcov export) and no boxcov.compile; "
                "docs/guide/deploy.md shows one"
            )
        check_static_selection(detector, subject.needed_raw(), static)
    if int(static.left_off):
        raise NotChecked(
            f"{int(static.left_off)} boxes or candidates are beyond {limits}: take a frame with "
            "fewer"
        )
    same_order = torch.equal(static.selection.scores[: len(chosen)], chosen.scores)
    order = "" if same_order else ", in another order, which boxcov.compile does not take"
    return good(f"boxes, scores and labels of select(){order}")


def candidates(subject: Subject) -> Finding:
    """``candidates()`` returns the instances before NMS."""
    chosen = subject.needed_selection()
    found = subject.shadow().candidates(subject.needed_raw())
    if found is None:
        raise NotChecked("not implemented (optional, for NMSSpread)")
    if not isinstance(found, Candidates) or found.removed_by.shape != found.scores.shape:
        return bad(
            f"candidates() gives a {type(found).__name__}", "return Candidates with removed_by (c,)"
        )
    if len(found) and not (
        int(found.removed_by.min()) >= -1 and int(found.removed_by.max()) < len(chosen)
    ):
        return bad(
            "removed_by names rows that select() does not report",
            "use the row in select(raw), or -1",
        )
    return good(f"{len(found)} candidates, {int((found.removed_by >= 0).sum())} removed by NMS")
