"""The check of every number that leaves: results of a model, files and messages.

==============================  ================================================================
covariance                      finite, symmetric, positive semi-definite, no variance below 0
predictive                      the same, for the fields whose errors are known
score_variance                  finite, at least 0; ``score_covariance`` is finite
no_object, iou_below, flipped   between 0 and 1
scale                           finite and above 0, for the fields whose errors are known
region_widths, joint_widths     at least 0, or infinite, for the fields whose errors are known
labels                          a number of a class
boxes, scores                   finite in float32; velocities may be NaN
==============================  ================================================================

The errors of a field are unknown if the calibration frames had no labels for it. Its numbers are
then NaN for every box.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from boxcov.errors import NotFiniteError

if TYPE_CHECKING:
    from boxcov.detections import Detections

_FLOOR = 1e-6  # smallest standard deviation of a field that counts, relative to the box's largest
_VELOCITY = ("vx", "vy")
_Rules = dict[tuple[str, str], Tensor]  # what, its property: which boxes (m,) have it


def check_result(
    found: Detections,
    source: str,
    advice: str = "correct them, or predict again",
    *,
    unknown: Tensor | None = None,
    also: Tensor | None = None,
    strict: bool = True,
) -> bool:
    """Raise ``NotFiniteError``, naming a box, if a number of the detections is out of range.

    source: first words of the message; advice: its last words.
    unknown: (D,) fields whose errors are unknown; by default those that are NaN for every box.
    also: a flag on the device that is returned; one synchronisation reads everything.
    strict: False lets variances pass that are below 0 within rounding; the caller sets them to 0.
    """
    rules = _rules(found, unknown, strict) if len(found) else {}
    flags = [] if also is None else [also]
    flags += [torch.stack(list(rules.values())).all()] if rules else []
    if not flags or bool(torch.stack(flags).all()):
        return True
    if also is not None and not bool(also):
        return False
    (what, property), holds = next(rule for rule in rules.items() if not bool(rule[1].all()))
    rows = (~holds).nonzero()[:, 0].tolist()
    if what == "label":
        advice = f"labels must be 0 to {len(found.classes) - 1}, for {', '.join(found.classes)}"
    raise NotFiniteError(
        f"{source}: the {what} of {len(rows)} of {len(found)} boxes is not {property} "
        f"(box {rows[0]}: {found.boxes[rows[0]].tolist()}): {advice}"
    )


def rows_in_range(found: Detections, unknown: Tensor | None) -> Tensor:
    """Which boxes (m,) ``check_result(strict=False)`` accepts, without a synchronisation."""
    return torch.stack(list(_rules(found, unknown, strict=False).values())).all(0)


def _rules(found: Detections, unknown: Tensor | None, strict: bool) -> _Rules:
    m = len(found)
    kinds = {}
    if found.covariance is not None:
        kinds["covariance"] = found.covariance
    if found.predictive is not None:
        kinds["predictive covariance"] = _without_unknown(found.predictive, unknown)
    rules: _Rules = {}
    if kinds:  # both in one computation
        C = torch.cat(list(kinds.values()))
        held = properties(C)
        if strict:
            held["free of negative variances"] = (C.diagonal(dim1=1, dim2=2) >= 0).all(1)
        for i, what in enumerate(kinds):
            rules |= {(what, name): ok[i * m : (i + 1) * m] for name, ok in held.items()}
    if found.score_variance is not None:
        row = found.score_variance.unsqueeze(1)
        if found.score_covariance is not None:
            row = torch.cat([found.score_covariance, row], 1)
        rules["covariance", "finite with the score's logit"] = _is_finite(row).all(1)
        rules["variance of the score logit", "at least 0"] = row[:, -1] >= 0
    shares = [t for t in (found.no_object, found.iou_below, found.flipped) if t is not None]
    if shares:
        share = torch.cat([t.reshape(m, -1) for t in shares], 1)
        rules["probability", "between 0 and 1"] = (share == share.clamp(0, 1)).all(1)
    if found.scale is not None:
        is_known = (found.scale > 0) & (found.scale < torch.inf)
        holds = is_known | _unknown(found.scale, unknown)
        rules["scale of the error", "finite and above 0"] = holds.all(1)
    pair = [t for t in (found.region_widths, found.joint_widths) if t is not None]
    if pair:
        widths = torch.cat(pair, 1)
        holds = (widths >= 0) | _unknown(widths, unknown)
        rules["half width of the region", "at least 0"] = holds.flatten(1).all(1)
    is_class = (found.labels >= 0) & (found.labels < len(found.classes))
    rules["label", "the number of a class"] = is_class
    known = [i for i, name in enumerate(found.fields) if name not in _VELOCITY]
    places = found.boxes[:, : len(known)]
    if known != list(range(len(known))):  # a list as index would be copied to the device
        places = torch.stack([found.boxes[:, i] for i in known], 1)
    rules["position or size", "finite in float32"] = _is_finite(places.float()).all(1)
    rules["score", "finite"] = _is_finite(found.scores)
    return rules


def _is_finite(values: Tensor) -> Tensor:
    return values.abs() < torch.inf  # two launches on a GPU; isfinite() takes four


def _unknown(values: Tensor, unknown: Tensor | None) -> Tensor:
    """Which fields (D,) of values (m, ..., D) may be NaN."""
    return values.isnan().flatten(0, -2).all(0) if unknown is None else unknown


def _without_unknown(C: Tensor, unknown: Tensor | None) -> Tensor:
    """Covariances (m, D, D) with the identity in place of the fields that may be NaN."""
    fields = _unknown(C.diagonal(dim1=1, dim2=2), unknown)
    eye = torch.eye(len(fields), dtype=C.dtype, device=C.device)
    return torch.where(fields | fields.unsqueeze(1), eye, C)


def tolerance(covariance: Tensor) -> float:
    """Allowed deviation from symmetry and positivity, relative to the variances.

    It is larger on a GPU, where products may be taken in TF32.
    """
    return 1e-3 if covariance.device.type == "cpu" else 1e-2


def properties(C: Tensor) -> dict[str, Tensor]:
    """For each property, whether each covariance of (m, D, D) has it (m,)."""
    C = C.float() if C.dtype in (torch.float16, torch.bfloat16) else C
    slack = tolerance(C)
    spread = C.diagonal(dim1=1, dim2=2).abs().sqrt()  # (m, D)
    most = spread.amax(1, keepdim=True)
    spread = torch.maximum(spread, torch.where(most > 0, _FLOOR * most, 1))
    # a correlation matrix: metres, radians and metres per second weigh the same
    scaled = C / spread.unsqueeze(2) / spread.unsqueeze(1)
    eye = torch.eye(C.shape[1], dtype=C.dtype, device=C.device)
    lifted = (scaled + scaled.transpose(1, 2)) / 2 + slack * eye
    _, failed = torch.linalg.cholesky_ex(lifted)  # a tenth of the time of eigenvalues
    return {
        "finite": _is_finite(C).flatten(1).all(1),
        "positive semi-definite": failed == 0,
        "symmetric": ((scaled - scaled.transpose(1, 2)).abs() <= slack).flatten(1).all(1),
    }
