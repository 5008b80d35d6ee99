from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize

from boxcov import BoxcovError
from boxcov.evaluate.baselines import (
    covariance_features,
    features,
    logistic_regression,
    one_minus_score,
    out_of_fold,
    score_and_size,
    signal_features,
    signals_alone,
)
from boxcov.evaluate.quality import auroc
from boxcov.evaluate.records import Records

FIELDS = ("x", "y", "z", "w", "l", "h", "yaw")


def some_records(rng, n: int = 400, frames: int = 40) -> Records:
    """Boxes whose accuracy depends on score, size and variance alike."""
    boxes = np.concatenate(
        [rng.uniform(-40, 40, (n, 3)), rng.uniform(0.5, 5, (n, 3)), rng.normal(size=(n, 1))], 1
    )
    score, variance = rng.uniform(0.1, 1, n), rng.gamma(1, 1, n)
    logit = 4 * score + np.log(boxes[:, 4]) - np.log(variance) - 3
    good = rng.random(n) < 1 / (1 + np.exp(-logit))
    return Records(
        fields=FIELDS,
        classes=("car", "bus"),
        boxes=boxes,
        uncertainty=variance * 7,
        scores=score.astype(np.float32),
        labels=rng.integers(0, 2, n),
        frame=rng.integers(0, frames, n),
        truth=boxes + 0.1,
        iou=np.where(good, 0.8, 0.1),
        l2=np.where(good, 0.1, 1.0),
        covariance=variance[:, None, None] * np.eye(7),
    )


@pytest.mark.parametrize("penalty", [0.01, 1.0, 30.0])
def test_regression_minimises_the_penalised_loss(penalty: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 4))
    y = rng.random(150) < 1 / (1 + np.exp(-(X @ [3.0, -1, 0, 0.5] + 1)))

    def loss(w):
        z = X @ w[1:] + w[0]
        return np.logaddexp(0, np.where(y, -z, z)).sum() + penalty / 2 * (w[1:] ** 2).sum()

    best = optimize.minimize(loss, np.zeros(5), tol=1e-12)
    assert np.allclose(logistic_regression(X, y, penalty), best.x, atol=1e-4)


def test_regression_of_separable_and_constant_columns() -> None:
    x = np.linspace(-1, 1, 40)
    weights = logistic_regression(
        np.stack([x, np.zeros(40), x], 1), x > 0
    )  # separable, constant, twice the same
    assert np.isfinite(weights).all()
    assert weights[1] == pytest.approx(weights[3])
    assert abs(weights[2]) < 1e-9
    assert auroc(x > 0, np.stack([x, np.zeros(40), x], 1) @ weights[1:]) == 1


def test_more_columns_improve_the_auroc() -> None:
    found = some_records(np.random.default_rng(0), 3000)
    bad = found.iou < 0.4
    plain = auroc(bad, one_minus_score(found).uncertainty)
    size = auroc(bad, score_and_size(found).uncertainty)
    everything = auroc(bad, score_and_size(found, covariance_features(found)).uncertainty)
    assert plain + 0.02 < size < everything - 0.02
    assert one_minus_score(found).uncertainty == pytest.approx(1 - found.scores)
    assert score_and_size(found).covariance is None
    assert features(found).shape == (3000, 1 + 3 + 1 + 2)
    assert covariance_features(found).shape == (3000, 7)
    assert covariance_features(replace(found, score_variance=np.ones(3000))).shape == (3000, 8)
    with pytest.raises(BoxcovError, match="no covariance to take variances from"):
        covariance_features(one_minus_score(found))


@pytest.mark.parametrize("n", [400, 1200])
def test_many_classes_do_not_spoil_the_score(n: int) -> None:
    """80 classes that say nothing: one column each once cost 0.03 of AUROC."""
    lost = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        found = some_records(rng, n, frames=n // 5)
        score = rng.uniform(0.1, 1, n)
        bad = rng.random(n) < 1 / (1 + np.exp(8 * score - 4))
        labels = rng.choice(80, n, p=rng.dirichlet(np.full(80, 0.3)))
        iou, names = np.where(bad, 0.1, 0.8), tuple(f"class {i}" for i in range(80))
        found = replace(found, classes=names, labels=labels, scores=score, iou=iou)
        plain, size = (auroc(bad, f(found).uncertainty) for f in (one_minus_score, score_and_size))
        lost.append(plain - size)
    assert np.mean(lost) < 0.006


def test_classes_that_matter_are_used() -> None:
    rng = np.random.default_rng(0)
    found = some_records(rng, 2000)
    labels = rng.integers(0, 80, 2000)
    bad = rng.random(2000) < 1 / (1 + np.exp(4 * found.scores - 2 + rng.normal(0, 3, 80)[labels]))
    iou, names = np.where(bad, 0.1, 0.8), tuple(f"class {i}" for i in range(80))
    found = replace(found, classes=names, labels=labels, iou=iou)
    plain, size = (auroc(bad, f(found).uncertainty) for f in (one_minus_score, score_and_size))
    assert size > plain + 0.1


def test_signals_are_baselines() -> None:
    rng = np.random.default_rng(0)
    found = some_records(rng, 1500)
    bad = found.iou < 0.4
    spread = np.stack([bad + rng.normal(0, 0.7, 1500), rng.normal(size=1500)], 1)
    spread[0] = np.nan, np.inf
    found = replace(found, signals=spread)
    alone = auroc(bad, signals_alone(found).uncertainty)
    both = auroc(bad, score_and_size(found, signal_features(found)).uncertainty)
    assert auroc(bad, score_and_size(found).uncertainty) < both
    assert 0.75 < alone < both
    assert signals_alone(found).signals is None
    with pytest.raises(BoxcovError, match="no signals"):
        signals_alone(replace(found, signals=None))


def test_nothing_is_learnt_from_noise() -> None:
    """Frame number, 30 useless columns and few rows: on its own frames the fit looks good."""
    rng = np.random.default_rng(0)
    frame = np.repeat(np.arange(40), 3)
    bad = (rng.random(40) < 0.5)[frame]  # all boxes of a frame are alike
    columns = np.concatenate([rng.normal(size=(40, 30))[frame], frame[:, None]], 1)
    assert auroc(bad, columns @ logistic_regression(columns, bad)[1:]) > 0.9
    honest = [auroc(bad, out_of_fold(columns, bad, frame, seed=seed)) for seed in range(10)]
    assert np.mean(honest) < 0.65


def test_probabilities_come_from_other_frames() -> None:
    rng = np.random.default_rng(0)
    frame, X, bad = np.repeat(np.arange(6), 10), rng.normal(size=(60, 2)), rng.random(60) < 0.4
    before = out_of_fold(X, bad, frame, folds=6)
    for number in range(6):
        flipped = np.where(
            frame == number, ~bad, bad
        )  # a frame's answers do not reach its own boxes
        after = out_of_fold(X, flipped, frame, folds=6)
        assert np.array_equal(before[frame == number], after[frame == number])
        assert not np.array_equal(before, after)
    moved = X.copy()
    moved[0] = 50.0  # nor does a box reach the others of its frame, by the scaling of the columns
    assert np.array_equal(out_of_fold(moved, bad, frame, folds=6)[1:10], before[1:10])


def test_edges() -> None:
    assert out_of_fold(np.zeros((0, 2)), np.zeros(0), np.zeros(0)).shape == (0,)
    assert (
        out_of_fold(np.ones((3, 1)), np.array([1, 0, 1]), np.zeros(3)).tolist() == [0.5] * 3
    )  # one frame: nothing to learn from
    all_bad = out_of_fold(np.ones((4, 1)), np.ones(4), np.arange(4))
    assert all_bad == pytest.approx(3.5 / 4)
    extreme = some_records(np.random.default_rng(0), 5)
    assert np.isfinite(
        features(Records(**{**vars(extreme), "scores": np.array([0, 1, 0.5, 0, 1.0])}))
    ).all()
    wild = some_records(np.random.default_rng(0), 60)
    wild.boxes[0, :6], wild.boxes[1, :6] = np.inf, np.nan
    assert np.isfinite(score_and_size(wild).uncertainty).all()
    image = Records(
        **{
            **vars(extreme),
            "fields": ("x1", "y1", "x2", "y2"),
            "boxes": np.array([[0, 0, 2, 3.0]] * 5),
        }
    )
    assert features(image).shape == (5, 5)
    assert features(image)[0, 1:3] == pytest.approx(np.log([2, 3]))
