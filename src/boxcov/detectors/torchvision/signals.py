"""Signals of torchvision's detectors: numbers per box that they compute but do not report."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov._torch.layers import at_least_float32
from boxcov.detectors.boxes import centres, iou
from boxcov.detectors.signals import (
    TINY,
    PyramidWindow,
    Signals,
    class_signals,
    finite,
    neighbour_signals,
    touched_sides,
    window_signals,
    with_log_size,
)


@dataclass(frozen=True)
class BoxOutputs:
    """What both kinds of detectors know about m boxes."""

    raw: Signals  # the box's regression values, by name
    logits: Tensor  # (m, K)
    number: Tensor  # (m,) the model's class
    background: int | None  # the background's column of the logits
    sizes: Tensor  # (m, 2) height and width of each box's resized image

    def shared(self, boxes: Tensor) -> Signals:
        """Return the signals of both kinds; boxes: (m, 4), x1 y1 x2 y2."""
        height, width = self.sizes.unbind(1)
        return {
            **self.raw,
            **class_signals(at_least_float32(self.logits), self.number, self.background),
            "touched sides": touched_sides(boxes, width, height),
        }


def anchor_signals(
    found: BoxOutputs, around: PyramidWindow, boxes: Tensor, scores: Tensor
) -> Signals:
    """Return named numbers (m,) of boxes at anchors.

    boxes: (m, 9, 4), x1 y1 x2 y2, of the neighbours. scores: (m, 9) logits of their scores.
    """
    boxes, scores = at_least_float32(boxes), at_least_float32(scores)
    return finite(
        {
            **window_signals(scores, with_log_size(centres(boxes)), around.inside),
            **found.shared(boxes[:, 4]),
            "level": around.level,
        }
    )


@dataclass(frozen=True)
class Regions:
    """The R regions of all frames, as candidates of the class of each of m boxes."""

    own: Tensor  # (m,) the box's region
    inside: Tensor  # (m, R) which regions belong to the box's frame
    boxes: Tensor  # (m, R, 4), x1 y1 x2 y2
    scores: Tensor  # (m, R) logits of the scores
    proposals: Tensor  # (R, 4)
    objectness: Tensor  # (R,) scores of the proposals


def region_signals(found: BoxOutputs, regions: Regions) -> Signals:
    """Return named numbers (m,) of boxes from regions."""
    own, scores = regions.own, at_least_float32(regions.scores)
    candidates = at_least_float32(regions.boxes)
    boxes = candidates.gather(1, own[:, None, None].expand(-1, 1, 4))[:, 0]
    return finite(
        {
            "logit": scores.gather(1, own[:, None])[:, 0],
            **found.shared(boxes),
            "objectness": torch.logit(at_least_float32(regions.objectness[own]), eps=TINY),
            "proposal overlap": iou(boxes, at_least_float32(regions.proposals[own])),
            **neighbour_signals(boxes, candidates, scores, own=own, inside=regions.inside),
        }
    )
