"""Signals of query-based detectors: numbers per box that they compute but do not report."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov._torch.layers import at_least_float32
from boxcov.detectors.boxes import corners
from boxcov.detectors.signals import (
    FIELDS,
    RAW_NAMES,
    TINY,
    Signals,
    class_signals,
    deviation,
    finite,
    named,
    neighbour_signals,
    touched_sides,
    with_log_size,
)


@dataclass(frozen=True)
class Queries:
    """The outputs of all Q queries in the frames of m boxes."""

    query: Tensor  # (m,) the box's own query
    logits: Tensor  # (m, n) class logits of the own query
    scores: Tensor  # (m, Q) logits of the scores of the box's class
    boxes: Tensor  # (m, Q, 4) normalized centre and size
    layers: Tensor | None  # (m, L, 4) boxes of the own query after each decoder layer


def signals(queries: Queries, number: Tensor, background: int | None) -> Signals:
    """Return named numbers (m,) of the boxes.

    The score logit, margins and entropy of the classes, the raw box values, how many queries
    overlap the box and how far they disagree, the number of the image's sides that the box touches,
    and how far the decoder's layers disagree (``layers ...``).

    number: (m,) the model's class. background: the column of "no object", if there is one.
    """
    query, boxes = queries.query, at_least_float32(queries.boxes)
    own = boxes.gather(1, query[:, None, None].expand(-1, 1, 4))[:, 0]
    reported, scores = corners(own), at_least_float32(queries.scores)
    everywhere = torch.ones_like(scores, dtype=torch.bool)
    found = {
        "logit": scores.gather(1, query[:, None])[:, 0],
        **class_signals(at_least_float32(queries.logits), number, background),
        **dict(zip(RAW_NAMES, torch.logit(own, eps=TINY).unbind(1))),
        **neighbour_signals(reported, corners(boxes), scores, own=query, inside=everywhere),
        "touched sides": touched_sides(reported),
    }
    if queries.layers is not None:
        layers = with_log_size(at_least_float32(queries.layers))
        apart = deviation(layers, with_log_size(own), layers.new_ones(layers.shape[:2]))
        found |= named("layers", FIELDS, apart)
    return finite(found)
