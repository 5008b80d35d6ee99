"""RetinaNet, FCOS and SSD: one box per anchor, reported after a threshold and NMS."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boxcov._torch.process_state import at_least_float32
from boxcov.detector import InstanceGroup, Selection
from boxcov.detectors.boxes import centres
from boxcov.detectors.pyramid import (
    CellIndex,
    ScoredBoxes,
    cell_counts,
    level_of,
    static_selection,
)
from boxcov.detectors.signals import (
    SIDES,
    finite,
    logit_of_log,
    pyramid_window,
    softmax_logit,
    window_signals,
    with_log_size,
)
from boxcov.detectors.torchvision.detector import Raw, Reported, TorchvisionDetector
from boxcov.head_stages import crop, run_on_crops
from boxcov.static_selection import StaticLimits, StaticSelection, check_one_frame


class AnchorDetector(TorchvisionDetector):
    """A head over N anchors.

    Raw outputs: ``cls_logits`` (B, N, K), ``bbox_regression`` (B, N, 4), ``anchors`` (B, N, 4).
    """

    def run(self, images: Any) -> Raw:
        features = self.maps(images)
        levels = list(features.values())
        anchors = torch.stack(self.model.anchor_generator(images, levels))
        return {"features": features, **self.model.head(levels), "anchors": anchors}

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        return {"head": self.model.head, **self.below()}

    def level_counts(self, raw: Raw) -> list[int]:
        """Return the number of anchors of each level."""
        sizes = cell_counts(raw["features"].values())
        return [cells * a for cells, a in zip(sizes, self.anchors_per_cell(raw))]

    def anchors_per_cell(self, raw: Raw) -> list[int]:
        """Return the number of anchors per cell, for each level."""
        cells = sum(cell_counts(raw["features"].values()))
        return [raw["anchors"].shape[1] // cells] * len(raw["features"])

    @abstractmethod
    def scores(self, raw: Raw, b: int) -> Tensor:
        """Return the scores (N, K) of one image."""

    @abstractmethod
    def groups(self, raw: Raw, classes: int) -> list[Tensor]:
        """Return groups of indices into the flattened scores, for the top-k before NMS."""

    @abstractmethod
    def layers(self, level: int) -> tuple[nn.Module, nn.Module]:
        """Return the layers of a level that compute the regression values and the class logits."""

    def report(self, raw: Raw, b: int) -> Reported:
        from torchvision.ops.boxes import batched_nms

        scores = self.scores(raw, b)
        places, best = [], []
        for group in self.groups(raw, scores.shape[1]):
            score = scores.flatten()[group]
            keep = score > self.model.score_thresh
            score, order = score[keep].topk(min(self.model.topk_candidates, int(keep.sum())))
            places.append(group[keep][order])
            best.append(score)
        anchor, number, boxes = self._at_places(raw, b, torch.cat(places), scores.shape[1])
        score = torch.cat(best)
        kept = batched_nms(boxes, score, number, self.model.nms_thresh)
        kept = kept[: self.model.detections_per_img]
        return anchor[kept], number[kept], score[kept]

    def _at_places(
        self, raw: Raw, b: int, place: Tensor, classes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return anchors, class numbers and clipped boxes of indices into the flattened scores."""
        from torchvision.ops.boxes import clip_boxes_to_image

        anchor, number = place // classes, place % classes
        boxes = self.decode_regression(raw["bbox_regression"][b, anchor], raw["anchors"][b, anchor])
        return anchor, number, clip_boxes_to_image(boxes, raw["sizes"][b])

    def where(self, raw: Raw, frame: Tensor, place: Tensor) -> CellIndex:
        return CellIndex(frame, place, level_of(place, self.level_counts(raw)))

    def select_static(self, raw: Raw, limits: StaticLimits) -> StaticSelection:
        check_one_frame(len(raw["sizes"]))
        model, scores = self.model, self.scores(raw, 0)
        classes, flat = scores.shape[1], scores.flatten()
        best = [
            group[flat[group].topk(min(model.topk_candidates, len(group))).indices]
            for group in self.groups(raw, classes)
        ]
        place = torch.cat(best)
        score = flat[place]
        anchor, number, boxes = self._at_places(raw, 0, place, classes)
        labels = self.labels.of_model(number, self.count())
        above, reported = score > model.score_thresh, self.is_reported(labels, score)
        return static_selection(
            ScoredBoxes(score, boxes, anchor, number, labels, above, reported),
            limits,
            counts=self.level_counts(raw),
            overlap=model.nms_thresh,
            max_boxes=model.detections_per_img,
        )

    def regression_of(self, raw: Raw, selection: Selection) -> tuple[Tensor, Tensor]:
        at = (selection.where.frame, selection.where.cell)
        return raw["bbox_regression"][at], raw["anchors"][at]

    def decode_regression(self, values: Tensor, start: Tensor) -> Tensor:
        return self.model.box_coder.decode_single(values, start)

    def logits(self, raw: Raw, selection: Selection) -> Tensor:
        at = (selection.where.frame, selection.where.cell)
        return self.logits_at(raw, at, self.labels.to_model(selection.labels))

    def logits_at(self, raw: Raw, at: tuple[Tensor, Tensor], number: Tensor) -> Tensor:
        """Return the logit (m,) of the score of class ``number`` (m,) at frames and anchors."""
        return self.score_logit(raw["cls_logits"][at], number)

    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        where, number = selection.where, self.labels.to_model(selection.labels)
        shapes = [x.shape[2:] for x in raw["features"].values()]
        around = pyramid_window(where.cell, shapes, self.anchors_per_cell(raw))
        at = (where.frame.repeat_interleave(9), around.index.flatten())
        boxes = self.decode_regression(raw["bbox_regression"][at], raw["anchors"][at])
        scores = self.logits_at(raw, at, number.repeat_interleave(9))
        boxes, scores = (at_least_float32(x).unflatten(0, (-1, 9)) for x in (boxes, scores))
        logits = raw["cls_logits"][where.frame, where.cell]
        return finite(
            {
                **window_signals(scores, with_log_size(centres(boxes)), around.inside),
                **self.shared_signals(raw, selection, logits, boxes[:, 4]),
                "level": around.level,
            }
        )

    @abstractmethod
    def score_logit(self, logits: Tensor, number: Tensor) -> Tensor:
        """Return the logit (m,) of the score of class ``number`` (m,), from the logits (m, K)."""

    def instances(
        self, raw: Raw, selection: Selection, with_logit: bool = False
    ) -> list[InstanceGroup] | None:
        """Return one group per level, each box on its crop; None if a norm mixes the map."""
        mixing = (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d)
        if any(isinstance(module, mixing) for module in self.model.head.modules()):
            return None
        groups = selection.where.level_groups(len(raw["features"]))
        return [self._group(raw, selection, index, n, with_logit) for n, index in enumerate(groups)]

    def _group(
        self, raw: Raw, selection: Selection, index: Tensor, level: int, with_logit: bool
    ) -> InstanceGroup:
        x, start = list(raw["features"].values())[level], sum(self.level_counts(raw)[:level])
        frame, anchor = selection.where.frame[index], selection.where.cell[index]
        number = self.labels.to_model(selection.labels[index])
        per_cell = self.anchors_per_cell(raw)[level]
        cell, which = (anchor - start) // per_cell, (anchor - start) % per_cell

        def at_cell(layers: nn.Module) -> Tensor:
            crops, inside = crop(x, frame, cell // x.shape[3], cell % x.shape[3], reach(layers))
            out = run_on_crops(layers, crops, inside)[0][:, :, 0, 0]
            each: Tensor = out.unflatten(1, (per_cell, -1))
            return each[torch.arange(len(out), device=out.device), which]

        def run() -> Tensor:
            box_layers, class_layers = self.layers(level)
            values = at_cell(box_layers)
            boxes = self.in_images(values, raw["anchors"][frame, anchor], raw, frame)
            if not with_logit:
                return boxes
            logits = self.score_logit(at_cell(class_layers), number)
            return torch.cat([boxes, logits.unsqueeze(1)], 1)

        return index, run

    def outputs_of(self, raw: Raw, b: int) -> dict[str, Tensor]:
        names = ("cls_logits", "bbox_regression", "bbox_ctrness")
        return {name: raw[name][b : b + 1] for name in names if name in raw}


def reach(layers: nn.Module) -> int:
    """Return the radius in cells of the receptive field of a module's convolutions.

    >>> reach(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU(), nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 3)))
    2
    """
    return sum(
        layer.dilation[0] * (layer.kernel_size[0] - 1) // 2
        for layer in layers.modules()
        if isinstance(layer, nn.Conv2d)
    )


class RetinaNet(AnchorDetector):
    """Scores are sigmoids. Without GroupNorm in the head, instances run on crops."""

    def count(self) -> int:
        return int(self.model.head.classification_head.num_classes)

    def scores(self, raw: Raw, b: int) -> Tensor:
        return raw["cls_logits"][b].sigmoid()

    def groups(self, raw: Raw, classes: int) -> list[Tensor]:
        counts = [n * classes for n in self.level_counts(raw)]
        return list(torch.arange(sum(counts), device=raw["anchors"].device).split(counts))

    def score_logit(self, logits: Tensor, number: Tensor) -> Tensor:
        return logits.gather(1, number.unsqueeze(1))[:, 0]

    def layers(self, level: int) -> tuple[nn.Module, nn.Module]:
        box, named = self.model.head.regression_head, self.model.head.classification_head
        return nn.Sequential(box.conv, box.bbox_reg), nn.Sequential(named.conv, named.cls_logits)

    def image_loss(self, raw: Raw, b: int, target: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.model.compute_loss([target], self.outputs_of(raw, b), [raw["anchors"][b]])


class FCOS(RetinaNet):
    """Scores are sqrt(class score * centre-ness). GroupNorm in the head rules out crops."""

    raw_names = tuple(f"side {side}" for side in SIDES)

    def scores(self, raw: Raw, b: int) -> Tensor:
        return (raw["cls_logits"][b].sigmoid() * raw["bbox_ctrness"][b].sigmoid()).sqrt()

    def decode_regression(self, values: Tensor, start: Tensor) -> Tensor:
        return self.model.box_coder.decode(values, start)

    def logits_at(self, raw: Raw, at: tuple[Tensor, Tensor], number: Tensor) -> Tensor:
        named = self.score_logit(raw["cls_logits"][at], number)
        return logit_of_log((F.logsigmoid(named) + F.logsigmoid(raw["bbox_ctrness"][at][:, 0])) / 2)

    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        centerness = raw["bbox_ctrness"][selection.where.frame, selection.where.cell, 0]
        return finite({**super().signals(raw, selection), "centerness": centerness})

    def instances(
        self, raw: Raw, selection: Selection, with_logit: bool = False
    ) -> list[InstanceGroup] | None:
        return None

    def image_loss(self, raw: Raw, b: int, target: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.model.compute_loss(
            [target], self.outputs_of(raw, b), [raw["anchors"][b]], self.level_counts(raw)
        )


class SSD(AnchorDetector):
    """Scores are a softmax over the classes and the background (number 0)."""

    first_number = 1

    def count(self) -> int:
        return int(self.model.head.classification_head.num_columns)

    def anchors_per_cell(self, raw: Raw) -> list[int]:
        return [int(n) for n in self.model.anchor_generator.num_anchors_per_location()]

    def scores(self, raw: Raw, b: int) -> Tensor:
        return raw["cls_logits"].softmax(-1)[b]

    def groups(self, raw: Raw, classes: int) -> list[Tensor]:
        places = torch.arange(raw["anchors"].shape[1], device=raw["anchors"].device) * classes
        return [places + number for number in range(1, classes)]

    def score_logit(self, logits: Tensor, number: Tensor) -> Tensor:
        return softmax_logit(logits, number)

    def layers(self, level: int) -> tuple[nn.Module, nn.Module]:
        box, named = self.model.head.regression_head, self.model.head.classification_head
        return nn.Sequential(box.module_list[level]), nn.Sequential(named.module_list[level])

    def image_loss(self, raw: Raw, b: int, target: dict[str, Tensor]) -> dict[str, Tensor]:
        from torchvision.ops.boxes import box_iou

        anchors = raw["anchors"][b]
        matched = torch.full((len(anchors),), -1, device=anchors.device)
        if len(target["labels"]):
            matched = self.model.proposal_matcher(box_iou(target["boxes"], anchors))
        return self.model.compute_loss([target], self.outputs_of(raw, b), [anchors], [matched])
