"""Signals of a YOLOX: numbers per box that its head computes but does not report."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov._torch.layers import at_least_float32
from boxcov.detector import Selection
from boxcov.detectors.boxes import corners
from boxcov.detectors.signals import (
    RAW_NAMES,
    Signals,
    class_margin,
    finite,
    logit_of_log,
    pyramid_window,
    touched_sides,
    window_signals,
)
from boxcov.detectors.yolox.config import STRIDES


def signals(values: Tensor, shapes: Sequence[Sequence[int]], selection: Selection) -> Signals:
    """Return named numbers (m,) of the selected boxes.

    The score logit, its peak and the spread of the 3 x 3 cells around the box; class logit,
    objectness and the margin to the next class; the raw box values; the level and the number of
    the image's sides that the box touches.

    values: (B, N, 5 + classes) of the head. shapes: height and width of each level.
    """
    around = pyramid_window(selection.where.cell, shapes)
    cells = at_least_float32(values[selection.where.frame[:, None], around.index])  # (m, 9, n)
    labels = selection.labels[:, None, None].expand(-1, 9, 1)
    class_logits = cells[:, :, 5:].gather(2, labels)[:, :, 0]  # (m, 9)
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
