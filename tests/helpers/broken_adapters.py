"""Adapters that each break one promise, and the finding that must report it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov import Detector, Selection
from boxcov.detectors.tiny import Raw, TinyCenter
from boxcov.static_selection import StaticLimits, StaticSelection


class Base(TinyCenter):
    """A small untrained TinyCenter that finds some boxes, without the optional methods."""

    def __init__(self) -> None:
        super().__init__(seed=1, threshold=0.05, most=6, width=4)

    def instances(self, raw: Raw, selection: Selection, with_logit: bool = False) -> Any:
        return None

    def stages(self, raw: Raw, selection: Selection) -> Any:
        return None


class NoGrad(Base):
    @torch.no_grad()
    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        return super().decode(raw, selection)


class HalfDetached(Base):
    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        return super().decode({**raw, "size": raw["size"].detach()}, selection)


class Reselects(Base):
    """decode() selects again by threshold: the number of rows depends on the raw outputs."""

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        return super().decode(raw, self.select(raw))


class Resorts(Base):
    """decode() selects again by rank: the same number of rows, but different ones."""

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        frame, row, _ = selection.where
        width = raw["heatmap"].shape[3]
        best = raw["heatmap"][0].amax(0).flatten().topk(len(row)).indices
        return super().decode(raw, replace(selection, where=(frame, best // width, best % width)))


class MeanLoss(Base):
    def loss(self, raw: Raw, targets: Any) -> Tensor:
        return super().loss(raw, targets).mean()


class DividedLoss(Base):
    """The loss has shape (B,) but is divided by the number of frames."""

    def loss(self, raw: Raw, targets: Any) -> Tensor:
        each = super().loss(raw, targets)
        return each / len(each)


class CoupledLoss(Base):
    """The loss is divided by the number of objects in the batch."""

    def loss(self, raw: Raw, targets: Any) -> Tensor:
        each = super().loss(raw, targets)
        objects = sum(len(target["boxes"]) for target in targets)
        return each * len(each) / max(objects, 1)


class AlwaysDrops(Base):
    def forward(self, inputs: Tensor) -> Raw:
        return super().forward(F.dropout(inputs, 0.5))  # training=True is its default


class Counts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Raw:
        self.calls.add_(1)
        return super().forward(inputs)


class CountsUnseen(Counts):
    """Changes a tensor without its version counter, and replaces it by a new one."""

    def forward(self, inputs: Tensor) -> Raw:
        self.calls.data += 1
        self.calls = self.calls + 1
        return Base.forward(self, inputs)


class ModeMatters(Base):
    mirrors = False

    def train(self, mode: bool = True) -> ModeMatters:
        self.mirrors = mode
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Raw:
        return super().forward(inputs.flip(-1) if self.mirrors else inputs)


class TooFewFields(Base):
    box_fields = ("x", "y", "w", "l")


class LabelsFromOne(Base):
    def select(self, raw: Raw) -> Selection:
        found = super().select(raw)
        return replace(found, labels=found.labels + 2)


class LogitsAsScores(Base):
    def select(self, raw: Raw) -> Selection:
        found = super().select(raw)
        return replace(found, scores=found.scores.logit())


class NotFinite(Base):
    def forward(self, inputs: Tensor) -> Raw:
        raw = super().forward(inputs)
        return {**raw, "size": raw["size"] / 0}


class BoxesNotFinite(Base):
    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        return (-super().decode(raw, selection).square()).log()


class DetachedHead(Base):
    def forward(self, inputs: Tensor) -> Raw:
        return {name: x.detach() for name, x in super().forward(inputs).items()}


class DetachedBranch(Base):
    def forward(self, inputs: Tensor) -> Raw:
        raw = super().forward(inputs)
        return {**raw, "rot": raw["rot"].detach()}


class ChangesInputs(Base):
    def forward(self, inputs: Tensor) -> Raw:
        return super().forward(inputs.sub_(0.1))


class ChangesRaw(Base):
    def select(self, raw: Raw) -> Selection:
        return super().select({**raw, "heatmap": torch.logit(raw["heatmap"].sigmoid_())})


class EmptyPart(Base):
    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "rest": self.head.shared[2]}


class Overlap(Base):
    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "neck": (self.lateral, self.up, self.head.shared)}


class Stranger(Base):
    def parts(self) -> dict[str, Any]:
        return {"head": nn.Conv2d(1, 1, 1)}


class NoHead(Base):
    def parts(self) -> dict[str, Any]:
        return {"body": self.head}


class FindsNothing(Base):
    def __init__(self) -> None:
        super().__init__()
        self.threshold = 1.0


class ForwardFails(Base):
    def forward(self, inputs: Tensor) -> Raw:
        raise KeyError("points")


class FramesMixed(Base):
    """Every box is assigned to the first frame."""

    def select(self, raw: Raw) -> Selection:
        found = super().select(raw)
        return replace(found, frame=torch.zeros_like(found.frame))


class BadInstances(TinyCenter):
    """Boxes per instance differ from those of decode()."""

    def __init__(self) -> None:
        super().__init__(seed=1, threshold=0.05, most=6, width=4)

    def instances(self, raw: Raw, selection: Selection, with_logit: bool = False) -> Any:
        return [
            (index, lambda run=run: run() * 1.5)
            for index, run in super().instances(raw, selection, with_logit)
        ]


class BadStages(TinyCenter):
    def __init__(self) -> None:
        super().__init__(seed=1, threshold=0.05, most=6, width=4)

    def stages(self, raw: Raw, selection: Selection) -> Any:
        found = super().stages(raw, selection)
        return replace(found, decode=lambda *numbers: 2 * found.decode(*numbers))


class BadLogits(Base):
    def logits(self, raw: Raw, selection: Selection) -> Tensor:
        return super().logits(raw, selection).detach()


class NaNSignals(Base):
    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        return {"size": raw["size"].amin().log().expand(len(selection))}


class WrongSignals(Base):
    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        return {"size": raw["size"][:, 0]}


class CoupledSignals(Base):
    """The numbers of a box depend on the other frames of the batch."""

    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        found = super().signals(raw, selection)
        return {**found, "logit": found["logit"] + selection.frame.max()}


class NamesVary(Base):
    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        found = super().signals(raw, selection)
        return found if len(raw["heatmap"]) == 1 else {"logit": found["logit"]}


class StaticAbove(Base):
    """select_static() has another threshold than select()."""

    def select_static(self, raw: Raw, limits: StaticLimits) -> StaticSelection:
        return TinyCenter(threshold=0.5, most=6).select_static(raw, limits)


class StaticLabels(Base):
    def select_static(self, raw: Raw, limits: StaticLimits) -> StaticSelection:
        found = super().select_static(raw, limits)
        return replace(found, selection=_relabelled(found.selection))


class StaticScores(Base):
    """select_static() reports logits."""

    def select_static(self, raw: Raw, limits: StaticLimits) -> StaticSelection:
        found = super().select_static(raw, limits)
        own = found.selection
        return replace(found, selection=replace(own, scores=own.scores.logit()))


class StaticKinds(Base):
    """Rows as if they were of their own kind are at other cells."""

    def select_static(self, raw: Raw, limits: StaticLimits) -> StaticSelection:
        found = super().select_static(raw, limits)
        own = found.selection
        frame, row, column = own.where
        moved = replace(own, where=(frame, row, 0 * column))
        return replace(found, kind=torch.zeros_like(row), of_kind=(moved,))


class CentreSize(Base):
    """decode() gives cx cy w h under the names of two corners."""

    box_fields = ("x1", "y1", "x2", "y2")

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        return super().decode(raw, selection)[:, :4]


class NegativeSize(Base):
    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        return super().decode(raw, selection) * torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0])


class ParameterPart(Base):
    def parts(self) -> dict[str, Any]:
        return {"head": self.head.shared[0].weight}


def _relabelled(found: Selection) -> Selection:
    return replace(found, labels=1 - found.labels)


class AugmentsInPlace(Base):
    def augment(self, inputs: Any, targets: Any, generator: torch.Generator) -> tuple[Any, Any]:
        targets[0]["boxes"][:, 0] += 1
        return inputs, targets


class AugmentsInputsAlone(Base):
    def augment(self, inputs: Any, targets: Any, generator: torch.Generator) -> Any:
        return inputs.flip(3)


class AugmentsToNaN(Base):
    def augment(self, inputs: Any, targets: Any, generator: torch.Generator) -> tuple[Any, Any]:
        return inputs * torch.nan, targets


BROKEN: list[tuple[Callable[[], Detector], str, str]] = [
    (NoGrad, "decode: derivative", "has no gradient in the raw outputs"),
    (HalfDetached, "decode: derivative", "w, l differs from a finite difference by 100 %"),
    (Reselects, "decode: same instances", "rows for other raw outputs|reads other raw outputs"),
    (Resorts, "decode: same instances", "reads other raw outputs"),
    (MeanLoss, "loss", r"loss\(\) gives \(\) for 1 frame"),
    (DividedLoss, "loss: frames apart", "beside a copy of itself"),
    (CoupledLoss, "loss: frames apart", "beside"),
    (AlwaysDrops, "repeatable", "two passes in eval mode differ, by up to"),
    (Counts, "state", r"forward\(\) changes calls"),
    (CountsUnseen, "state", r"forward\(\) changes calls"),
    (ModeMatters, "mode", r"after train\(\)"),
    (TooFewFields, "decode", r"gives \(6, 5\), expected \(6, 4\)"),
    (CentreSize, "decode", r"x2 < x1 in \d of 6 boxes, e.g. box \d: x1 [\d.]+, y1 [\d.]+, x2"),
    (NegativeSize, "decode", r"l <= 0 in 6 of 6 boxes, e.g. box 0: x "),
    (LabelsFromOne, "labels", "for 2 classes"),
    (NotFinite, "forward", r"raw\['size'\] holds"),
    (BoxesNotFinite, "decode", r"6 boxes are not finite, e.g. box 0: \[nan, "),
    (DetachedHead, "boxes: gradient", "no gradient in any weight"),
    (DetachedHead, "loss: gradient", "has no gradient for any chosen layer"),
    (DetachedBranch, "boxes: gradient", "yaw have no gradient"),
    (ChangesInputs, "inputs", "changes its inputs"),
    (ChangesRaw, "select", "changes raw outputs in place"),
    (EmptyPart, "parts", "'rest' holds no parameters"),
    (Overlap, "parts", "'head' and 'neck' share head.shared"),
    (Stranger, "parts", "'head' holds Conv2d, not a module of the detector"),
    (NoHead, "parts", "the first part is 'body'"),
    (
        ParameterPart,
        "parts",
        "'head' names the parameter head.shared.0.weight, not a module",
    ),
    (LogitsAsScores, "select", r"scores -\d"),
    (FindsNothing, "select", "no instance is selected"),
    (ForwardFails, "forward", "KeyError: 'points'"),
    (FramesMixed, "boxes: in a batch", "in a batch of two"),
    (BadInstances, "instances", r"instances\(\) gives box"),
    (BadStages, "stages", r"BadStages.stages\(\) gives box"),
    (BadLogits, "logits", "no gradient"),
    (NaNSignals, "signals", "'size' holds 6 NaN or infinite values"),
    (WrongSignals, "signals", r"'size' is \(1, 16, 16\), expected \(6,\)"),
    (CoupledSignals, "signals", "'logit' changes when another frame is in the batch"),
    (NamesVary, "signals", "a batch of two has the signals"),
    (AugmentsInPlace, "augment", "the frame itself is changed"),
    (AugmentsInputsAlone, "augment", r"augment\(\) returns Tensor, expected a pair"),
    (AugmentsToNaN, "augment", r"the losses of copies are \[\[nan\]"),
    (StaticAbove, "select_static", r"reports 0 boxes, and select\(\) 6"),
    (StaticLabels, "select_static", r"labels are not those of select\(\)"),
    (StaticScores, "select_static", r"scores are not those of select\(\)"),
    (StaticKinds, "select_static", r"of_kind\[0\] are not those of the selection"),
]
