"""Split-conformal regions: half widths that hold a given share of the errors.

Member k of the ensemble was fitted without the frames of fold k. The errors of that fold, divided
by the scales that member k gives them, are ranked within groups of boxes (class and range; where
these are few, the class, or all boxes). If boxes are exchangeable, the member's half widths at a
level hold at least that share of the errors of new boxes of the group. The reported half width is
the median over the members. It misses at most twice as often as they do on average, because where
it misses, at least half of them miss, and in practice about as often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import Tensor

from boxcov.detections import Detections

LEVELS = (0.5, 0.6827, 0.8, 0.9, 0.95, 0.975, 0.99)
RANGES = (20.0, 40.0)  # metres: groups are nearer than 20 m, up to 40 m, and beyond
_ROUNDING = 1e-5  # equal errors, as of objects at rest, must not fall out by rounding
MIN_GROUP = 60  # boxes of a group in a fold; smaller ones use those of their class, or all boxes


@dataclass(frozen=True)
class Regions:
    """Quantiles of the scaled errors, by member, group and level."""

    quantiles: Tensor  # (K, G, L, D) of each field by itself
    joint: Tensor  # (K, G, L) of the largest over the fields
    group_of: Tensor  # (C, R) the group of each class and range

    def widths(self, log_scales: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Return half widths (m, L, D) of each field, and of all fields jointly.

        log_scales: (K, m, D) of the members; groups: (m,).
        """
        scales = log_scales.exp()[:, :, None, None]  # (K, m, 1, 1, D)
        single, joint = lower_median(self._both.index_select(1, groups) * scales).unbind(1)
        return single, joint

    @cached_property
    def _both(self) -> Tensor:  # (K, G, 2, L, D): the quantiles of one field and of all
        joint = self.joint.unsqueeze(3).expand_as(self.quantiles)
        return (1 + _ROUNDING) * torch.stack([self.quantiles, joint], 2)


def lower_median(values: Tensor) -> Tensor:
    """Return the lower median over the first dimension.

    Of five rows, the usual number of members, that is 20 times as fast as a sort on a CPU.
    """
    if len(values) != 5:
        return values.sort(0).values[(len(values) - 1) // 2]
    low, high = torch.minimum(values[:2], values[2:4]), torch.maximum(values[:2], values[2:4])
    low, high = torch.maximum(low[0], low[1]), torch.minimum(high[0], high[1])
    inner = torch.minimum(values[4], torch.maximum(low, high))
    return torch.maximum(torch.minimum(low, high), inner)


def class_range_index(found: Detections) -> tuple[Tensor, Tensor]:
    """Return class and range bin (m,) of each box; boxes without x and y have a single range."""
    if not {"x", "y"} <= set(found.fields):
        return found.labels, torch.zeros_like(found.labels)
    distance = torch.stack([found.field("x"), found.field("y")]).norm(dim=0)
    near, far = RANGES
    return found.labels, (distance > near).long() + (distance > far)


def choose_groups(
    labels: Tensor, ranges: Tensor, folds: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, list[Tensor]]:
    """Return the group (C, R) of each class and range, and which boxes (n,) each group ranks.

    Group 0 is all boxes. A class that is large in every fold has a group, and so has each of its
    ranges that is. ``shape`` is the number of classes and the number of folds.
    """
    classes, members = shape
    group_of = torch.zeros(classes, len(RANGES) + 1, dtype=torch.long)
    groups = [torch.ones_like(labels, dtype=torch.bool)]

    def is_large(rows: Tensor) -> bool:
        return int(torch.bincount(folds[rows], minlength=members).min()) >= MIN_GROUP

    for c in range(classes):
        of_class = labels == c
        if not is_large(of_class):
            continue
        group_of[c] = len(groups)
        groups.append(of_class)
        for r in range(len(RANGES) + 1):
            rows = of_class & (ranges == r)
            if is_large(rows) and not torch.equal(rows, of_class):
                group_of[c, r] = len(groups)
                groups.append(rows)
    return group_of, groups


def fit_regions(
    ratios: Tensor, labels: Tensor, ranges: Tensor, folds: Tensor, shape: tuple[int, int]
) -> Regions:
    """Return the regions of absolute errors over scales (n, D), NaN where unknown.

    folds: (n,) of the boxes; shape: the number of classes and the number of folds.
    """
    group_of, groups = choose_groups(labels, ranges, folds, shape)
    largest = ratios.nan_to_num(0).amax(1, keepdim=True)  # of the known fields
    values = torch.cat([ratios, largest], 1)
    found = []  # (L, D + 1) per member and group
    for k in range(shape[1]):
        for group in groups:
            rows = group & (folds == k)
            found.append(torch.stack([conformal_quantiles(v) for v in values[rows].T], 1))
    quantiles = torch.stack(found).unflatten(0, (shape[1], len(groups)))
    return Regions(quantiles[..., :-1].contiguous(), quantiles[..., -1].contiguous(), group_of)


def conformal_quantiles(values: Tensor, levels: Sequence[float] = LEVELS) -> Tensor:
    """Return the ceil((n + 1) level)-th smallest of n values, per level; infinite if beyond n.

    >>> conformal_quantiles(torch.arange(1.0, 10.0), (0.5, 0.9, 0.95))
    tensor([5., 9., inf])
    """
    values = values[~values.isnan()].sort().values
    ranks = [ceil((len(values) + 1) * level - 1e-9) for level in levels]
    beyond = torch.cat([values, values.new_full((1,), torch.inf)])
    return beyond[torch.tensor([min(rank, len(values) + 1) - 1 for rank in ranks])]
