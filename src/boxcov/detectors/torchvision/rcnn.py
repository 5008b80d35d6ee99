"""Faster R-CNN: regions as instances, proposals fixed by the selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from boxcov._torch.process_state import at_least_float32, seeded
from boxcov.detector import InstanceGroup, Selection
from boxcov.detectors.boxes import iou
from boxcov.detectors.signals import TINY, finite, neighbour_signals, softmax_logit
from boxcov.detectors.torchvision.detector import Raw, Reported, TorchvisionDetector


@dataclass(frozen=True)
class RegionIndex:
    """The regions of m instances; one region may be reported under several classes."""

    proposals: list[Tensor]  # per image (r, 4) in resized pixels, from the trained weights
    region: Tensor  # (m,) index into the proposals of all images
    number: Tensor  # (m,) the model's class number


class FasterRCNN(TorchvisionDetector):
    """Head: the layers after RoI pooling. Proposals are constants, as in training."""

    first_number = 1

    def count(self) -> int:
        return int(self.model.roi_heads.box_predictor.cls_score.out_features)

    def run(self, images: Any) -> Raw:
        from torchvision.models.detection.rpn import concat_box_prediction_layers

        features, rpn = self.maps(images), self.model.rpn
        levels = list(features.values())
        objectness, deltas = rpn.head(levels)
        anchors = rpn.anchor_generator(images, levels)
        counts = [part[0].numel() for part in objectness]
        objectness, deltas = concat_box_prediction_layers(objectness, deltas)
        starts = rpn.box_coder.decode(deltas.detach(), anchors).view(len(anchors), -1, 4)
        proposals, scores = rpn.filter_proposals(starts, objectness, images.image_sizes, counts)
        sizes = [tuple(size) for size in images.image_sizes]
        class_logits, regression = self.head(features, proposals, sizes)
        return {
            "features": features,
            "objectness": objectness,
            "deltas": deltas,
            "anchors": anchors,
            "proposals": proposals,
            "proposal_scores": scores,
            "class_logits": class_logits,
            "regression": regression,
        }

    def head(
        self, features: dict[str, Tensor], regions: list[Tensor], sizes: list[Any]
    ) -> tuple[Tensor, Tensor]:
        """Return logits (R, K) and regression values (R, 4 K) of each region."""
        heads = self.model.roi_heads
        pooled = heads.box_roi_pool(features, regions, sizes)  # (R, C, s, s)
        logits, regression = heads.box_predictor(heads.box_head(pooled))
        return logits, regression

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        below, heads = self.below(), self.model.roi_heads
        pyramid = below.get("neck")
        return {
            "head": (heads.box_head, heads.box_predictor),
            "neck": (self.model.rpn.head, *([pyramid] if isinstance(pyramid, nn.Module) else [])),
            "backbone": below["backbone"],
        }

    # from raw outputs to boxes

    def report(self, raw: Raw, b: int) -> Reported:
        from torchvision.ops.boxes import batched_nms, clip_boxes_to_image, remove_small_boxes

        heads, counts = self.model.roi_heads, [len(p) for p in raw["proposals"]]
        first, classes = sum(counts[:b]), self.count()
        rows = slice(first, first + counts[b])
        scores = raw["class_logits"].softmax(-1)[rows, 1:].flatten()
        boxes = heads.box_coder.decode(raw["regression"], raw["proposals"])[rows]
        boxes = clip_boxes_to_image(boxes, raw["sizes"][b])[:, 1:].reshape(-1, 4)
        keep = torch.where(scores > heads.score_thresh)[0]
        keep = keep[remove_small_boxes(boxes[keep], min_size=1e-2)]
        number = keep % (classes - 1) + 1
        kept = batched_nms(boxes[keep], scores[keep], number, heads.nms_thresh)
        kept = kept[: heads.detections_per_img]
        place = first * classes + keep[kept] // (classes - 1) * classes + number[kept]
        return place, number[kept], scores[keep[kept]]

    def where(self, raw: Raw, frame: Tensor, place: Tensor) -> RegionIndex:
        return RegionIndex(raw["proposals"], place // self.count(), place % self.count())

    def regression_of(self, raw: Raw, selection: Selection) -> tuple[Tensor, Tensor]:
        where = selection.where
        values = _of_class(self._at_proposals(raw, where)[1], where.region, where.number)
        return values, torch.cat(where.proposals)[where.region]

    def _at_proposals(self, raw: Raw, where: RegionIndex) -> tuple[Tensor, Tensor]:
        """Return the head's outputs at the selection's proposals, whatever the weights propose."""
        if all(own is kept for own, kept in zip(raw["proposals"], where.proposals)):
            return raw["class_logits"], raw["regression"]
        return self.head(raw["features"], where.proposals, raw["sizes"])

    def decode_regression(self, values: Tensor, start: Tensor) -> Tensor:
        return self.model.roi_heads.box_coder.decode(values, [start])[:, 0]

    def logits(self, raw: Raw, selection: Selection) -> Tensor:
        where = selection.where
        return softmax_logit(self._at_proposals(raw, where)[0][where.region], where.number)

    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        """Return named numbers (m,): also how far the regions disagree as boxes of the class."""
        where, proposals = selection.where, torch.cat(selection.where.proposals)
        own, (logits, regression) = where.region, self._at_proposals(raw, where)
        m, regions = len(selection), len(proposals)
        values = regression.unflatten(1, (-1, 4))[:, where.number].transpose(0, 1)  # (m, R, 4)
        every = self.model.roi_heads.box_coder.decode_single(
            values.flatten(0, 1), proposals.repeat(m, 1)
        )
        scores = softmax_logit(logits.repeat(m, 1), where.number.repeat_interleave(regions))
        every, scores = (at_least_float32(x).unflatten(0, (m, regions)) for x in (every, scores))
        boxes = every.gather(1, own[:, None, None].expand(-1, 1, 4))[:, 0]
        objectness = at_least_float32(torch.cat(raw["proposal_scores"])[own])
        frames = [torch.full_like(part[:, 0], b) for b, part in enumerate(where.proposals)]
        inside = torch.cat(frames) == selection.frame[:, None]  # (m, R) regions of the box's frame
        return finite(
            {
                "logit": scores.gather(1, own[:, None])[:, 0],
                **self.shared_signals(raw, selection, logits[own], boxes),
                "objectness": torch.logit(objectness, eps=TINY),
                "proposal overlap": iou(boxes, at_least_float32(proposals[own])),
                **neighbour_signals(boxes, every, scores, own=own, inside=inside),
            }
        )

    def instances(
        self, raw: Raw, selection: Selection, with_logit: bool = False
    ) -> list[InstanceGroup]:
        where, frame = selection.where, selection.frame
        start = torch.cat(where.proposals)[where.region]
        # selections are sorted by frame, so the regions keep their order
        own = [start[(frame == b).nonzero()[:, 0]] for b in range(len(raw["sizes"]))]

        def run() -> Tensor:
            logits, regression = self.head(raw["features"], own, raw["sizes"])
            each = torch.arange(len(start), device=start.device)
            boxes = self.in_images(_of_class(regression, each, where.number), start, raw, frame)
            if not with_logit:
                return boxes
            return torch.cat([boxes, softmax_logit(logits, where.number).unsqueeze(1)], 1)

        return [(torch.arange(len(selection), device=frame.device), run)]

    def image_loss(self, raw: Raw, b: int, target: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the four losses. Anchors and regions are sampled with a fixed seed."""
        from torchvision.models.detection.roi_heads import fastrcnn_loss

        rpn, heads, counts = self.model.rpn, self.model.roi_heads, [len(a) for a in raw["anchors"]]
        device = target["boxes"].device
        anchors, rows = [raw["anchors"][b]], slice(sum(counts[:b]), sum(counts[: b + 1]))
        with seeded(0, [device] if device.type == "cuda" else []):
            labels, matched = rpn.assign_targets_to_anchors(anchors, [target])
            wanted = rpn.box_coder.encode(matched, anchors)
            objectness, rpn_box = rpn.compute_loss(
                raw["objectness"][rows], raw["deltas"][rows], labels, wanted
            )
            regions, _, labels, wanted = heads.select_training_samples(
                [raw["proposals"][b].detach()], [target]
            )
        features = {name: part[b : b + 1] for name, part in raw["features"].items()}
        logits, regression = self.head(features, regions, [raw["sizes"][b]])
        classifier, box = fastrcnn_loss(logits, regression, labels, wanted)
        return {
            "loss_objectness": objectness,
            "loss_rpn_box_reg": rpn_box,
            "loss_classifier": classifier,
            "loss_box_reg": box,
        }


def _of_class(regression: Tensor, region: Tensor, number: Tensor) -> Tensor:
    """Return the regression values (m, 4) of one class, from those of all classes (R, 4 K)."""
    return regression.unflatten(1, (-1, 4))[region, number]
