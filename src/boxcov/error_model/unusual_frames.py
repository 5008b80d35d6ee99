"""Wider regions and higher risk in frames unlike the calibration frames.

A single box does not tell whether the error model may be trusted, a frame does: in a frame with
objects that the detector does not know, few boxes are certain. The certainty of a frame is the mean
score of its boxes, weighted by the score. Frames below the certainty of all but a share ``GATE`` of
the calibration frames are unusual. Their half widths are multiplied by factors, and their
probabilities are mapped, as is right for the unusual ones among labelled *stress* frames, for
example copies with resized objects.

If a stress frame and a new frame are exchangeable, the wider regions hold their level. Of usual
frames at most the share ``GATE`` is widened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.detections import Detections
from boxcov.error_model.inputs import frame_certainty
from boxcov.error_model.regions import LEVELS, conformal_quantiles
from boxcov.errors import BoxcovError

GATE = 0.05  # share of the calibration frames that count as unusual
MIN_BOXES = 50  # with an object, in unusual stress frames
_SCALE = LEVELS.index(0.6827)  # the level whose factors are those of the scales


@dataclass(frozen=True)
class Widening:
    """What changes for the boxes of unusual frames."""

    bound: Tensor  # () frames with a lower certainty are unusual
    factors: Tensor  # (L, D) of the half widths, at least 1; infinite with too few stress boxes
    joint: Tensor  # (L,) of the half widths that hold all fields
    no_object: Tensor  # (2,) offset and slope of the logit
    iou_below: Tensor  # (2,)

    def __call__(self, found: Detections) -> Detections:
        """Return detections of the error model with wider regions in unusual frames."""
        is_unusual = frame_certainty(found) < self.bound  # (m,)
        factors = self.factors.where(is_unusual[:, None, None], 1.0)  # (m, L, D)
        joint = self.joint[:, None].where(is_unusual[:, None, None], 1.0)
        scale = factors[:, _SCALE]
        scale = scale.where(scale < torch.inf, 1.0)  # a field without labels in stress frames
        return replace(
            found,
            region_widths=_widen(found._needed("region_widths"), factors),
            joint_widths=_widen(found._needed("joint_widths"), joint),
            scale=found._needed("scale") * scale,
            predictive=found._needed("predictive") * scale[:, :, None] * scale[:, None, :],
            no_object=_raise(found._needed("no_object"), self.no_object, is_unusual),
            iou_below=_raise(found._needed("iou_below"), self.iou_below, is_unusual[:, None]),
        )


def _widen(widths: Tensor, factors: Tensor) -> Tensor:
    return torch.where(factors < torch.inf, widths * factors, widths + torch.inf)  # not 0 * inf


def _raise(p: Tensor, line: Tensor, rows: Tensor) -> Tensor:
    """Return probabilities whose logit is mapped in some rows, and nowhere smaller than before."""
    mapped = (line[0] + line[1] * _logit(p)).sigmoid()
    return torch.maximum(p, mapped).where(rows, p)


def _logit(p: Tensor) -> Tensor:
    return torch.logit(p.clamp(1e-6, 1 - 1e-6))


def certainty_bound(found: Detections) -> Tensor:
    """Return the bound () that at most a share ``GATE`` of exchangeable frames falls below."""
    certainty, number = frame_certainty(found), found.frame.unique(return_inverse=True)[1]
    frames = certainty.new_zeros(int(number.max()) + 1).index_copy(0, number, certainty)
    frames = frames.sort().values
    rank = floor(GATE * (len(frames) + 1) + 1e-9)
    return frames[rank - 1] if rank else certainty.new_tensor(-torch.inf)


def fit_widening(
    bound: Tensor, found: Detections, errors: Tensor, iou: Tensor, paired: Tensor
) -> Widening:
    """Return the widening from stress frames.

    bound: of the calibration frames; found: n boxes of stress frames, with the results of the
    error model; errors: (n, D), yaw as an axis; iou, paired: (n,).
    """
    rows = frame_certainty(found) < bound
    with_object = rows & paired
    count = int(with_object.sum())
    if count < MIN_BOXES:
        raise BoxcovError(
            f"only {count} boxes with an object are in stress frames unlike the calibration "
            f"frames, at least {MIN_BOXES} are needed: give more or harder stress frames, and at "
            f"least {ceil(1 / GATE) - 1} calibration frames"
        )
    own = found[with_object]
    errors = errors[with_object, None].abs()  # (n, 1, D)
    ratios = errors / own._needed("region_widths")  # (n, L, D)
    largest = (errors / own._needed("joint_widths")).nan_to_num(0).amax(2)  # of the known fields
    below = iou[with_object, None] < iou.new_tensor(found.meta["error_model"]["thresholds"])
    return Widening(
        bound=bound,
        factors=torch.stack([_factors(column) for column in ratios.unbind(2)], 1),
        joint=_factors(largest),
        no_object=_logit_line(found._needed("no_object")[rows], ~paired[rows]),
        iou_below=_logit_line(own._needed("iou_below"), below),
    )


def _factors(ratios: Tensor) -> Tensor:
    """Return the factor (L,) of each level that makes its share of the ratios (n, L) hold."""
    pairs = zip(LEVELS, ratios.unbind(1))
    found = torch.stack([conformal_quantiles(column, (level,))[0] for level, column in pairs])
    return found.clamp(min=1.0)


def _logit_line(p: Tensor, happened: Tensor) -> Tensor:
    """Return offset and positive slope (2,) of the logit with the lowest log loss."""
    x, y = _logit(p).double().flatten(), happened.double().flatten()
    line = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # offset, log slope
    optimizer = torch.optim.LBFGS([line], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(line[0] + line[1].exp() * x, y)
        value.backward()
        return value

    optimizer.step(loss)
    return torch.stack([line[0], line[1].exp()]).detach().float()
