"""Checks of the loss: one value per frame, of this frame alone, with and without objects."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from boxcov._torch.modules import differentiable_shadow, fresh
from boxcov.checks.batches import forward_batch, merge, perturb
from boxcov.checks.report import Finding
from boxcov.checks.subject import (
    NotChecked,
    Subject,
    bad,
    form_of,
    good,
    one_line,
)
from boxcov.detector import Detector
from boxcov.error_model.labelled_frames import changed_copy
from boxcov.errors import counted
from boxcov.kfac.losses import most_frames

_OBJECT = ("boxes", "labels")
_NO_OBJECTS = "accept boxes (0, D) and labels (0,), and divide by max(objects, 1)"
_SURE = 0.5  # score
# Right losses of 17 detectors fell to 0.94 or rose; a wrong one of a trained detector falls to 0.3.
_CLEAR = 0.25
_COPIES = 3


def shape(subject: Subject) -> Finding:
    """``loss()`` returns finite values (B,)."""
    raw = subject.needed_raw()
    if subject.targets is None:
        raise NotChecked("no targets given: fit() needs them unless fisher='mc'")
    with torch.no_grad():
        found = subject.shadow().loss(raw, subject.targets)
    frames = most_frames(subject.inputs, subject.targets)
    is_vector = isinstance(found, Tensor) and found.dim() == 1
    if not is_vector or frames not in (None, len(found)):
        batch = "a batch" if frames is None else counted(frames, "frame")
        todo = "sum over each frame's locations and boxes, not over frames: shape (B,); "
        todo += "a mean over the batch hides the gradients of its frames"
        return bad(f"loss() gives {form_of(found)} for {batch}, expected (B,)", todo)
    if not bool(found.isfinite().all()):
        todo = "clamp probabilities before the logarithm; a frame without objects needs a finite "
        return bad(f"the loss is {found.tolist()}", f"{todo}loss, too")
    subject.loss = found
    return good(f"one value per frame: {_first(found)}")


def apart(subject: Subject) -> Finding:
    """A frame's loss does not depend on the other frame of a batch."""
    known, most = subject.needed_loss(), 0.0
    for mate, how in _mates(subject):
        inputs, targets = (merge(list(pair)) for pair in zip(_frame(subject), mate))
        detector = subject.shadow()
        with torch.no_grad():
            found = detector.loss(forward_batch(detector, inputs), targets)
        if len(found) < 2 * len(known):
            seen = f"loss() gives {len(found)} values for {2 * len(known)} frames"
            return bad(seen, "return one value per frame, shape (B,)")
        off = (found[: len(known)] - known).abs() / known.abs().clamp(min=1e-6)
        most = max(most, float(off.max()))
        if most > (1e-3 if subject.device.type == "cpu" else 1e-2):
            return bad(
                f"the loss of a frame is {float(known[0]):.4g} alone and {float(found[0]):.4g} "
                f"beside {how}",
                "divide by each frame's own objects, not by the number of frames or by counts over "
                "the batch, and match targets frame by frame",
            )
    return good(f"the same beside {how}, to {most:.0e}")


def no_objects(subject: Subject) -> Finding:
    """The loss of a frame without objects and its gradient are finite."""
    subject.needed_loss()
    targets, raised = _object_targets(subject.targets), ""
    none = torch.zeros(0, dtype=torch.long, device=subject.device)
    detector = differentiable_shadow(subject.original)
    raw = detector(fresh(subject.inputs))
    for names in (set[str]().union(*targets), _OBJECT):  # an image's size may have n numbers, too
        try:
            found = detector.loss(raw, [_take(target, none, names) for target in targets])
            break
        except Exception as error:
            raised = raised or one_line(error)
    else:
        return bad(f"without objects loss() raises {raised}", _NO_OBJECTS)
    weights = [p for p in detector.parameters() if p.requires_grad]
    moves = found.requires_grad
    slopes = torch.autograd.grad(found.sum(), weights, allow_unused=True) if moves else ()
    for what, values in (("loss", (found,)), ("gradient of the loss", slopes)):
        if not all(bool(value.isfinite().all()) for value in values if value is not None):
            return bad(f"without objects the {what} is not finite", _NO_OBJECTS)
    return good(f"{_first(found)} without objects")


def labels(subject: Subject) -> Finding:
    """``loss()`` counts the classes as ``select()`` does."""
    subject.needed_loss()
    targets, boxes = _object_targets(subject.targets), subject.needed_boxes()
    chosen, detector = subject.needed_selection(), subject.shadow()
    classes = len(subject.original.classes)
    if classes < 2 or any(target["boxes"].shape[1:] != boxes.shape[1:] for target in targets):
        raise NotChecked("needs two classes, and targets with the box fields of decode()")
    losses = []
    for shift in (0, 1, -1):
        own = []
        for number, target in enumerate(targets):
            rows = ((chosen.frame == number) & (chosen.scores > _SURE)).nonzero()[:, 0]
            if not len(rows):
                raise NotChecked(f"needs boxes with a score above {_SURE} in every frame")
            own.append(_take(target, 0 * rows, set(target)))
            own[-1]["boxes"] = boxes[rows].to(target["boxes"])
            own[-1]["labels"] = ((chosen.labels[rows] + shift) % classes).to(target["labels"])
        with torch.no_grad():
            try:
                losses.append(float(detector.loss(subject.needed_raw(), own).sum()))
            except Exception as error:  # of boxes without an area, for example
                raise NotChecked(f"the detector's own boxes are no targets: {error}") from None
    first, shifted = losses[0], min(losses[1:])
    seen = f"the detector's own boxes as targets: {first:.4g}, labels shifted by one: {shifted:.4g}"
    if shifted < first - _CLEAR * abs(first):
        todo = "loss() and select() must count the same classes from 0, without a background class"
        return bad(seen, todo)
    return good(seen)


def augmented(subject: Subject) -> Finding:
    """``augment()`` changes a copy, which ``loss()`` accepts, and leaves the frame as it is."""
    if type(subject.original).augment is Detector.augment:
        raise NotChecked("not implemented (optional, for calibrate)")
    own, detector = subject.needed_loss(), subject.shadow()
    before = fresh(_frame(subject))
    with torch.no_grad():
        copies = [changed_copy(detector, *_frame(subject), seed) for seed in range(_COPIES)]
        found = torch.stack([detector.loss(detector(inputs), t) for inputs, t in copies])
    if not all(map(_is_same, tree_leaves(before), tree_leaves(_frame(subject)))):
        return bad("the frame itself is changed", "let augment() return new tensors")
    if found.shape[1:] != own.shape or not bool(found.isfinite().all()):
        todo = "return inputs and targets in the format that the network and loss() read"
        return bad(f"the losses of copies are {found.tolist()}", todo)
    mean = float(found.mean()) / max(float(own.mean()), 1e-12)
    return good(f"the loss of {_COPIES} copies is {mean:.2g} times that of the frame")


# helpers


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
    return a is b or bool(np.all((a == b) | (a != a)))  # NaN is the same as NaN


def _object_targets(targets: Any) -> list[dict[str, Any]]:
    """The targets, if they are a list of dicts with boxes (n, E) and labels (n,) of n objects."""
    listed: list[Any] = list(targets) if isinstance(targets, (list, tuple)) else [None]
    for one in listed:
        counts = [_count(one.get(name)) for name in _OBJECT] if isinstance(one, dict) else [0]
        if min(counts) < 1 or len(set(counts)) > 1 or one["boxes"].dim() != 2:
            raise NotChecked("needs targets that are dicts with the boxes and labels of objects")
    return listed


def _take(target: dict[str, Any], rows: Tensor, names: Collection[str]) -> dict[str, Any]:
    """The target with some of its objects; ``names`` are the entries that have a row of each."""
    n = len(target["boxes"])
    return {
        name: value[rows] if name in names and _count(value) == n else value
        for name, value in target.items()
    }


def _count(value: Any) -> int:
    """The length of a tensor, -1 if it has none."""
    return len(value) if isinstance(value, Tensor) and value.dim() else -1


def _first(losses: Tensor) -> str:
    return ", ".join(f"{x:.4g}" for x in losses.tolist()[:4])


def _frame(subject: Subject) -> tuple[Any, Any]:
    return subject.inputs, subject.targets


def _mates(subject: Subject) -> list[tuple[tuple[Any, Any], str]]:
    """Other frames for a batch: a copy, and another one, also with fewer targets."""
    inputs, targets = subject.other or (perturb(subject.inputs), subject.targets)
    what = "a perturbed copy" if subject.other is None else "another frame"
    copy, fewer = (_frame(subject), "a copy of itself"), _fewer(targets)
    found = [copy, ((inputs, fewer), f"{what} with other targets"), ((inputs, targets), what)]
    with torch.no_grad():
        try:
            detector = subject.shadow()
            detector.loss(detector(fresh(inputs)), fresh(fewer))
        except Exception:  # the loss may need the removed targets
            del found[1]
    return found


def _fewer(targets: Any) -> Any:
    """Targets with half of the objects, else perturbed."""
    try:
        found = _object_targets(targets)
    except NotChecked:
        return perturb(targets)
    return [_take(one, torch.arange(len(one["boxes"]) // 2), set(one)) for one in found]
