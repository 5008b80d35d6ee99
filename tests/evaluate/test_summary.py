from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from boxcov.evaluate.covariance_metrics import covariance_metrics
from boxcov.evaluate.quality import METRICS, auroc, ause, quality
from boxcov.evaluate.records import Records
from boxcov.evaluate.summary import COLUMNS, class_groups, compare, range_groups, summarise, table

FIELDS = ("x", "y", "z", "w", "l", "h", "yaw")


def some_records(n: int = 300, seed: int = 0, useful: bool = True) -> Records:
    rng = np.random.default_rng(seed)
    boxes = np.concatenate(
        [rng.uniform(-40, 40, (n, 3)), rng.uniform(0.5, 5, (n, 3)), rng.normal(size=(n, 1))], 1
    )
    scale = rng.gamma(1, 1, n) + 0.05
    error = rng.normal(size=(n, 7)) * np.sqrt(scale)[:, None] * 0.3
    paired = rng.random(n) < 0.8
    l2 = np.where(paired, np.linalg.norm(error[:, :3], axis=1), np.nan)
    return Records(
        fields=FIELDS,
        classes=("car", "bus", "tram"),
        boxes=boxes,
        uncertainty=scale * 7 * 0.09 if useful else rng.permutation(scale),
        scores=rng.uniform(0.1, 1, n),
        labels=rng.integers(0, 2, n),
        frame=rng.integers(0, 30, n),
        truth=np.where(paired[:, None], boxes - error, np.nan),
        iou=np.where(paired, np.exp(-np.nan_to_num(l2)), 0.0),
        l2=l2,
        covariance=0.09 * scale[:, None, None] * np.eye(7),
    )


def test_summary_holds_the_metrics() -> None:
    records = some_records()
    found = summarise(records, replicates=50)
    expected = quality(records.iou, records.l2, records.uncertainty)
    for metric, by_error in expected.items():
        for error, value in by_error.items():
            assert found["quality"][metric][error]["value"] == value
    paired = records.paired
    assert found["AUROC"]["IoU"]["value"] == pytest.approx(
        auroc(records.iou < 0.4, records.uncertainty)
    )
    mean = np.nanmean(records.l2)
    assert found["AUROC"]["l2"]["value"] == pytest.approx(
        auroc(records.l2[paired] >= mean, records.uncertainty[paired])
    )
    assert found["AUSE"]["IoU"]["value"] == pytest.approx(
        ause(1 - records.iou, records.uncertainty)
    )
    assert found["AUSE"]["l2"]["value"] == pytest.approx(
        ause(records.l2[paired], records.uncertainty[paired])
    )
    assert found["covariance"] == covariance_metrics(
        records.errors[paired], records.covariance[paired]
    )
    assert found["predictive"] is None
    assert (found["boxes"], found["paired"]) == (300, paired.sum())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_intervals_and_chance_levels() -> None:
    good, useless = summarise(some_records(900)), summarise(some_records(900, useful=False))
    cells = [found["quality"][metric]["l2"] for found in (good, useless) for metric in METRICS]
    cells += [
        found[name][error]
        for found in (good, useless)
        for name in ("AUROC", "AUSE")
        for error in ("IoU", "l2")
    ]
    for cell in cells:
        assert cell["low"] < cell["value"] < cell["high"]
        assert cell["chance_low"] < cell["chance"] < cell["chance_high"]
    for name in ("P(A|C)", "P(U|I)"):
        assert good["quality"][name]["l2"]["value"] > good["quality"][name]["l2"]["chance_high"]
        cell = useless["quality"][name]["l2"]
        assert cell["chance_low"] <= cell["value"] <= cell["chance_high"]
    assert (
        good["AUROC"]["l2"]["low"]
        > 0.6
        > 0.5
        == pytest.approx(good["AUROC"]["l2"]["chance"], abs=0.01)
    )
    assert good["AUSE"]["l2"]["high"] < good["AUSE"]["l2"]["chance_low"]
    assert (
        summarise(some_records(90), 20, seed=4)
        == summarise(some_records(90), 20, seed=4)
        != summarise(some_records(90), 20, seed=5)
    )


def test_groups_by_class_and_range() -> None:
    records = some_records()
    records.boxes[:2, :2] = [[15.0, 0.0], [0.0, 50.0]]  # on the edges: each in one group
    classes = class_groups(records)
    assert list(classes) == ["car", "bus"]  # no tram was seen
    assert classes["bus"].tolist() == np.flatnonzero(records.labels == 1).tolist()
    ranges = range_groups(records)
    assert list(ranges) == ["0 to 15 m", "15 to 30 m", "30 to 50 m", "50 m and more"]
    assert sorted(np.concatenate(list(ranges.values()))) == list(range(300))
    within = (records.range >= 15) & (records.range < 30)
    assert ranges["15 to 30 m"].tolist() == np.flatnonzero(within).tolist()


def test_table_has_baselines_and_chance() -> None:
    records = some_records()
    calibrated = replace(records, predictive=2 * records.covariance)
    rows = table(
        {"exact": records, "MC-GLM": calibrated.with_uncertainty(records.uncertainty**2)},
        replicates=10,
    )
    both = [f"score + size + covariance ({name})" for name in ("exact", "MC-GLM")]
    names = ["exact", "MC-GLM", "1 - score", "score + size", *both]
    assert [row["method"] for row in rows[:-2]] == [
        name + end for name in names for end in ("", ", shuffled")
    ]
    assert [row["method"] for row in rows[-2:]] == [f"{name}, minus score + size" for name in both]
    assert [row["kind"] for row in rows[:-2:2]] == [
        "method",
        "method",
        "baseline",
        "baseline",
        "combined",
        "combined",
    ]
    assert {row["kind"] for row in rows[1:-2:2]} == {"chance"}
    assert {row["kind"] for row in rows[-2:]} == {"difference"}
    for row in rows:
        assert set(row) == {"method", "kind", "boxes", "paired", *COLUMNS}
    exact, shuffled, mcglm = rows[:3]
    assert exact["AUROC IoU"] == mcglm["AUROC IoU"]  # the same order of u
    assert (
        exact["P(U|I) IoU"]["value"] == summarise(records, 10)["quality"]["P(U|I)"]["IoU"]["value"]
    )
    assert (
        shuffled["P(U|I) IoU"]["value"] == summarise(records, 10)["quality"]["P(U)"]["IoU"]["value"]
    )
    assert exact["NLL Student-t"] is exact["ANEES predictive"] is None
    assert shuffled["NLL"] is rows[4]["NLL"] is None
    assert mcglm["ANEES predictive"]["value"] == pytest.approx(mcglm["ANEES"]["value"] / 2)
    assert rows[4]["AUROC IoU"]["value"] == auroc(records.iou < 0.4, 1 - records.scores)
    json.dumps(rows, allow_nan=False)


def test_nll_of_the_error_model_is_that_of_student_t() -> None:
    from scipy.stats import t

    records, dof = some_records(), (2.5, 3.0, 4.0, 5.0, 8.0, 20.0, 50.0)
    scale = 0.3 * np.sqrt(np.diagonal(records.covariance, axis1=1, axis2=2))
    variance = scale**2 * np.array(dof) / (np.array(dof) - 2)
    model = replace(records, scale=scale, dof=dof, predictive=variance[:, :, None] * np.eye(7))
    found = summarise(model, 2)["predictive"]
    kept = model[model.paired].as_axes()
    expected = -t.logpdf(kept.errors, dof, scale=kept.scale).sum(1).mean()
    assert found["NLL"] == pytest.approx(expected, rel=1e-12)
    gaussian = covariance_metrics(kept.errors, kept.predictive)
    assert abs(gaussian["NLL"] - expected) > 0.1
    assert found["ANEES"] == gaussian["ANEES"]  # a mean of squares, whatever the distribution
    assert "coverage" not in found  # the regions have one, which is no Gaussian's
    rows = table({"exact": model}, replicates=2)
    assert rows[0]["NLL Student-t"]["value"] == found["NLL"]


def test_each_set_of_boxes_has_its_baselines() -> None:
    rows = table({"exact": some_records(50), "MCI": some_records(40, seed=1)}, replicates=2)
    assert [row["method"] for row in rows[4:12:2]] == [
        "1 - score",
        "score + size",
        "1 - score (MCI)",
        "score + size (MCI)",
    ]
    differences = [row for row in rows if row["kind"] == "difference"]
    assert [row["boxes"] for row in differences] == [
        50,
        40,
    ]  # each from the score + size of its own boxes


def test_rows_of_differences_to_score_and_size() -> None:
    """A covariance that knows which boxes are bad, and one that does not."""
    records = some_records(400)
    bad = records.iou < 0.4
    knows = replace(
        records,
        covariance=np.where(bad, 4.0, 1.0)[:, None, None]
        * records.covariance**0
        * np.eye(records.boxes.shape[1]),
    )
    for found, helps in (
        (knows, True),
        (replace(knows, covariance=np.ones_like(knows.covariance)), False),
    ):
        rows = {row["method"]: row for row in table({"exact": found}, replicates=50)}
        with_it, without = (
            rows["score + size + covariance"]["AUROC IoU"],
            rows["score + size"]["AUROC IoU"],
        )
        cell = rows["score + size + covariance, minus score + size"]["AUROC IoU"]
        assert cell["value"] == pytest.approx(with_it["value"] - without["value"])
        assert (cell["low"] > 0) is helps
        assert with_it["value"] == 1 if helps else cell["value"] == pytest.approx(0, abs=1e-9)
    assert not any(
        "covariance" in row["method"]
        for row in table({"1 - score": knows.without_covariance(1 - knows.scores)}, replicates=2)
    )


def test_signals_are_rows_of_their_own() -> None:
    found = some_records(60)
    found = replace(found, signals=np.random.default_rng(0).normal(size=(60, 2)))
    rows = [row for row in table({"exact": found}, replicates=2) if row["kind"] != "chance"]
    assert [row["method"] for row in rows] == [
        "exact",
        "1 - score",
        "score + size",
        "signals",
        "score + size + signals",
        "score + size + covariance",
        "score + size + signals + covariance",
        "score + size + covariance, minus score + size",
        "score + size + signals + covariance, minus score + size + signals",
    ]


@pytest.mark.parametrize("n", [0, 1])
def test_summaries_of_few_boxes(n: int) -> None:
    records = some_records(5)[:n]
    found = summarise(records, replicates=3)
    assert found["boxes"] == n
    assert found["AUROC"]["IoU"]["value"] is None
    assert len(table({"exact": records}, replicates=3)) == 9
    json.dumps(found, allow_nan=False)


def test_singular_covariances_are_counted() -> None:
    records = some_records(20)
    records.covariance[3] = 0
    found = summarise(
        replace(records, l2=np.nan_to_num(records.l2), truth=np.nan_to_num(records.truth)),
        replicates=2,
    )
    assert found["covariance"]["singular"] == 1
    assert found["covariance"]["NLL"] is None


def test_differences_of_two_methods() -> None:
    good = some_records(900)
    noisy = good.with_uncertainty(
        good.uncertainty * np.exp(np.random.default_rng(0).normal(scale=2, size=900))
    )
    found = compare(good, noisy)
    one, other = summarise(good, 2), summarise(noisy, 2)
    assert found["AUROC"]["l2"]["value"] == pytest.approx(
        one["AUROC"]["l2"]["value"] - other["AUROC"]["l2"]["value"]
    )
    assert (
        found["P(U|I)"]["IoU"]["low"]
        <= found["P(U|I)"]["IoU"]["value"]
        <= found["P(U|I)"]["IoU"]["high"]
    )
    assert found["AUROC"]["l2"]["low"] > 0 > found["AUSE"]["l2"]["high"]
    same = compare(good, good, replicates=20)
    assert {tuple(cell.values()) for by_error in same.values() for cell in by_error.values()} == {
        (0, 0, 0)
    }
