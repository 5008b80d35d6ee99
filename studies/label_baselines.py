"""What wrong labels are also ranked by: score, training loss, risk, residual, and size alone.

Boxes and labels are paired as in the evaluation, class by class and by decreasing score. There is a
row for each label, and for each box without one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from boxcov import Detections
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.evaluate.matching import pair_classes
from boxcov.evaluate.records import Records
from boxcov.evaluate.wrong_labels import Differences, log_density, miss_probability

Array = NDArray[Any]
_LIMIT = 2.0  # metres between the centres of a pair


def baselines(
    found: Detections, truth: GroundTruth, losses: Array
) -> tuple[Differences, dict[str, Array]]:
    """Return the rows, and their values (n,) by each ranking.

    losses: the training loss of each label.
    """
    records = match_detections(found, truth, threshold=-1.0)
    rows = compare(found, truth, records, error_surprise(records))
    score = np.append(found.scores.double().numpy(), 0.0)[rows.box]  # 0 for no box
    has_label, is_pair = rows.label >= 0, rows.kind == "place"
    focal = -np.log1p(-np.minimum(score, 1 - 1e-4)) * score**2
    return rows, {
        "1 - score": np.where(is_pair, 1 - score, np.where(has_label, 1.0, score)),
        "training loss": np.where(has_label, np.append(losses, 0.0)[rows.label], focal),
        "risk": compare(found, truth, records, iou_surprise(found, records)).value,
        "residual": rows.value,
        "size alone": np.append(size_ratio(truth), -np.inf)[rows.label],
    }


def compare(
    found: Detections, truth: GroundTruth, records: Records, surprise: Array
) -> Differences:
    """Return the rows, given the value of each pair (m,): -log10 of a probability.

    A box without a label counts by P(no object), a label without a box by how often such labels
    have none, and a box at a label of another class by both.
    """
    label = records.pair
    assert label is not None
    missed = np.setdiff1d(np.arange(len(truth.labels)), label)
    alone = np.flatnonzero(label < 0)
    near = _pair_any_class(found[alone], truth, missed)
    other = np.full(len(found), -1)  # the label of another class
    other[alone[near >= 0]] = missed[near[near >= 0]]
    no_object = found.numpy()["no_object"].astype(float)
    no_box = _minus_log10(miss_probability(found.fields, truth, missed))
    rest = np.setdiff1d(missed, other)
    value = np.where(label >= 0, (1 - no_object) * surprise, _minus_log10(no_object))
    value[other >= 0] += no_box[other[other >= 0]]
    kind = np.where(label >= 0, "place", np.where(other >= 0, "class", "no label"))
    return Differences(
        frame=np.concatenate([found.numpy()["frame"], truth.frame[rest]]),
        box=np.concatenate([np.arange(len(found)), np.full(len(rest), -1)]),
        label=np.concatenate([np.maximum(label, other), rest]),
        kind=np.concatenate([kind, np.full(len(rest), "no box")]),
        value=np.concatenate([value, no_box[rest]]),
    )


def error_surprise(records: Records) -> Array:
    """Return -log10 P(an error as large as that of the worst field) (n,); 0 without a label."""
    assert records.scale is not None
    assert records.dof is not None
    columns = [i for i, name in enumerate(records.fields) if name not in ("vx", "vy")]
    ratios = np.abs(records.as_axes().errors / records.scale)[:, columns]  # (n, d)
    tail = np.nan_to_num(2 * stats.t.sf(ratios, np.array(records.dof)[columns]), nan=1.0)
    # the smallest of d probabilities is smaller than one alone
    return _minus_log10(-np.expm1(len(columns) * np.log1p(-tail.min(1).clip(max=1 - 1e-12))))


def iou_surprise(found: Detections, records: Records) -> Array:
    """Return -log10 P(an IoU as low as that of the pair) (n,)."""
    assert found.iou_below is not None
    thresholds = [0.0, *found.meta["error_model"]["thresholds"], 1.0]
    below = np.pad(found.iou_below.double().numpy(), ((0, 0), (1, 1)), constant_values=(0, 1))
    chance = [np.interp(iou, thresholds, row) for iou, row in zip(records.iou, below)]
    return -np.log10(np.clip(chance, 1e-9, 1))


def size_ratio(truth: GroundTruth) -> Array:
    """Return how much more usual the sides of a label (n,) are in any class than in its own."""
    x = np.log(truth.boxes[:, 3:6])
    any_size = log_density(x, truth.labels, np.full(len(x), -1))
    return any_size - log_density(x, truth.labels, truth.labels)


def _minus_log10(probability: Array) -> Array:
    found: Array = np.abs(-np.log10(np.clip(probability, 1e-30, 1.0)))  # no -0
    return found


def _pair_any_class(found: Detections, truth: GroundTruth, rows: Array) -> Array:
    """Return which of these labels (k,) each box is paired with (m,), of any class; -1 for none."""
    boxes, scores, frame = (found.numpy()[name] for name in ("boxes", "scores", "frame"))
    boxes, labels = boxes.astype(float), np.zeros(len(found), int)
    objects = truth.columns(found.fields)[rows], 0 * truth.labels[rows], truth.frame[rows]
    return pair_classes(found.fields, (boxes, scores, labels, frame), objects, _LIMIT)
