"""The boxes of labelled frames, and of changed copies of them, that an error model is fitted on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.modules import fresh
from boxcov._torch.process_state import item_seed
from boxcov.concatenation import concatenate
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.error_model.network import FOLDS, Progress
from boxcov.errors import BoxcovError, BoxcovWarning, NotFiniteError
from boxcov.evaluate.ground_truth import GroundTruth, check_targets, match_detections
from boxcov.evaluate.records import Records
from boxcov.predict.predictor import Predictor

COPIES = 3  # of each frame


@dataclass(frozen=True)
class CopiedBoxes:
    """Boxes of changed copies of frames, row by row."""

    found: Detections  # each copy is a frame of its own
    records: Records
    source: Tensor  # (n,) number of the frame that the box's copy was made from

    def __getitem__(self, rows: Tensor) -> CopiedBoxes:
        return CopiedBoxes(self.found[rows], self.records[rows.numpy()], self.source[rows])


def check_sequence(frames: Sequence[Any]) -> None:
    """Raise if frames can be read only once."""
    if not (hasattr(frames, "__len__") and hasattr(frames, "__getitem__")):
        raise BoxcovError(
            f"calibrate takes a list or another sequence of frames, got a {type(frames).__name__}: "
            "give list(frames)"
        )


def check_count(frames: Sequence[Any]) -> None:
    """Raise if there are too few labelled frames, before any of them is predicted."""
    check_sequence(frames)
    if len(frames) >= FOLDS:
        return
    count = sum(len(_pair(frames, number)[1]) for number in range(len(frames)))  # of a batch each
    if count < FOLDS:
        raise BoxcovError(
            f"{count} frames are too few to fit an error model: give at least {FOLDS} labelled "
            "frames, better 40 or more"
        )


def _pair(frames: Sequence[Any], number: int) -> tuple[Any, Any]:
    """Return inputs and targets of an item, checked."""
    item = frames[number]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise BoxcovError(
            f"frame {number} is a {type(item).__name__}, not a pair of inputs and targets: "
            "calibrate takes a list of such pairs"
        )
    check_targets(item[1], number)
    return item[0], item[1]


def _predict(model: Predictor, inputs: Any, target: Any, number: int) -> tuple[Detections, Any]:
    """Return the boxes of an item, on the CPU, and its targets; raise if they lack a frame."""
    found = model.with_signals(inputs).to("cpu")
    frames = int(found.frame.max()) + 1 if len(found) else 0
    if frames > len(target):
        raise BoxcovError(
            f"item {number} has boxes in {frames} frames, but targets of {len(target)}: give one "
            "dict of targets per frame"
        )
    return found, target


def _join(items: Sequence[tuple[Detections, Any]]) -> tuple[Detections, GroundTruth]:
    """Return boxes and objects of items, of one or more frames each, as those of one sequence."""
    starts = accumulate((len(target) for _, target in items), initial=0)
    found = [replace(boxes, frame=boxes.frame + start) for (boxes, _), start in zip(items, starts)]
    return concatenate(found), GroundTruth.from_frames(items)


def predict_frames(
    model: Predictor, frames: Sequence[Any], progress: Progress | None = None
) -> tuple[Detections, GroundTruth]:
    """Return the detections of all frames with their signals, on the CPU, and the objects."""
    items = []
    for number in range(len(frames)):
        inputs, target = _pair(frames, number)
        items.append(_predict(model, inputs, target, number))
        if progress is not None:
            progress(number + 1, len(frames))
    found, truth = _join(items)
    if not len(truth.labels):
        raise BoxcovError(f"none of the {truth.frames} frames has a labelled object")
    wrong = (found.scores < 0) | (found.scores > 1)
    if wrong.any():
        raise BoxcovError(
            f"{int(wrong.sum())} of {len(found)} scores are not between 0 and 1, such as "
            f"{float(found.scores[wrong][0]):.4g}: return probabilities from select()"
        )
    return found, truth


def makes_copies(detector: Detector) -> bool:
    """Return whether the detector can change frames, as in training."""
    return type(detector).augment is not Detector.augment


def changed_copy(detector: Detector, inputs: Any, targets: Any, seed: int) -> tuple[Any, Any]:
    """Return inputs and targets that ``augment()`` changed; raise if it returns anything else."""
    try:
        made = detector.augment(inputs, targets, torch.Generator().manual_seed(seed))
    except (BoxcovError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BoxcovError(
            f"augment() raises {type(error).__name__}: {error}; it gets inputs and targets as the "
            "frames hold them"
        ) from error
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        what = f"{len(made)} values" if isinstance(made, (tuple, list)) else type(made).__name__
        raise BoxcovError(f"augment() returns {what}, expected a pair: return inputs, targets")
    return made[0], made[1]


def changed_copies(
    detector: Detector, inputs: Any, targets: Any, number: int, copies: int
) -> Iterator[tuple[Any, Any]]:
    """Yield the copies of item ``number``, the same on every call."""
    for i in range(copies):
        # an augment() that works in place must not change the frame
        x, t = fresh((inputs, targets))
        changed, objects = changed_copy(detector, x, t, item_seed(number, i))
        check_targets(objects, number)
        if len(objects) != len(targets):
            raise BoxcovError(
                f"augment() returns the targets of {len(objects)} frames for {len(targets)}: "
                "return one dict per frame"
            )
        yield changed, objects


@contextmanager
def _named(what: str, unchanged: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Say in errors that a copy is wrong: without that they would blame the frame.

    unchanged: predicts the frame itself. If that fails, too, its error is raised: no copy is wrong.
    """
    try:
        yield
    except NotFiniteError:
        raise
    except BoxcovError as error:
        unchanged()
        raise BoxcovError(
            f"{what}: {error} (correct augment(), which boxcov.check tries, or calibrate with "
            "copies=0, on the command line --copies 0)"
        ) from error


def predict_copies(
    model: Predictor, frames: Sequence[Any], copies: int, progress: Progress | None = None
) -> CopiedBoxes | None:
    """Return the boxes of ``copies`` changed copies of each frame.

    None if the detector cannot make them. A copy whose covariances are not finite is left out.
    """
    detector = model.linearized.shadow
    if not copies or not makes_copies(detector):
        return None
    items: list[tuple[Detections, Any]] = []
    source: list[int] = []  # of each frame of the items
    first = 0
    for number in range(len(frames)):
        inputs, target = _pair(frames, number)
        with _named(f"copies of item {number}", partial(model.with_signals, inputs)):
            for changed, objects in changed_copies(detector, inputs, target, number, copies):
                try:
                    items.append(_predict(model, changed, objects, number))
                except NotFiniteError:
                    continue
                source += range(first, first + len(target))
        first += len(target)
        if progress is not None:
            progress(number + 1, len(frames))
    if not items:
        warn(
            f"no copy of the {len(frames)} frames by augment() has finite covariances: the error "
            "model learns from the frames alone",
            BoxcovWarning,
            stacklevel=3,
        )
        return None
    with _named("copies"):
        found, truth = _join(items)
        records = match_detections(found, truth, threshold=-1.0)
    return CopiedBoxes(found, records, torch.tensor(source)[found.frame])
