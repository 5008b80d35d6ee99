from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from boxcov import BoxcovError
from boxcov.error_model.risk import PENALTIES, Risk, fit_risk
from boxcov.evaluate.ranking import auroc
from boxcov.evaluate.records import Records

FIELDS = ("x", "y", "z", "w", "l", "h", "yaw")
TRUE = {
    "score": -1.5,
    "l": -0.8,
    "variance x": 0.7,
    "variance yaw": 0.4,
}  # of the log-odds, for columns as they are


def drawn(
    n: int = 4000,
    frames: int = 400,
    seed: int = 0,
    paired: float = 1.0,
    classes: tuple[str, ...] = ("car", "bus"),
) -> Records:
    """Boxes that are inaccurate with known log-odds."""
    rng = np.random.default_rng(seed)
    boxes = np.concatenate(
        [
            rng.uniform(-40, 40, (n, 3)),
            np.exp(rng.normal(1, 0.5, (n, 3))),
            rng.uniform(-3, 3, (n, 1)),
        ],
        1,
    )
    variance, logit = np.exp(rng.normal(-2, 1, (n, 7))), rng.normal(0, 1, n)
    odds = TRUE["score"] * logit + TRUE["l"] * np.log(boxes[:, 4])
    odds += (
        TRUE["variance x"] * np.log(variance[:, 0])
        + TRUE["variance yaw"] * np.log(variance[:, 6])
        + 2.5
    )
    bad = rng.random(n) < 1 / (1 + np.exp(-odds))
    alone = rng.random(n) >= paired
    return Records(
        fields=FIELDS,
        classes=classes,
        boxes=boxes,
        uncertainty=variance.sum(1),
        scores=1 / (1 + np.exp(-logit)),
        labels=rng.integers(0, len(classes), n),
        frame=rng.integers(0, frames, n),
        truth=np.where(alone[:, None], np.nan, boxes),
        iou=np.where(alone, 0.0, np.where(bad, 0.1, 0.8)),
        l2=np.where(alone, np.nan, np.where(bad, 2.0, 0.1)),
        covariance=variance[:, :, None] * np.eye(7),
    )


def test_known_coefficients_are_recovered() -> None:
    found = drawn(40_000)
    risk = fit_risk(found)
    slopes = dict(zip(risk.columns, np.array(risk.weights) / risk.spread))
    assert set(risk.columns) == {
        "score",
        "w",
        "l",
        "h",
        "range",
        "class car",
        "class bus",
        *(f"variance {name}" for name in FIELDS),
    }
    for name, slope in slopes.items():
        assert slope == pytest.approx(
            TRUE.get(name, 0.0), abs=0.06 if name != "range" else 0.005
        ), name
    assert risk.provenance["boxes"] == 40_000


@pytest.mark.parametrize("target", ["iou", "l2"])
def test_probabilities_are_calibrated_on_other_frames(target: str) -> None:
    risk, other = fit_risk(drawn(), target=target), drawn(seed=1)
    p, bad = risk.probability(other), other.iou < 0.4
    assert p.mean() == pytest.approx(bad.mean(), abs=0.02)
    for low in np.arange(0, 1, 0.25):
        rows = (p >= low) & (p < low + 0.25)
        assert p[rows].mean() == pytest.approx(bad[rows].mean(), abs=0.05)
    assert auroc(bad, p) == pytest.approx(risk.provenance["held out"]["AUROC"], abs=0.03)
    assert risk.limit == (0.4 if target == "iou" else pytest.approx(np.mean(drawn().l2)))


def test_invariant_to_units_and_powers_of_the_variances() -> None:
    """Log variances, standardised: metres or millimetres, variances or standard deviations."""
    found = drawn(1000)
    plain = fit_risk(found).probability(found)
    s = np.array([1e3] * 6 + [57.3])
    for other in (found.covariance * s[:, None] * s, np.sqrt(found.covariance)):
        changed = replace(found, covariance=other)
        assert np.allclose(fit_risk(changed).probability(changed), plain, atol=1e-6)


def test_covariance_and_extra_columns_improve_the_auroc() -> None:
    found, other = drawn(), drawn(seed=1)
    bad = other.iou < 0.4
    without = fit_risk(found.without_covariance(found.uncertainty))
    assert "variance x" not in without.columns
    plain, whole = (
        auroc(bad, without.probability(other)),
        auroc(bad, fit_risk(found).probability(other)),
    )
    assert whole > plain + 0.03
    with_extra = fit_risk(
        found,
        extra=(found.iou < 0.4)[:, None] + np.random.default_rng(0).normal(size=(len(found), 2)),
    )
    extra = bad[:, None] + np.random.default_rng(1).normal(size=(len(other), 2))
    assert with_extra.columns[-2:] == ("extra 0", "extra 1")
    assert auroc(bad, with_extra.probability(other, extra)) > whole + 0.02
    with pytest.raises(
        BoxcovError, match="this risk needs extra 0, extra 1, which the records do not have"
    ):
        with_extra.probability(other)


def test_the_variance_of_the_score_is_used_if_present() -> None:
    found = drawn(500)
    scored = replace(found, score_variance=np.exp(5.0 * (found.iou < 0.4)))
    risk = fit_risk(scored)
    assert risk.columns[-1] == "variance of the score"
    assert auroc(found.iou < 0.4, risk.probability(scored)) == 1
    with pytest.raises(
        BoxcovError, match="needs variance of the score, which the records do not have"
    ):
        risk.probability(found)


def test_the_penalty_is_chosen_on_held_out_frames() -> None:
    found = drawn(60, frames=6)
    noise = np.random.default_rng(0).normal(size=(60, 30))
    assert fit_risk(found, noise).penalty > fit_risk(drawn(20_000)).penalty
    assert fit_risk(drawn(50, frames=1)).penalty == max(PENALTIES)  # nothing to choose by


def test_one_class_and_one_outcome() -> None:
    found = drawn(300, classes=("car",))
    assert 0.5 < auroc(found.iou < 0.4, fit_risk(found).probability(found)) < 1
    for iou in (0.9, 0.1):
        same = replace(found, iou=np.full(300, iou))
        p = fit_risk(same).probability(same)
        assert p == pytest.approx(0.5 / 301 if iou > 0.4 else 300.5 / 301)


def test_boxes_without_an_object() -> None:
    found = drawn(1000, paired=0.6)
    risk, far = fit_risk(found), fit_risk(found, target="l2")
    assert risk.provenance["boxes"] == 1000
    assert risk.provenance["inaccurate"] == pytest.approx((found.iou < 0.4).mean())
    assert far.provenance["boxes"] == found.paired.sum()
    assert np.isfinite(far.probability(found)).all()
    with pytest.raises(BoxcovError, match="none of the 400 boxes is paired with an object"):
        fit_risk(drawn(400, paired=0.0))
    with pytest.raises(BoxcovError, match="none of the 0 boxes is paired"):
        fit_risk(found[:0])
    assert risk.probability(found[:0]).shape == (0,)


def test_values_that_are_not_finite_are_named() -> None:
    found = drawn(100)
    broken = found.covariance.copy()
    broken[3, 2, 2] = np.nan
    with pytest.raises(BoxcovError, match="variance z of 1 of 100 boxes is not finite"):
        fit_risk(replace(found, covariance=broken))
    with pytest.raises(BoxcovError, match="variance z of 1 of 100 boxes"):
        fit_risk(found).probability(replace(found, covariance=broken))
    with pytest.raises(BoxcovError, match="score of 100 of 100 boxes"):
        fit_risk(replace(found, scores=np.full(100, np.nan)))
    with pytest.raises(BoxcovError, match="extra 0 of 1 of 100 boxes"):
        fit_risk(found, np.where(np.arange(100) == 5, np.inf, 0.0)[:, None])


def test_values_outside_the_fit_are_clipped() -> None:
    found = drawn(1000)
    risk = fit_risk(found)
    at = risk.columns.index("variance x")
    for factor, end in ((1e12, 1), (1e-12, 0)):
        wild = found.covariance.copy()
        wild[:, 0, 0] *= factor
        edge = found.covariance.copy()
        edge[:, 0, 0] = np.exp(risk.limits[at][end])
        assert np.allclose(*(risk.probability(replace(found, covariance=C)) for C in (wild, edge)))


def test_json_round_trip() -> None:
    found = drawn(300)
    risk = fit_risk(found)
    again = Risk.from_json(risk.to_json())
    assert again == risk
    assert np.array_equal(again.probability(found), risk.probability(found))
    same = replace(found, iou=np.full(300, 0.9))
    json.loads(fit_risk(same).to_json())


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"target": "iou"}'])
def test_damaged_json_is_refused(text: str) -> None:
    with pytest.raises(BoxcovError, match="not a risk, or damaged"):
        Risk.from_json(text)


def test_mistakes_are_refused() -> None:
    found = drawn(100)
    risk = fit_risk(found)
    damaged = json.loads(risk.to_json()) | {"weights": [1.0]}
    with pytest.raises(BoxcovError, match="weights has 1 entries, expected 14"):
        Risk.from_json(json.dumps(damaged))
    with pytest.raises(BoxcovError, match="target must be one of iou, l2, got 'size'"):
        fit_risk(found, target="size")  # type: ignore[arg-type]
    with pytest.raises(BoxcovError, match="penalties must be above 0"):
        fit_risk(found, penalties=(0.0, 1.0))
    with pytest.raises(BoxcovError, match=r"extra has shape \(3,\), expected \(100, c\)"):
        fit_risk(found, np.zeros(3))
    with pytest.raises(
        BoxcovError, match="this risk is for the fields x y z w l h yaw and the classes car, bus"
    ):
        risk.probability(replace(found, classes=("car", "van")))
