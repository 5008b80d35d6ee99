"""Conformal regions: quantiles, their guarantee, the median over members, groups."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
import torch

from boxcov.detections import Detections
from boxcov.error_model.regions import (
    LEVELS,
    MIN_GROUP,
    RANGES,
    Regions,
    choose_groups,
    class_range_index,
    conformal_quantiles,
    fit_regions,
    lower_median,
)


@pytest.mark.parametrize("n", [1, 5, 19, 20, 99, 100, 1000])
def test_quantiles_are_order_statistics(n: int) -> None:
    values = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    ordered = sorted(values.tolist())
    for level, quantile in zip(LEVELS, conformal_quantiles(values).tolist()):
        rank = next(r for r in range(1, n + 2) if r >= (n + 1) * level - 1e-9)
        assert quantile == (ordered[rank - 1] if rank <= n else float("inf"))


@pytest.mark.parametrize("n", [120, 999])
def test_quantiles_are_those_of_numpy(n: int) -> None:
    values = np.random.default_rng(n).gamma(2.0, size=n)
    for level, quantile in zip(LEVELS, conformal_quantiles(torch.from_numpy(values)).tolist()):
        share = ceil((n + 1) * level - 1e-6) / n - 1e-9  # of the values, below the quantile
        assert quantile == np.quantile(values, share, method="inverted_cdf")


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 8])
def test_the_median_is_that_of_a_sort(members: int) -> None:
    values = torch.randn(members, 50, 3, generator=torch.Generator().manual_seed(members))
    values[0, :10] = torch.inf  # a quantile of too few boxes
    expected = values.sort(0).values[(members - 1) // 2]
    assert torch.equal(lower_median(values), expected)


def test_few_values_give_an_infinite_quantile() -> None:
    assert conformal_quantiles(torch.zeros(0)).tolist() == [float("inf")] * len(LEVELS)
    assert conformal_quantiles(torch.ones(18), (0.95,)).tolist() == [float("inf")]
    assert conformal_quantiles(torch.ones(19), (0.95,)).tolist() == [1.0]
    unknown = torch.cat([torch.ones(19), torch.full((80,), torch.nan)])
    assert conformal_quantiles(unknown, (0.95, 0.975)).tolist() == [1.0, float("inf")]


@pytest.mark.parametrize(("n", "level"), [(20, 0.9), (63, 0.5), (100, 0.95)])
def test_mean_coverage_lies_within_its_bounds(n: int, level: float) -> None:
    repetitions, new = 1500, 100
    errors = np.random.default_rng(0).standard_t(3, size=(repetitions, n + new))
    errors = torch.from_numpy(np.abs(errors))
    widths = torch.stack([conformal_quantiles(row, (level,)) for row in errors[:, :n]])
    covered = (errors[:, n:] <= widths).double().mean(1)
    margin = 4 * float(covered.std()) / repetitions**0.5
    exact = ceil((n + 1) * level - 1e-9) / (n + 1)
    assert level <= exact <= level + 1 / (n + 1)
    assert abs(float(covered.mean()) - exact) <= margin


def test_the_median_misses_as_often_as_members_that_agree() -> None:
    """K members with noisy scales of the same boxes: about 1 - alpha is covered."""
    rng = np.random.default_rng(1)
    K, n, new, level = 5, 400, 20_000, 0.9
    noise = np.exp(0.2 * rng.normal(size=(K, new)))
    widths = []
    for k in range(K):
        ratios = np.abs(rng.standard_t(4, size=n)) / np.exp(0.2 * rng.normal(size=n))
        widths.append(float(conformal_quantiles(torch.from_numpy(ratios), (level,))) * noise[k])
    missed = np.abs(rng.standard_t(4, size=new)) > np.median(np.stack(widths), 0)
    assert abs(missed.mean() - 0.1) < 0.02


def test_the_median_misses_at_most_twice_as_often() -> None:
    """Members that each miss a tenth, all of them where two others do: the worst case."""
    K, n, alpha = 5, 30_000, 0.1
    rng = np.random.default_rng(2)
    share = alpha * K / (K // 2 + 1)  # where three of five members miss
    has_missers = rng.random(n) < share
    missers = np.argsort(rng.random((n, K)), 1) < K // 2 + 1  # three of five, at random
    misses = missers & has_missers[:, None]
    assert np.abs(misses.mean(0) - alpha).max() < 0.01  # each member keeps its promise
    widths = torch.from_numpy(np.where(misses, 0.5, 2.0).T[:, :, None].copy()).float()
    regions = Regions(
        torch.ones(K, 1, 1, 1), torch.ones(K, 1, 1), torch.zeros(1, 3, dtype=torch.long)
    )
    median, joint = regions.widths(widths.log(), torch.zeros(n, dtype=torch.long))
    missed = (median[:, 0, 0] < 1.0).double().mean()
    assert float(missed) == pytest.approx(share, abs=0.01)
    assert alpha < float(missed) <= 2 * alpha
    torch.testing.assert_close(median, joint)


def boxes_of(counts: dict[tuple[int, int], int], folds: int = 2) -> tuple[torch.Tensor, ...]:
    """Return labels, ranges and folds of so many boxes per class, range and fold."""
    rows = [
        (c, r, k) for (c, r), count in counts.items() for k in range(folds) for _ in range(count)
    ]
    labels, ranges, fold = torch.tensor(rows).unbind(1)
    return labels, ranges, fold


def test_small_groups_use_their_class_or_all_boxes() -> None:
    many, few = MIN_GROUP, MIN_GROUP - 1
    counts = {(0, 0): many, (0, 1): few, (0, 2): many, (1, 0): few, (2, 1): many, (2, 0): 5}
    labels, ranges, folds = boxes_of(counts)
    group_of, groups = choose_groups(labels, ranges, folds, (4, 2))
    assert group_of.shape == (4, len(RANGES) + 1)
    assert group_of[1].tolist() == group_of[3].tolist() == [0, 0, 0]  # all boxes
    assert bool(groups[0].all())
    assert torch.equal(groups[int(group_of[0, 1])], labels == 0)  # the whole class
    for r in (0, 2):
        assert torch.equal(groups[int(group_of[0, r])], (labels == 0) & (ranges == r))
    assert torch.equal(groups[int(group_of[2, 1])], (labels == 2) & (ranges == 1))
    assert torch.equal(groups[int(group_of[2, 0])], labels == 2)


def test_a_group_that_one_fold_lacks_is_small() -> None:
    labels, ranges, folds = boxes_of({(0, 0): 200, (1, 0): 200})
    folds[labels == 1] = 0
    group_of, _ = choose_groups(labels, ranges, folds, (2, 2))
    assert group_of[1].tolist() == [0, 0, 0]
    assert int(group_of[0, 0]) > 0


def test_classes_with_every_range_keep_them_apart() -> None:
    labels, ranges, folds = boxes_of({(0, r): 100 for r in range(3)})
    ratios = (1.0 + ranges).unsqueeze(1)
    regions = fit_regions(ratios, labels, ranges, folds, (1, 2))
    for r in range(3):
        group = int(regions.group_of[0, r])
        assert regions.quantiles[:, group, :-1].unique().tolist() == [1.0 + r]


def test_each_member_is_ranked_on_its_own_fold() -> None:
    labels, ranges, folds = boxes_of({(0, 0): 200}, folds=3)
    ratios = (1.0 + folds)[:, None].repeat(1, 2)
    ratios[:, 1] *= 10
    regions = fit_regions(ratios, labels, ranges, folds, (1, 3))
    for k in range(3):
        assert regions.quantiles[k, 0, :, 0].unique().tolist() == [1.0 + k]
        assert regions.quantiles[k, 0, :, 1].unique().tolist() == [10.0 + 10 * k]
        assert regions.joint[k, 0].unique().tolist() == [10.0 + 10 * k]


def test_a_fold_without_paired_boxes_has_infinite_quantiles() -> None:
    labels, ranges, folds = boxes_of({(0, 0): 200}, folds=4)
    regions = fit_regions(torch.ones(len(labels), 2), labels, ranges, folds, (1, 5))
    assert regions.quantiles.shape == (5, 1, len(LEVELS), 2)
    assert bool(regions.quantiles[4].isinf().all())
    single, joint = regions.widths(torch.zeros(5, 3, 2), torch.zeros(3, dtype=torch.long))
    # the median over the members, with its allowance for rounding
    torch.testing.assert_close(single, torch.ones_like(single), rtol=2e-5, atol=0)
    torch.testing.assert_close(joint, torch.ones_like(joint), rtol=2e-5, atol=0)
    assert bool((single >= 1).all())


def test_an_unknown_field_does_not_affect_others() -> None:
    labels, ranges, folds = boxes_of({(0, 0): 200})
    ratios = torch.rand(len(labels), 2, generator=torch.Generator().manual_seed(0))
    alone = fit_regions(ratios[:, :1], labels, ranges, folds, (1, 2))
    ratios[:, 1] = torch.nan
    regions = fit_regions(ratios, labels, ranges, folds, (1, 2))
    assert torch.equal(regions.quantiles[..., :1], alone.quantiles)
    assert torch.equal(regions.joint, alone.joint)
    assert bool(regions.quantiles[..., 1].isinf().all())


def test_joint_regions_hold_all_fields_of_new_boxes() -> None:
    generator = torch.Generator().manual_seed(5)
    n = 3000
    folds = torch.arange(n) * 5 // n
    zeros = torch.zeros(n, dtype=torch.long)
    ratios = torch.randn(n, 4, generator=generator).abs()
    regions = fit_regions(ratios, zeros, zeros, folds, (1, 5))
    groups = regions.group_of[0, 0].repeat(n)
    single, joint = regions.widths(torch.zeros(5, n, 4), groups)
    new = torch.randn(n, 1, 4, generator=generator).abs()
    for level, inside, all_inside in zip(
        LEVELS, (new <= single).float().mean((0, 2)), (new <= joint).all(2).float().mean(0)
    ):
        assert float(inside) == pytest.approx(level, abs=0.03)
        assert float(all_inside) == pytest.approx(level, abs=0.03)


def test_ranges_are_distances_in_the_plane() -> None:
    zeros = torch.zeros(4)
    boxes = torch.tensor([[3.0, 4.0], [20.0, 0.0], [0.0, -20.1], [30.0, 30.0]])
    found = Detections(boxes, zeros, zeros.long(), zeros.long(), ("x", "y"), ("car",))
    labels, ranges = class_range_index(found)
    assert ranges.tolist() == [0, 0, 1, 2]
    assert torch.equal(labels, found.labels)
    other = Detections(boxes, zeros, zeros.long(), zeros.long(), ("x1", "x2"), ("car",))
    assert class_range_index(other)[1].tolist() == [0, 0, 0, 0]


def test_equal_errors_are_inside_their_own_quantile() -> None:
    labels, ranges, folds = boxes_of({(0, 0): 200}, folds=5)
    errors = torch.full((len(labels), 1), 1.2919e-8)  # of objects at rest
    scale = torch.tensor(1.1e-4)
    regions = fit_regions(errors / scale, labels, ranges, folds, (1, 5))
    log_scales = scale.log().expand(5, 200, 1)
    single, joint = regions.widths(log_scales, torch.zeros(200, dtype=torch.long))
    assert bool((single >= errors[0]).all())
    assert bool((joint >= errors[0]).all())
