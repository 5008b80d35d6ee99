from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from boxcov.evaluate.pairing import pair_by_iou


def slow_iou(a, b) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def slow_coco(boxes, scores, frame, truth, truth_frame, limit):
    """The loop of COCO's evaluation, image by image: a later object wins a tie."""
    pairs = [-1] * len(boxes)
    for image in set(frame.tolist()):
        taken = set()
        mine = [i for i in range(len(boxes)) if frame[i] == image]
        for i in sorted(mine, key=lambda i: -scores[i]):
            best, match = limit, -1
            for k in range(len(truth)):
                if truth_frame[k] != image or k in taken:
                    continue
                iou = slow_iou(boxes[i], truth[k])
                if iou < best:
                    continue
                best, match = iou, k
            if match >= 0:
                pairs[i] = match
                taken.add(match)
    return pairs


def upright(rng, n: int) -> np.ndarray:
    corner = rng.integers(0, 3, (n, 2))
    return np.concatenate([corner, corner + rng.integers(1, 4, (n, 2))], 1).astype(float)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 14), st.integers(0, 9))
def test_pairs_by_overlap_equal_brute_force(seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    boxes, truth = (
        upright(rng, n),
        upright(rng, k),
    )  # on a small grid: equal overlaps, and some of exactly one half
    scores, frame, truth_frame = (
        rng.integers(0, 4, n) / 4,
        rng.integers(0, 3, n),
        rng.integers(0, 3, k),
    )
    found = pair_by_iou(boxes, scores, frame, truth, truth_frame)
    assert found.tolist() == slow_coco(boxes, scores, frame, truth, truth_frame, 0.5)


def test_one_half_is_enough() -> None:
    box, half = np.array([[0.0, 0, 2, 2]]), np.array([[0.0, 0, 2, 1]])
    assert pair_by_iou(box, np.ones(1), np.zeros(1), half, np.zeros(1)).tolist() == [0]
    assert pair_by_iou(box, np.ones(1), np.zeros(1), half, np.ones(1)).tolist() == [
        -1
    ]  # in another frame
