"""YOLOX as a ``Detector``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov._torch.process_state import at_least_float32, seeded
from boxcov.detector import Candidates, Detector, InstanceGroup, Selection, flatten_configuration
from boxcov.detectors.boxes import corners
from boxcov.detectors.objects import check_images
from boxcov.detectors.pyramid import cell_counts
from boxcov.detectors.signals import (
    RAW_NAMES,
    class_margin,
    finite,
    logit_of_log,
    of_class,
    pyramid_window,
    touched_sides,
    window_signals,
)
from boxcov.detectors.yolox.config import STRIDES, Config
from boxcov.detectors.yolox.loss import CellTargets, encode, frame_losses
from boxcov.detectors.yolox.network import PAFPN, REACH, Head
from boxcov.detectors.yolox.selection import (
    candidates,
    centred_boxes,
    grid_of,
    reported_boxes,
    select,
    select_static,
)
from boxcov.head_stages import crop
from boxcov.static_selection import StaticLimits, StaticSelection

Raw = dict[str, Any]


class YOLOX(Detector):
    """Boxes x1 y1 x2 y2 in pixels from images (B, 3, h, w): BGR, 0 to 255, sides divisible by 32.

    Targets: a list with one dict per frame, ``boxes`` (n, 4) in the same pixels and ``labels``
    (n,), indices into ``classes``. ``boxcov.data.coco`` yields both.

    >>> detector = YOLOX(Config.named("nano")).eval()
    >>> sum(p.numel() for p in detector.parameters())
    912159
    >>> detector.detect(torch.zeros(1, 3, 64, 64)).boxes.shape[1]
    4
    """

    def __init__(self, config: Config, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.trained_size: int | None = None  # side of its images in pixels; ``load`` may know it
        self.box_fields, self.classes = config.box_fields, config.classes
        with seeded(seed):
            self.backbone = PAFPN(config)  # upstream's name for neck and backbone together
            self.head = Head(config)

    def forward(self, inputs: Tensor) -> Raw:
        check_images(inputs, STRIDES[-1])
        features = self.backbone(inputs)
        return {"features": features, "values": self.head(features)}

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        return {"head": self.head, "neck": self.backbone.neck(), "backbone": self.backbone.backbone}

    def configuration(self) -> dict[str, str]:
        rules = {name: getattr(self.config, name) for name in ("threshold", "overlap", "max_boxes")}
        return {**super().configuration(), **flatten_configuration({"selection": rules})}

    def static_inputs(self, inputs: Tensor) -> Tensor:
        return inputs

    # from raw outputs to boxes

    def select(self, raw: Raw) -> Selection:
        return select(raw["values"], grid_of(raw["features"]), self.config)

    def select_static(self, raw: Raw, limits: StaticLimits) -> StaticSelection:
        counts, grid = cell_counts(raw["features"]), grid_of(raw["features"])
        return select_static(raw["values"], grid, self.config, counts=counts, limits=limits)

    def candidates(self, raw: Raw) -> Candidates:
        return candidates(raw["values"], grid_of(raw["features"]), self.config)

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        where, grid = selection.where, grid_of(raw["features"])
        values = raw["values"][where.frame, where.cell]
        return reported_boxes(values, selection.labels, grid[where.cell], self.config)

    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        shapes = [x.shape[2:] for x in raw["features"]]
        around = pyramid_window(selection.where.cell, shapes)
        values = raw["values"][selection.where.frame[:, None], around.index]
        cells = at_least_float32(values)  # (m, 9, 5 + classes)
        class_logits = of_class(cells[:, :, 5:], selection.labels)  # (m, 9)
        scores = logit_of_log(F.logsigmoid(cells[:, :, 4]) + F.logsigmoid(class_logits))
        stride = STRIDES[0] * 2.0 ** around.level[:, None, None]  # pixels per cell
        centre = (cells[:, :, :2] + torch.stack([around.column, around.row], 2)) * stride
        boxes = torch.cat([centre, cells[:, :, 2:4] + stride.log()], 2)  # sizes in logarithms
        own = cells[:, 4]
        reported = corners(torch.cat([boxes[:, 4, :2], boxes[:, 4, 2:].exp()], 1))
        height, width = (STRIDES[0] * side for side in shapes[0])
        return finite(
            {
                **window_signals(scores, boxes, around.inside),
                "class logit": class_logits[:, 4],
                "objectness": own[:, 4],
                "class margin": class_margin(own[:, 5:], selection.labels),
                **dict(zip(RAW_NAMES, own[:, :4].unbind(1))),
                "level": around.level,
                "touched sides": touched_sides(reported, width, height),
            }
        )

    def instances(
        self, raw: Raw, selection: Selection, with_logit: bool = False
    ) -> list[InstanceGroup] | None:
        """Return one group per level, each box on the 5x5 crop of the neck's map that it sees.

        There are no ``stages``, because the levels read different maps.
        """
        if with_logit:
            return None
        groups = selection.where.level_groups(len(STRIDES))
        return [self._group(raw, selection, index, n) for n, index in enumerate(groups)]

    def _group(self, raw: Raw, selection: Selection, index: Tensor, level: int) -> InstanceGroup:
        frame, cell = selection.where.frame[index], selection.where.cell[index]
        grid = grid_of(raw["features"])[cell]

        def run() -> Tensor:
            crops, inside = crop(raw["features"][level], frame, grid.row, grid.column, REACH)
            values = self.head.on_crops(crops, inside, level, classes=self.config.logit)
            return reported_boxes(values, selection.labels[index], grid, self.config)

        return index, run

    # the training loss

    def loss(
        self, raw: Raw, targets: Sequence[dict[str, Tensor]] | Sequence[CellTargets]
    ) -> Tensor:
        """Return the sum of IoU, objectness, class and L1 losses of each image (B,)."""
        values, grid = raw["values"], grid_of(raw["features"])
        assigned = [target for target in targets if isinstance(target, CellTargets)]
        if len(assigned) != len(values):
            assigned = encode(cast(Any, targets), values, grid)
        return frame_losses(values, assigned, grid)

    def sample_targets(self, raw: Raw, generator: torch.Generator) -> list[CellTargets]:
        """Return targets drawn from the prediction, with Laplace noise on boxes.

        The L1 loss is the negative log-likelihood of a Laplace distribution of width 1. The IoU
        loss is not a likelihood and is evaluated at the same draw.
        """
        values, grid = raw["values"].detach(), grid_of(raw["features"])
        p = values[:, :, 4:].sigmoid()  # (B, N, 1 + classes)
        drawn = torch.bernoulli(p, generator=generator)
        empty = torch.empty_like(values[:, :, :4], memory_format=torch.contiguous_format)
        uniform = empty.uniform_(generator=generator) - 0.5
        noise = -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.4999999))
        boxes = centred_boxes(values[:, :, :4] + noise, grid)
        cells = enumerate(image[:, 0].nonzero()[:, 0] for image in drawn)
        return [CellTargets(cell, boxes[b, cell], drawn[b, cell, 1:]) for b, cell in cells]
