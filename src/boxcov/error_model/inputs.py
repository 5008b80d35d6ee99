"""The inputs of the error model: everything that is known about a box, as named numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from boxcov.box_layout import IMAGE, MIN_VARIANCE, log_variances, sides
from boxcov.detections import Detections

_MIN_SCORE = 1e-4
_NEAR = 3.0  # radius of the neighbourhood: metres, or sides of an image box
_FAR = 50.0  # distance that stands for "no other box"
_MOST = 2000  # boxes at once
_Columns = dict[str, Tensor]


def box_inputs(found: Detections) -> _Columns:
    """Return the inputs of each box (m,) by name.

    Score, sides, range, speed and directions; the neighbours among the reported boxes; the class;
    the log variances of the covariance; and the detector's signals.
    """
    return {**report_inputs(found), **covariance_inputs(found), **signal_inputs(found)}


def report_inputs(found: Detections) -> _Columns:
    """Return what the reported boxes themselves say."""
    if len(found) > _MOST and bool((found.frame != found.frame[0]).any()):
        return _inputs_by_frame(found)
    boxes = found.boxes.detach().to(torch.float32)
    columns = dict(zip(found.fields, boxes.unbind(1)))
    score = found.scores.to(torch.float32).clamp(_MIN_SCORE, 1 - _MIN_SCORE)
    inputs = {"score": torch.logit(score)}
    side = sides(columns)
    if side:
        logs = torch.stack(list(side.values())).clamp(min=1e-3).log()
        inputs |= {f"log {name}": log for name, log in zip(side, logs)}
    if {"x", "y"} <= columns.keys():
        inputs |= _directions(columns)
    if {"vx", "vy"} <= columns.keys():
        squares = columns["vx"].square() + columns["vy"].square()
        inputs["log speed"] = 0.5 * (squares + 0.01).log()  # 0.1 m/s is at rest
    inputs |= _neighbours(found, columns, list(side.values()))
    numbers = torch.arange(len(found.classes), device=boxes.device)
    is_class = (found.labels[:, None] == numbers).float()  # (m, C)
    inputs |= {f"class {n}": column for n, column in zip(found.classes, is_class.unbind(1))}
    return inputs


def signal_inputs(found: Detections) -> _Columns:
    """Return the detector's signals."""
    if found.signals is None:
        return {}
    names = (f"signal {name}" for name in found.meta["signals"])
    return dict(zip(names, found.signals.to(torch.float32).unbind(1)))


def _inputs_by_frame(found: Detections) -> _Columns:
    """As ``report_inputs``, frame by frame: neighbours of many frames need much memory."""
    order = found.frame.argsort(stable=True)
    counts = torch.unique(found.frame, return_counts=True)[1]
    parts = [report_inputs(found[rows]) for rows in order.split(counts.tolist())]
    back = order.argsort()
    return {name: torch.cat([part[name] for part in parts])[back] for name in parts[0]}


def stack_inputs(inputs: _Columns, names: Sequence[str]) -> Tensor:
    """Return the inputs ``names`` as one tensor (m, P)."""
    return torch.stack([inputs[name] for name in names], 1)


def frame_certainty(found: Detections) -> Tensor:
    """Return the mean score of the boxes of each box's frame (m,), weighted by the score."""
    scores = found.scores.to(torch.float32).clamp(_MIN_SCORE, 1.0)  # an integer would not export
    powers = torch.stack([scores, scores.square()], 1)
    if len(found) > _MOST:
        number = found.frame.unique(return_inverse=True)[1]
        sums = powers.new_zeros(int(number.max()) + 1, 2).index_add(0, number, powers)[number]
    else:  # a traced graph has no unique()
        sums = (found.frame[:, None] == found.frame[None]).float() @ powers
    return sums[:, 1] / sums[:, 0]


def _directions(columns: _Columns) -> _Columns:
    """Return range and direction, and the heading relative to the line of sight, as axes."""
    x, y = columns["x"], columns["y"]
    found = {"log range": 0.5 * (x.square() + y.square() + 1).log()}
    angles = {"azimuth": torch.atan2(y, x)}
    if "yaw" in columns:
        angles["view"] = columns["yaw"] - angles["azimuth"]
    twice = 2 * torch.stack(list(angles.values()))
    for name, cos, sin in zip(angles, twice.cos(), twice.sin()):
        found |= {f"{name} cos": cos, f"{name} sin": sin}
    return found


def _neighbours(found: Detections, columns: _Columns, side: list[Tensor]) -> _Columns:
    """Return how near the other reported boxes of the frame are, and how many there are."""
    if "x1" in columns:
        x, y = (0.5 * (columns[f"{axis}1"] + columns[f"{axis}2"]) for axis in "xy")
    elif {"x", "y"} <= columns.keys():
        x, y = columns["x"], columns["y"]
    else:
        return {}
    names = ("nearest box", "nearest of class", "boxes in frame", "scores nearby")
    if not len(found):
        return dict.fromkeys(names, x)
    # in sides of an image box itself, so that near and far objects compare
    area = torch.stack(side, 1).clamp(min=1.0).prod(1) if "x1" in columns else None
    number, scores = torch.arange(len(found), device=x.device), found.scores.to(torch.float32)

    def nearby(rows: slice) -> Tensor:
        """The four columns (4, r) of some boxes, compared with all m."""
        across, along = x[rows, None] - x, y[rows, None] - y
        square = torch.addcmul(across.square(), along, along)  # (r, m) of the distance
        square = square if area is None else square / area[rows, None]
        same_frame = found.frame[rows, None] == found.frame
        other = same_frame & (number[rows, None] != number)
        square = torch.where(other, square, _FAR**2)
        same_class = found.labels[rows, None] == found.labels
        of_class = torch.where(same_class, square, _FAR**2)
        nearest = torch.stack([square.amin(1), of_class.amin(1)]).clamp(0.05**2, _FAR**2)
        count = same_frame.sum(1, dtype=torch.float32).log1p()
        near = ((square < _NEAR**2) * scores).sum(1)
        return torch.cat([0.5 * nearest.log(), torch.stack([count, near])])

    if len(found) <= _MOST:
        return dict(zip(names, nearby(slice(None))))
    step = max(_MOST * _MOST // len(found), 1)
    parts = [nearby(slice(i, i + step)) for i in range(0, len(found), step)]
    return dict(zip(names, torch.cat(parts, 1)))


def covariance_inputs(found: Detections) -> _Columns:
    """Return the log variances of the fields, and of the score logit where it is known.

    Also which sides of an image box are clipped at its border: they have no variance of their own.
    """
    if found.covariance is None:
        return {}
    clipped = found.clipped if "x1" in found.fields else None
    variances = found.covariance.diagonal(dim1=1, dim2=2).to(torch.float32)
    logs = log_variances(found.fields, variances, clipped)
    inputs = {f"variance {name}": log for name, log in zip(found.fields, logs.unbind(1))}
    if clipped is not None:
        columns = dict(zip(found.fields, clipped.float().unbind(1)))
        inputs |= {f"clipped {name}": columns[name] for name in IMAGE}
    if found.score_variance is not None:
        inputs["variance logit"] = found.score_variance.float().clamp(min=MIN_VARIANCE).log()
    return inputs
