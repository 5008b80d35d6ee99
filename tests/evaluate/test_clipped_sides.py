"""Sides clipped at the image border: their errors are censored, and the metrics stay exact."""

from __future__ import annotations

from dataclasses import replace
from math import e, log, pi

import numpy as np
import pytest

from boxcov.evaluate.baselines import covariance_features
from boxcov.evaluate.covariance_metrics import gaussian_fit
from boxcov.evaluate.summary import summarise
from helpers.clipped_cases import INWARD, clipped_boxes


def test_an_error_is_censored_if_the_object_reaches_the_border() -> None:
    records = clipped_boxes(2000)
    plain = records.boxes - records.truth
    ends_inside = plain * INWARD > 1
    np.testing.assert_array_equal(
        np.isnan(records.errors), records.clipped & ~ends_inside, strict=True
    )
    known = ~np.isnan(records.errors)
    np.testing.assert_array_equal(records.errors[known], plain[known])
    beyond = replace(records, truth=np.where(records.clipped, records.boxes - 30, records.truth))
    low, high = np.split(np.isnan(beyond.errors), 2, axis=1)
    assert (low == records.clipped[:, :2]).all()  # labels beyond the border
    assert not high.any()


@pytest.mark.parametrize("part", ["covariance", "predictive"])
def test_metrics_of_clipped_gaussian_errors_are_known(part: str) -> None:
    records = clipped_boxes(8000)
    sd = np.sqrt(np.diagonal(records.predictive, axis1=1, axis2=2))
    records = replace(records, scale=sd, dof=4 * (1e9,))  # a Gaussian
    found = summarise(records, replicates=2)
    metrics = found[part]
    used = ~np.isnan(records.errors_under(getattr(records, part)))
    entropy = (np.log(sd) + 0.5 * log(2 * pi * e)) * used
    assert metrics["rows"] == used.any(1).sum()
    assert metrics["singular"] == 0
    expected = entropy.sum() / used.any(1).sum()
    margin = 4 * np.sqrt(0.5 * used.sum()) / used.any(1).sum()  # the variance of z^2 / 2 is 1/2
    assert metrics["NLL"] == pytest.approx(expected, abs=margin)
    assert metrics["ENCE"] < 0.05
    assert metrics["ANEES"] == pytest.approx(1, abs=0.1)
    for level, inside in metrics.get("coverage", {}).items():
        p = float(level)
        assert inside == pytest.approx(p, abs=4 * (p * (1 - p) / metrics["rows"]) ** 0.5)


def test_without_censoring_the_same_boxes_are_singular() -> None:
    records = clipped_boxes(500)
    fit = gaussian_fit(records.boxes - records.truth, records.covariance)
    assert np.isinf(fit.nll).mean() > 0.4


def test_regions_of_clipped_sides_hold_their_level() -> None:
    records = clipped_boxes(8000)
    sd = np.sqrt(np.diagonal(records.predictive, axis1=1, axis2=2))
    widths = np.stack([factor * sd for factor in (0.67449, 1.64485, 1.95996)], 1)
    found = summarise(replace(records, regions=widths), replicates=2)["regions"]
    for level, inside in found.items():
        p = float(level)
        assert inside == pytest.approx(p, abs=4 * (p * (1 - p) / 4 / len(records)) ** 0.5)


def test_a_box_without_any_spread_is_not_clipped() -> None:
    records = clipped_boxes(300)
    nothing = replace(records, covariance=np.zeros((300, 4, 4)))
    in_corner = (records.boxes[:, :2] == 0).all(1)
    assert 0 < in_corner.sum() < 60
    np.testing.assert_array_equal(nothing.clipped, np.repeat(in_corner[:, None], 4, 1))
    assert summarise(nothing, replicates=2)["covariance"]["singular"] == (~in_corner).sum()


def test_a_clipped_side_has_the_features_of_the_others() -> None:
    records = clipped_boxes(200)
    columns = covariance_features(records)
    logs = np.log(np.diagonal(records.predictive, axis1=1, axis2=2))
    mean = np.nanmean(np.where(records.clipped, np.nan, logs), 1, keepdims=True)
    np.testing.assert_allclose(columns, np.where(records.clipped, mean, logs))


def test_lidar_boxes_are_never_clipped() -> None:
    records = clipped_boxes(50)
    other = replace(records, fields=("x", "y", "w", "l"))
    assert not other.clipped.any()
    assert not np.isnan(other.errors).any()
