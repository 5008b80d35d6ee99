from __future__ import annotations

from math import gamma

import numpy as np
import pytest
from numpy.testing import assert_allclose

from boxcov import BoxcovError
from boxcov.evaluate.expected_iou import expected_iou, nodes, relative_covariance
from boxcov.evaluate.matching import iou_2d, iou_3d, iou_bev

SPACE = ("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")
PLANE = ("x", "y", "w", "l", "yaw")
IMAGE = ("x1", "y1", "x2", "y2")
IOU = {SPACE: iou_3d, PLANE: iou_bev, IMAGE: iou_2d}
ALL = pytest.mark.parametrize("fields", [SPACE, PLANE, IMAGE], ids=["space", "plane", "image"])


def some(
    fields: tuple[str, ...], scale: float, n: int = 12, rank: int | None = None, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Boxes (n, D) and roots (n, D, rank) of covariances; ``scale`` is relative to the size."""
    rng = np.random.default_rng(seed)
    if fields == IMAGE:
        corner, size = rng.uniform(0, 500, (n, 2)), np.exp(rng.normal(3.5, 0.8, (n, 2)))
        boxes, unit = np.concatenate([corner, corner + size], 1), np.tile(size, 2)
    else:
        w, l, h = np.exp(rng.normal([[0.5], [1.2], [0.5]], 0.4, (3, n)))
        place, one = rng.uniform(-50, 50, (3, n)), np.ones(n)
        values = {
            "x": place[0],
            "y": place[1],
            "z": place[2],
            "w": w,
            "l": l,
            "h": h,
            "yaw": rng.uniform(-3, 3, n),
            "vx": one,
            "vy": one,
        }
        units = {
            "x": w,
            "y": w,
            "z": h,
            "w": w,
            "l": l,
            "h": h,
            "yaw": one / 2,
            "vx": one,
            "vy": one,
        }
        boxes, unit = (np.stack([table[name] for name in fields], 1) for table in (values, units))
    D = len(fields)
    A = rng.normal(size=(n, D, rank or 2 * D)) / np.sqrt(rank or 2 * D)
    return boxes, A * (scale * unit)[:, :, None]


def sampled(
    boxes: np.ndarray, A: np.ndarray, fields: tuple[str, ...], draws: int = 20_000
) -> np.ndarray:
    rng = np.random.default_rng(1)
    found = [
        IOU[fields](
            np.tile(box, (draws, 1)), box + rng.normal(size=(draws, a.shape[1])) @ a.T
        ).mean()
        for box, a in zip(boxes, A)
    ]
    return np.array(found)


@ALL
@pytest.mark.parametrize(
    ("scale", "tolerance"), [(0.01, 0.002), (0.05, 0.008), (0.2, 0.02), (0.5, 0.03)]
)
def test_against_sampling(fields: tuple[str, ...], scale: float, tolerance: float) -> None:
    boxes, A = some(fields, scale)
    truth, covariance = sampled(boxes, A, fields), A @ A.transpose(0, 2, 1)
    assert np.abs(expected_iou(boxes, covariance, fields) - truth).max() < tolerance


@ALL
@pytest.mark.parametrize(("rank", "most"), [(1, 0.04), (3, 0.025)])
def test_singular_covariances(fields: tuple[str, ...], rank: int, most: float) -> None:
    """A sample covariance of k samples has rank k - 1."""
    boxes, A = some(fields, 0.1, rank=rank)
    assert (
        np.abs(
            expected_iou(boxes, A @ A.transpose(0, 2, 1), fields) - sampled(boxes, A, fields)
        ).max()
        < most
    )


@ALL
def test_zero_covariance_and_no_boxes(fields: tuple[str, ...]) -> None:
    boxes, A = some(fields, 0.1)
    assert (expected_iou(boxes, np.zeros((12, len(fields), len(fields))), fields) == 1).all()
    assert expected_iou(boxes[:0], A[:0] @ A[:0].transpose(0, 2, 1), fields).shape == (0,)


def test_a_larger_covariance_lowers_the_expected_iou() -> None:
    boxes, A = some(SPACE, 0.02)
    found = [expected_iou(boxes, s**2 * A @ A.transpose(0, 2, 1), SPACE) for s in (0.5, 1, 2, 4, 8)]
    assert (np.diff(found, axis=0) < 0).all()


def test_invariant_to_scale_position_and_heading() -> None:
    boxes, A = some(PLANE, 0.1)
    covariance = A @ A.transpose(0, 2, 1)
    plain = expected_iou(boxes, covariance, PLANE)
    turn = 0.7
    J = np.eye(5)
    J[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    J[:4] *= 10.0  # in decimetres
    moved = boxes @ J.T + [3.0, 4.0, 0, 0, turn]
    assert np.allclose(expected_iou(moved, J @ covariance @ J.T, PLANE), plain, atol=1e-12)


def test_velocities_are_ignored() -> None:
    boxes, A = some(SPACE, 0.1)
    covariance = A @ A.transpose(0, 2, 1)
    plain = expected_iou(boxes, covariance, SPACE)
    covariance[:, 7:, 7:] += 100 * np.eye(2)
    # sums over arrays of another shape may be taken in another order
    assert_allclose(expected_iou(boxes, covariance, SPACE), plain, rtol=1e-12)
    assert_allclose(expected_iou(boxes[:, :7], covariance[:, :7, :7], SPACE[:7]), plain, rtol=1e-12)


def test_one_dimension_by_hand() -> None:
    """Only x1 moves, by up to a few per cent: IoU = 1 - |d| / w inside, w / (w + |d|) outside."""
    box, sd = np.array([[0.0, 0.0, 10.0, 5.0]]), 0.3
    covariance = np.zeros((1, 4, 4))
    covariance[0, 0, 0] = sd**2
    d = np.linspace(0, 8 * sd, 20001)
    density = 2 * np.exp(-((d / sd) ** 2) / 2) / (sd * np.sqrt(2 * np.pi))
    exact = np.trapezoid(density * ((1 - d / 10) + 10 / (10 + d)) / 2, d)
    assert expected_iou(box, covariance, IMAGE)[0] == pytest.approx(exact, abs=1e-3)


def test_flat_and_not_finite_boxes() -> None:
    boxes = np.array([[0.0, 0, 4, 4], [4.0, 0, 0, 4], [0.0, 0, np.nan, 4], [0.0, 0, 4, 4]])
    covariance = np.stack([np.eye(4) * 0.01] * 4)
    covariance[3, 0, 0] = np.inf
    found = expected_iou(boxes, covariance, IMAGE)
    assert 0.9 < found[0] < 1
    assert found[1] == 0
    assert np.isnan(found[2:]).all()


def test_float32_with_eigenvalues_below_zero() -> None:
    boxes, A = some(SPACE, 0.1, rank=2)
    covariance = (A @ A.transpose(0, 2, 1)).astype(np.float32)
    assert np.allclose(
        expected_iou(boxes, covariance, SPACE),
        expected_iou(boxes, A @ A.transpose(0, 2, 1), SPACE),
        atol=1e-4,
    )


@pytest.mark.parametrize("d", [4, 5, 7])
def test_nodes_have_the_moments_of_a_normal(d: int) -> None:
    points, weights = nodes(d)
    length = np.linalg.norm(points, axis=1)
    assert (weights > 0).all()
    for power in range(4):  # two radii: exact to the third power
        assert weights @ length**power == pytest.approx(
            2 ** (power / 2) * gamma((d + power) / 2) / gamma(d / 2)
        )
    assert np.allclose((weights[:, None] * points).T @ points, np.eye(d), atol=1e-8)
    assert np.allclose(weights @ points, 0, atol=1e-12)


def test_relative_covariance_is_that_of_relative_draws() -> None:
    boxes, A = some(SPACE, 1e-3, n=3)
    sizes, found = relative_covariance(boxes, A @ A.transpose(0, 2, 1), SPACE)
    rng = np.random.default_rng(0)
    for box, a, size, C in zip(boxes, A, sizes, found):
        moved = rng.normal(size=(200_000, a.shape[1])) @ a.T
        x, y, z, w, l, h, yaw = moved.T[:7]
        cos, sin = np.cos(box[6]), np.sin(box[6])
        along, across = cos * x + sin * y, cos * y - sin * x
        own = np.stack(
            [
                along / size[0],
                across / size[1],
                z / size[2],
                l / size[0],
                w / size[1],
                h / size[2],
                yaw,
            ],
            1,
        )
        assert np.linalg.norm(np.cov(own.T) - C) < 0.02 * np.linalg.norm(C)


def test_wrong_fields_and_shapes_are_refused() -> None:
    with pytest.raises(BoxcovError, match=r"the IoU takes boxes of .*; these are x y"):
        expected_iou(np.zeros((1, 2)), np.zeros((1, 2, 2)), ("x", "y"))
    with pytest.raises(BoxcovError, match="have shapes"):
        expected_iou(np.zeros((1, 4)), np.zeros((2, 4, 4)), IMAGE)
