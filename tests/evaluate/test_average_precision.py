from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from boxcov.concatenation import concatenate
from boxcov.data.poses import BOX_FIELDS
from boxcov.detections import Detections
from boxcov.evaluate.average_precision import average_precision, mean_precision
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.matching import pair_classes


class Boxes(NamedTuple):
    """The boxes of one frame: centres (n, 2), labels (n,), scores or numbers of points (n,)."""

    centres: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


def precision(found: list[Boxes], truth: list[Boxes], classes: list[str]) -> dict:
    """``average_precision`` of frames."""
    detections, frames = [], []
    for number, (boxes, objects) in enumerate(zip(found, truth)):
        frame = torch.full((len(boxes.labels),), number)
        labels, scores = torch.tensor(boxes.labels).long(), torch.tensor(boxes.weights)
        names = (BOX_FIELDS, tuple(classes))
        detections.append(Detections(padded(boxes), scores, labels, frame, *names))
        target = {"boxes": padded(objects), "labels": torch.tensor(objects.labels).long()}
        frames.append(([], [{**target, "points": torch.tensor(objects.weights)}]))
    return average_precision(concatenate(detections), GroundTruth.from_frames(frames))


def padded(boxes: Boxes) -> torch.Tensor:
    return torch.nn.functional.pad(torch.tensor(boxes.centres), (0, 7))


def slow_pairing(centres, scores, frame, truth, truth_frame, limit):
    """Loops and lists."""
    taken, pairs = set(), [-1] * len(centres)
    for i in sorted(range(len(centres)), key=lambda i: (-scores[i], i)):
        best, nearest = limit, None
        for k in range(len(truth)):
            distance = float(((truth[k] - centres[i]) ** 2).sum() ** 0.5)
            if k not in taken and truth_frame[k] == frame[i] and distance < best:
                best, nearest = distance, k
        if nearest is not None:
            pairs[i] = nearest
            taken.add(nearest)
    return pairs


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.integers(0, 9))
def test_pairs_equal_brute_force(seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    centres, truth = (
        rng.integers(0, 5, (n, 2)).astype(float),
        rng.integers(0, 5, (k, 2)) + 0.25 * rng.random((k, 2)),
    )
    scores = rng.integers(0, 4, n) / 4  # with ties
    frame, truth_frame = rng.integers(0, 3, n), rng.integers(0, 3, k)
    objects = truth, 0 * truth_frame, truth_frame
    found = pair_classes(("x", "y"), (centres, scores, 0 * frame, frame), objects, 2.0)
    assert found.tolist() == slow_pairing(centres, scores, frame, truth, truth_frame, 2.0)


def frames_of(
    rng, count: int, noise: float, miss: float, extra: int
) -> tuple[list[Boxes], list[Boxes]]:
    found, truth = [], []
    for _ in range(count):
        n = rng.integers(1, 6)
        centres, labels = rng.uniform(-25, 25, (n, 2)), rng.integers(0, 2, n)
        truth.append(Boxes(centres, labels, np.ones(n)))
        kept = rng.random(n) > miss
        moved = centres[kept] + noise * rng.normal(size=(int(kept.sum()), 2))
        ghosts = rng.uniform(-25, 25, (extra, 2))
        all_labels = np.concatenate([labels[kept], rng.integers(0, 2, extra)])
        found.append(
            Boxes(np.concatenate([moved, ghosts]), all_labels, rng.random(len(all_labels)))
        )
    return found, truth


def slow_area(hit: list[bool], objects: int) -> float:
    recall, precision = [], []
    hits = 0
    for i, yes in enumerate(hit):
        hits += yes
        recall.append(hits / objects)
        precision.append(hits / (i + 1))
    values = []
    for r in np.linspace(0, 1, 101)[11:]:
        p = np.interp(r, recall, precision) if r <= recall[-1] else 0.0
        values.append(max(p - 0.1, 0))
    return sum(values) / len(values) / 0.9


@pytest.mark.parametrize("seed", range(4))
def test_precision_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found, truth = frames_of(rng, 12, noise=0.6, miss=0.2, extra=2)
    table = precision(found, truth, ["car", "truck"])
    for label, name in enumerate(["car", "truck"]):
        flat = [
            (b.weights[i], f, b.centres[i])
            for f, b in enumerate(found)
            for i in range(len(b.labels))
            if b.labels[i] == label
        ]
        flat.sort(key=lambda entry: -entry[0])
        objects = [
            (f, b.centres[i])
            for f, b in enumerate(truth)
            for i in range(len(b.labels))
            if b.labels[i] == label
        ]
        for limit, ap in table[name].items():
            pairs = slow_pairing(
                [c for *_, c in flat],
                [s for s, *_ in flat],
                [f for _, f, _ in flat],
                [c for _, c in objects],
                [f for f, _ in objects],
                limit,
            )
            assert ap == pytest.approx(slow_area([p >= 0 for p in pairs], len(objects)))


def test_perfect_empty_and_absent_classes() -> None:
    truth = [Boxes(np.array([[1.0, 2.0], [30.0, 1.0]]), np.array([0, 1]), np.array([5, 0]))]
    assert (
        mean_precision(precision(truth, truth, ["car", "bus"])) == 1.0
    )  # an object without a point does not count
    nothing = [Boxes(np.zeros((0, 2)), np.zeros(0), np.zeros(0))]
    assert precision(nothing, truth, ["car"])["car"] == {
        0.5: 0.0,
        1.0: 0.0,
        2.0: 0.0,
        4.0: 0.0,
    }
    assert np.isnan(mean_precision(precision(nothing, nothing, ["car"])))


def test_classes_count_within_their_range() -> None:
    far = [Boxes(np.array([[45.0, 0.0]]), np.array([0]), np.ones(1))]
    assert precision(far, far, ["car"])["car"][2.0] == 1.0
    assert np.isnan(precision(far, far, ["pedestrian"])["pedestrian"][2.0])
