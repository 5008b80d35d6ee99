from __future__ import annotations

import numpy as np
import pytest
import shapely
from shapely.affinity import rotate, translate

from boxcov.evaluate.matching import iou_2d, iou_3d, iou_bev
from boxcov.outlines import corners


def rectangle(w: float, length: float, yaw: float) -> shapely.Polygon:
    return rotate(
        shapely.box(-length / 2, -w / 2, length / 2, w / 2), yaw, origin=(0, 0), use_radians=True
    )


def slow_bev(a, b) -> tuple[float, float]:
    """Intersection area and IoU of two boxes x y w l yaw by shapely, around the first centre."""
    first, second = rectangle(*a[2:]), translate(rectangle(*b[2:]), b[0] - a[0], b[1] - a[1])
    shared = first.intersection(second).area
    union = first.area + second.area - shared
    return shared, shared / union if union > 0 else 0.0


def slow_3d(a, b) -> float:
    plane = [0, 1, 3, 4, 6]
    shared, _ = slow_bev(a[plane], b[plane])
    bottom, top = max(a[2] - a[5] / 2, b[2] - b[5] / 2), min(a[2] + a[5] / 2, b[2] + b[5] / 2)
    volume = shared * max(top - bottom, 0)
    union = a[3] * a[4] * a[5] + b[3] * b[4] * b[5] - volume
    return volume / union if union > 0 else 0.0


def random_boxes(rng, n: int, spread: float) -> np.ndarray:
    centres, sizes = rng.normal(scale=spread, size=(n, 3)), rng.uniform(0.3, 5, (n, 3))
    return np.concatenate([centres, sizes, rng.uniform(-7, 7, (n, 1))], 1)


CAR = np.array([3.0, -2.0, 0.5, 1.9, 4.6, 1.6, 0.7])
FRONT = 4.6 * np.array([np.cos(0.7), np.sin(0.7)])  # one length ahead


def moved(*by: float) -> np.ndarray:
    return CAR + np.array(by)


CASES = {
    "identical": (CAR, CAR),
    "looking back": (CAR, moved(0, 0, 0, 0, 0, 0, np.pi)),
    "a quarter turned": (CAR, moved(0, 0, 0, 0, 0, 0, np.pi / 2)),
    "turned by hardly anything": (CAR, moved(0, 0, 0, 0, 0, 0, 1e-15)),
    "moved by hardly anything": (CAR, CAR + 1e-14),
    "touching corners": (np.array([0, 0, 0, 2, 2, 2, 0.0]), np.array([2, 2, 0, 2, 2, 2, 0.0])),
    "corner on an edge": (
        np.array([0, 0, 0, 2, 2, 2, 0.0]),
        np.array([1 + 2**0.5, 0, 0, 2, 2, 2, np.pi / 4]),
    ),
    "contained": (CAR, CAR * [1, 1, 1, 0.2, 0.2, 0.2, -3]),
    "sharing an edge from inside": (
        np.array([0, 0, 0, 2, 4, 2, 0.0]),
        np.array([0, 0.5, 0, 1, 4, 2, 0.0]),
    ),
    "far away": (CAR, moved(1e6, 0, 0, 0, 0, 0, 1)),
    "above": (CAR, moved(0, 0, 5, 0, 0, 0, 0)),
    "resting on it": (CAR, moved(0, 0, 1.6, 0, 0, 0, 0)),
    "no width": (CAR, CAR * [1, 1, 1, 0, 1, 1, 1]),
    "no size, both": (CAR * [1, 1, 1, 0, 0, 0, 1], CAR * [1, 1, 1, 0, 0, 0, 1]),
    "a hair": (CAR, CAR * [1, 1, 1, 1e-9, 1, 1, 1]),
    "a crossing of needles": (
        np.array([0, 0, 0, 1e-3, 100, 1, 0.4]),
        np.array([0, 0, 0, 1e-3, 100, 1, 0.4001]),
    ),
    "huge coordinates": (
        moved(2**40, -(2**41), 0, 0, 0, 0, 0),
        moved(2**40 + 1, -(2**41) + 0.5, 0.25, 0, 0, 0, 1),
    ),
    "huge angle": (CAR, moved(0, 0, 0, 0, 0, 0, 2 * np.pi * 1000)),
    "huge and small": (CAR, CAR * [1, 1, 1, 1e6, 1e6, 1e6, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_iou_agrees_with_shapely(name: str) -> None:
    a, b = CASES[name]
    plane = [0, 1, 3, 4, 6]
    for first, second in ((a, b), (b, a)):
        assert iou_bev(first[None], second[None])[0] == pytest.approx(
            slow_bev(first[plane], second[plane])[1], abs=1e-12, rel=1e-9
        )
        assert iou_3d(first[None], second[None])[0] == pytest.approx(
            slow_3d(first, second), abs=1e-12, rel=1e-9
        )


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 6.0])
def test_random_boxes_agree_with_shapely(spread: float) -> None:
    rng = np.random.default_rng(int(10 * spread))
    a, b = random_boxes(rng, 300, spread), random_boxes(rng, 300, spread)
    b[::3, 6] = a[::3, 6] + rng.integers(0, 4, 100) * np.pi / 2  # parallel edges
    b[::6, :6] = a[::6, :6]
    plane = [0, 1, 3, 4, 6]
    assert np.allclose(
        iou_bev(a, b), [slow_bev(p, q)[1] for p, q in zip(a[:, plane], b[:, plane])], atol=1e-12
    )
    assert np.allclose(iou_3d(a, b), [slow_3d(p, q) for p, q in zip(a, b)], atol=1e-12)
    assert np.array_equal(
        iou_bev(a[:, plane], b[:, plane]), iou_bev(np.pad(a, ((0, 0), (0, 2))), b)
    )
    assert np.allclose(iou_3d(a, b), iou_3d(b, a), atol=1e-12)


def test_iou_of_upright_boxes() -> None:
    rng = np.random.default_rng(0)
    corners = rng.integers(0, 6, (2, 400, 4)).astype(float)
    a, b = np.concatenate(
        [
            np.minimum(corners[..., :2], corners[..., 2:]),
            np.maximum(corners[..., :2], corners[..., 2:]),
        ],
        -1,
    )
    expected = []
    for p, q in zip(a, b):
        first, second = shapely.box(*p), shapely.box(*q)
        empty = first.area == 0 or second.area == 0
        expected.append(
            0.0 if empty else first.intersection(second).area / first.union(second).area
        )
    assert np.allclose(iou_2d(a, b), expected)
    assert iou_2d(np.array([[3.0, 3, 1, 1]]), np.array([[0.0, 0, 4, 4]])).tolist() == [
        0.0
    ]  # inside out


def test_nan_and_empty_arrays() -> None:
    odd = np.stack([CAR] * 4)
    odd[0, 0], odd[1, 3], odd[2, 4], odd[3, 5] = np.nan, np.inf, -1.0, -np.inf
    same = np.stack([CAR] * 4)
    assert iou_3d(odd, same).tolist() == iou_3d(same, odd).tolist() == [0.0] * 4
    assert iou_bev(odd[:3], same[:3]).tolist() == [0.0] * 3
    for iou, columns in ((iou_3d, 7), (iou_bev, 5), (iou_2d, 4)):
        assert iou(np.zeros((0, columns)), np.zeros((0, columns))).shape == (0,)


def test_boxes_end_to_end_do_not_overlap() -> None:
    """shapely fails here: rotated boxes that touch up to rounding may intersect completely."""
    ahead = moved(*FRONT, 0, 0, 0, 0, 0)[None]
    assert iou_bev(CAR[None], ahead)[0] == pytest.approx(0, abs=1e-15)
    assert iou_3d(ahead, CAR[None])[0] == pytest.approx(0, abs=1e-15)


def test_corners_turn_with_the_heading() -> None:
    (corner,) = corners(np.array([[1.0, 2.0, 2.0, 4.0, np.pi / 2]]))
    np.testing.assert_allclose(corner, [[0, 4], [2, 4], [2, 0], [0, 0], [0, 4]], atol=1e-12)
