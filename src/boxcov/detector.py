"""The contract: what boxcov must know of a detector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import pi
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from boxcov.crops import stage_instances
from boxcov.detections import Detections
from boxcov.head_stages import HeadStages
from boxcov.static_selection import StaticLimits, StaticSelection


@dataclass(frozen=True)
class Selection:
    """Which instances are reported: fixed once, at the trained weights, and the same for every derivative.

    >>> none = torch.zeros(0, dtype=torch.long)
    >>> len(Selection(frame=none, scores=torch.zeros(0), labels=none, where=none))
    0
    """

    frame: Tensor  # (m,) which frame of the batch
    scores: Tensor  # (m,)
    labels: Tensor  # (m,) index into classes
    where: Any  # the detector's own index tensors (cell, task, level, query ...)

    def __len__(self) -> int:
        return int(self.scores.shape[0])


@dataclass(frozen=True)
class Candidates(Selection):
    """Every instance above the score threshold before NMS, as a selection that can be decoded, and which reported one removed it.

    >>> two = torch.zeros(2, dtype=torch.long)
    >>> len(Candidates(frame=two, scores=torch.tensor([0.9, 0.8]), labels=two, where=two, removed_by=torch.tensor([-1, 0])))
    2
    """

    removed_by: Tensor  # (c,) row in select(raw) of the best reported instance that suppresses it; -1 where none does


InstanceGroup = tuple[Tensor, Callable[[], Tensor]]
"""``(index, run)``: ``run()`` returns the boxes (g, D) of the instances ``index`` (g,). Every layer that it runs sees a
batch of g items, one per instance."""


class Detector(nn.Module, ABC):
    """A detector as boxcov sees it: subclass it, or wrap a model in one.

    ``forward`` must be pure in the parameters, ``decode`` differentiable in ``raw``, and ``loss`` one value a frame: the mean over a batch
    hides the gradients of its frames. See ``boxcov.detectors.tiny`` for a complete example.
    """

    box_fields: tuple[str, ...]  # names of the D numbers of a box, e.g. x y z w l h yaw vx vy
    classes: tuple[str, ...]
    periods: ClassVar[Mapping[str, float]] = {
        "yaw": 2 * pi
    }  # fields that wrap around: differences are taken the short way

    @abstractmethod
    def forward(self, inputs: Any) -> Any:
        """Raw outputs, any pytree of tensors."""

    @abstractmethod
    def select(self, raw: Any) -> Selection:
        """Which instances are reported: threshold, top-k, NMS."""

    @abstractmethod
    def decode(self, raw: Any, selection: Selection) -> Tensor:
        """The boxes (m, D) of the selected instances, differentiable in ``raw``."""

    @abstractmethod
    def loss(self, raw: Any, targets: Any) -> Tensor:
        """The training loss of each frame of the batch (B,)."""

    @abstractmethod
    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        """The parts of the network from its output to its input: "head", then "neck", then "backbone"."""

    def instances(
        self, raw: Any, selection: Selection, with_logit: bool = False
    ) -> Iterable[InstanceGroup] | None:
        """Optional: the head run with one batch item per instance. Used by ``ExactGLM`` and ``MCI``.

        Return groups ``(index, run)`` that together contain every instance once. ``raw`` is what ``forward`` returned and
        must hold what the head reads. In ``run`` every layer sees g batch items, item i belonging to instance ``index[i]``
        alone: a cropped receptive field for a convolutional head, a RoI, a query.
        with_logit: ``run`` also returns the score logit, behind the D numbers of each box (g, D + 1). A detector that
        cannot do that returns None, and ``ExactGLM(with_logit=True)`` runs one backward pass per number.
        Unless overridden, the groups follow from ``stages``: the head's modules on the crop that each box sees.
        """
        stages = type(self).stages(self, raw, selection)  # also where a check switched them off
        return None if stages is None else stage_instances(stages, with_logit)

    def logits(self, raw: Any, selection: Selection) -> Tensor | None:
        """Optional: the logit (m,) of each selected instance's score, differentiable in ``raw``: with ``with_logit=True`` its variance is told, too."""
        return None

    def stages(self, raw: Any, selection: Selection) -> HeadStages | None:
        """Optional, beside ``instances``: the head as stages, which ``ExactGLM`` runs over all boxes, kinds and branches at once.

        It must say the same as ``instances``: the first frames are computed both ways and compared.
        """
        return None

    def select_static(self, raw: Any, limits: StaticLimits) -> StaticSelection | None:
        """Optional: what ``select`` reports of one frame in a fixed number of rows, in plain operations (``boxcov.export.onnx`` uses it)."""
        return None

    def static_part(self) -> Detector:
        """Optional, beside ``select_static`` or ``static_inputs``: the part of the detector that one graph of fixed shapes can hold, as a
        detector of its own.

        It has the same weights under the same names; what comes before it (voxels of a point cloud) runs outside of the graph.
        """
        return self

    def static_inputs(self, inputs: Any) -> Tensor | None:
        """Optional, beside ``static_part``: what it reads, so that ``static_part()(static_inputs(inputs))`` is ``self(inputs)``, bit for bit.

        A detector that has it says that nothing in ``static_part()`` depends on anything but this tensor: on a GPU it is kept as a CUDA graph.
        """
        return None

    def candidates(self, raw: Any) -> Candidates | None:
        """Optional: what NMS chose from, and what it removed because of which reported instance (``NMSSpread`` uses it)."""
        return None

    def sample_targets(self, raw: Any, generator: torch.Generator) -> Any:
        """Optional: targets drawn from the detector's own predictive distribution, for ``fisher="mc"``."""
        return None

    def detect(self, inputs: Any) -> Detections:
        """The plain detector: boxes, scores and labels, no covariance.

        >>> from boxcov.data import shapes
        >>> from boxcov.detectors.tiny import TinyCenter
        >>> inputs, _ = shapes.frames(count=1)[0]
        >>> TinyCenter().eval().detect(inputs).boxes.shape[1]
        5
        """
        with torch.no_grad():
            raw = self(inputs)
            selection = self.select(raw)
            return self.detections(selection, self.decode(raw, selection))

    def detections(self, selection: Selection, boxes: Tensor) -> Detections:
        return Detections(
            boxes=boxes,
            scores=selection.scores,
            labels=selection.labels,
            frame=selection.frame,
            fields=tuple(self.box_fields),
            classes=tuple(self.classes),
        )
