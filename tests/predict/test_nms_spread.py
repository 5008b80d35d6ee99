"""The spread of the boxes that NMS removed, against a loop over all candidates."""

from __future__ import annotations

from dataclasses import replace
from math import pi

import pytest
import torch

from boxcov import BoxcovError, NMSSpread
from boxcov.detectors.nms import rotated_iou
from boxcov.detectors.tiny import TinyCenter
from helpers.centerpoint_cases import cloud, detector_of, pillar_config


def case(**rules):
    """A detector with many overlapping boxes on a map of 8 x 8 cells, and two frames."""
    config = pillar_config()
    config = replace(
        config, reporting=replace(config.reporting, **{"max_boxes": 83, "threshold": 0.4, **rules})
    )
    detector = detector_of(config, seed=1)
    with torch.no_grad():
        for task in detector.head.branches():  # sizes, scores and headings that differ
            for name, factor in (("dim", 3), ("heatmap", 4), ("reg", 3), ("rot", 5)):
                task[name][-1].weight *= factor
            task["dim"][-1].bias += 0.7  # and that reach the next cell
    return detector, [cloud(config, 0), cloud(config, 1)]


def suppressing(better, worse, task, rules):
    """Which of the boxes (n, D) suppress one box (D,)."""
    if rules.nms == "circle":
        return (
            ((better[:, :2] - worse[:2]).square().sum(1) <= rules.radii[task])
            .nonzero()[:, 0]
            .tolist()
        )
    flat = better[:, [0, 1, 3, 4, 6]]
    return (
        (rotated_iou(flat, worse[[0, 1, 3, 4, 6]].expand_as(flat)) > rules.overlap)
        .nonzero()[:, 0]
        .tolist()
    )


def slow_spread(detector, inputs):
    """Covariances (m, D, D) and the number of candidates each box removed, by a plain loop."""
    raw = detector(inputs)
    found, every = detector.select(raw), detector.candidates(raw)
    boxes, others = detector.decode(raw, found), detector.decode(raw, every)
    cells = [
        list(
            zip(
                *(
                    x.tolist()
                    for x in (s.frame, s.where.task, s.where.row, s.where.column, s.labels)
                )
            )
        )
        for s in (found, every)
    ]
    out, counts, weight = (
        torch.zeros(len(found), 9, 9).double(),
        torch.zeros(len(found)),
        torch.zeros(len(found)).double(),
    )
    for c, cell in enumerate(cells[1]):
        if cell in cells[0]:
            continue
        # frames apart, tasks apart; by falling score, so the first one is the best
        rivals = [
            r
            for r in range(len(found))
            if cells[0][r][:2] == cell[:2] and found.scores[r] >= every.scores[c]
        ]
        hits = suppressing(boxes[rivals], others[c], cell[1], detector.config.reporting)
        if not hits:
            continue
        by = rivals[hits[0]]
        delta = (others[c] - boxes[by]).double()
        delta[6] = (delta[6] + pi) % (2 * pi) - pi
        out[by] += every.scores[c] * torch.outer(delta, delta)
        weight[by] += every.scores[c]
        counts[by] += 1
    return torch.where(
        counts[:, None, None] > 0, out / weight.clamp(min=1e-30)[:, None, None], 0.0
    ), counts


@pytest.mark.parametrize(
    "rules",
    [{}, {"nms": "circle"}, {"max_boxes": 2}, {"per_class": False}],
    ids=["iou", "circle", "few boxes", "one class"],
)
def test_the_spread_equals_a_loop_over_candidates(rules) -> None:
    detector, inputs = case(**rules)
    with torch.no_grad():
        expected, counts = slow_spread(detector, inputs)
    found = NMSSpread(detector)(inputs)
    torch.testing.assert_close(found.covariance.double(), expected, rtol=1e-4, atol=1e-5)
    assert int((counts > 1).sum()) >= 2
    assert int((found.uncertainty > 0).sum()) >= 2
    assert found.meta["method"] == "nms"


def test_plain_boxes_and_zero_where_nothing_was_removed() -> None:
    detector, inputs = case()
    plain, found = detector.detect(inputs), NMSSpread(detector)(inputs)
    for name in ("boxes", "scores", "labels", "frame"):
        assert torch.equal(getattr(found, name), getattr(plain, name))
    with torch.no_grad():
        _, counts = slow_spread(detector, inputs)
    assert bool((counts == 0).any())
    assert not bool(found.covariance[counts == 0].any())
    assert bool((found.uncertainty[counts > 0] > 0).any())


def test_candidates_hold_every_reported_instance() -> None:
    detector, inputs = case()
    with torch.no_grad():
        raw = detector(inputs)
        found, every = detector.select(raw), detector.candidates(raw)
    assert bool((every.scores > detector.config.reporting.threshold).all())
    assert int((every.removed_by == -1).sum()) == len(
        found
    )  # nothing else was lost: no limit on their number cut in
    assert torch.equal(every.scores[every.removed_by == -1], found.scores)
    assert torch.equal(
        every.frame[every.removed_by >= 0], found.frame[every.removed_by[every.removed_by >= 0]]
    )


def test_no_boxes_no_covariance() -> None:
    detector, inputs = case(threshold=0.9999999)
    assert NMSSpread(detector)(inputs).covariance.shape == (0, 9, 9)


def test_a_detector_without_candidates_is_refused() -> None:
    with pytest.raises(
        BoxcovError,
        match=r"NMSSpread needs the boxes that NMS removes: TinyCenter has no candidates\(\)",
    ):
        NMSSpread(TinyCenter())
