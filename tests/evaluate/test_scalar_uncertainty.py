from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from boxcov import BoxcovError
from boxcov.evaluate.curves import curves
from boxcov.evaluate.expected_iou import expected_iou
from boxcov.evaluate.matching import match
from boxcov.evaluate.records import Records
from boxcov.evaluate.scalar_uncertainty import (
    ScalarUncertainty,
    log_determinant,
    relative_trace,
    trace,
    uncertainty_of,
)
from boxcov.evaluate.summary import summarise

FIELDS = ("x", "y", "z", "w", "l", "h", "yaw")


def records(n: int = 60, seed: int = 0) -> Records:
    rng = np.random.default_rng(seed)
    boxes = np.concatenate(
        [
            rng.uniform(-20, 20, (n, 3)),
            np.exp(rng.normal(1, 0.3, (n, 3))),
            rng.uniform(-3, 3, (n, 1)),
        ],
        1,
    )
    A = rng.normal(size=(n, 7, 9)) * np.exp(rng.normal(-2, 1, (n, 1, 1)))
    truth = boxes + rng.normal(size=(n, 7)) * 0.2
    zero, frame = np.zeros(n, int), np.arange(n) // 6
    C = A @ A.transpose(0, 2, 1)
    return match(
        boxes,
        rng.uniform(0.2, 1, n),
        zero,
        frame,
        truth,
        zero,
        frame,
        FIELDS,
        ("car",),
        trace(C),
        C,
        score_variance=rng.gamma(2, size=n),
    )


@pytest.mark.parametrize("name", ScalarUncertainty.__args__)
def test_each_kind_works_in_tables_and_curves(name: ScalarUncertainty) -> None:
    found = records()
    u = uncertainty_of(found, name)
    assert u.shape == (60,)
    assert (u >= 0).all()
    one = found.with_uncertainty(u)
    assert summarise(one, replicates=3)["AUROC"]["l2"]["value"] is not None
    curves(one.iou, one.l2, one.uncertainty)


def test_names_select_their_functions() -> None:
    found = records()
    assert np.array_equal(uncertainty_of(found), found.uncertainty)
    assert np.array_equal(
        uncertainty_of(found, "expected-iou"),
        1 - expected_iou(found.boxes, found.covariance, FIELDS),
    )
    assert np.array_equal(uncertainty_of(found, "score-variance"), found.score_variance)
    assert np.allclose(
        7 * np.log(uncertainty_of(found, "logdet")), np.linalg.slogdet(found.covariance)[1]
    )
    order = np.argsort(uncertainty_of(found, "logdet"))
    assert np.array_equal(order, np.argsort(log_determinant(found.covariance)))


def test_relative_trace_by_sampling_logarithms() -> None:
    found = records(4)
    small = found.covariance * 1e-6
    rng = np.random.default_rng(0)
    for box, C, value in zip(found.boxes, small, relative_trace(found.boxes, small, FIELDS)):
        drawn = rng.multivariate_normal(box, C, 100_000)
        x, y = (drawn - box).T[:2]
        cos, sin = np.cos(box[6]), np.sin(box[6])
        parts = [
            (cos * x + sin * y) / box[4],
            (cos * y - sin * x) / box[3],
            drawn[:, 2] / box[5],
            *np.log(drawn[:, 3:6]).T,
        ]
        assert value == pytest.approx(sum(part.var() for part in parts), rel=0.03)


def test_relative_trace_of_image_boxes() -> None:
    boxes = np.array([[10.0, 20.0, 30.0, 60.0]])
    J = np.array([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [-1.0, 0, 1, 0], [0, -1, 0, 1]]) / np.array(
        [[20], [40], [20], [40]]
    )
    C = np.cov(np.random.default_rng(0).normal(size=(4, 9)))[None]
    assert relative_trace(boxes, C, ("x1", "y1", "x2", "y2"))[0] == pytest.approx(
        np.trace(J @ C[0] @ J.T)
    )


def test_relative_trace_has_no_unit() -> None:
    found = records()
    s = np.array([10.0] * 6 + [1.0])
    scaled = relative_trace(found.boxes * s, found.covariance * s[:, None] * s, FIELDS)
    assert np.allclose(scaled, relative_trace(found.boxes, found.covariance, FIELDS))


def test_flat_boxes_and_nan() -> None:
    boxes = np.array([[0.0, 0, 4, 4], [4.0, 0, 0, 4], [0.0, 0, np.nan, 4]])
    found = relative_trace(boxes, np.stack([np.eye(4)] * 3), ("x1", "y1", "x2", "y2"))
    assert np.isfinite(found[0])
    assert found[1] == np.inf
    assert np.isnan(found[2])
    assert np.isnan(log_determinant(np.full((1, 2, 2), np.nan))[0])


def test_log_determinant_of_regular_and_singular_matrices() -> None:
    C = records().covariance
    assert np.allclose(log_determinant(C), np.linalg.slogdet(C)[1])
    floored = log_determinant(np.zeros((1, 3, 3)), min_eigenvalue=1e-4)
    assert floored[0] == pytest.approx(3 * np.log(1e-4))
    assert log_determinant(C[:0]).shape == (0,)


def test_wrong_names_and_missing_arrays_are_refused() -> None:
    found = records(6)
    with pytest.raises(BoxcovError, match="unknown uncertainty 'size': choose from trace"):
        uncertainty_of(found, "size")  # type: ignore[arg-type]
    with pytest.raises(BoxcovError, match="boxcov predict --with-logit"):
        uncertainty_of(replace(found, score_variance=None), "score-variance")
    with pytest.raises(BoxcovError, match="no covariance to compute relative from"):
        uncertainty_of(found.without_covariance(found.uncertainty), "relative")
    with pytest.raises(BoxcovError, match="min_eigenvalue must be above 0"):
        log_determinant(found.covariance, min_eigenvalue=0)
