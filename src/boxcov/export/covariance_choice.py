"""Which covariance an exported file contains: that of the errors, or the epistemic one alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from warnings import warn

from torch import Tensor

from boxcov.detections import Detections
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.result_check import check_result

CovarianceKind = Literal["predictive", "epistemic"]


def select_covariance(detections: Detections, kind: CovarianceKind = "predictive") -> Tensor:
    """Return the covariances (m, D, D) of the given kind.

    The default is the covariance of the errors, because that is what a reader of an exported file
    expects. The epistemic covariance must be requested.
    """
    if kind not in ("predictive", "epistemic"):
        raise BoxcovError(f"covariance must be predictive or epistemic, got {kind!r}")
    if detections.covariance is None and detections.predictive is None:
        raise BoxcovError(
            "these are plain detections without a covariance: make them with MCGLM, ExactGLM, GLM "
            "or MCI"
        )
    check_result(detections, "these detections cannot be exported")
    if kind == "epistemic":
        if detections.covariance is None:
            raise BoxcovError(
                "these detections have no epistemic covariance: use covariance='predictive'"
            )
        clipped = int(detections.clipped.any(1).sum())
        if clipped:
            warn(
                f"{clipped} of {len(detections)} boxes are clipped at the image border: their "
                "epistemic covariance is 0 in the clipped sides, as if these were known. "
                "Calibrated detections have a variance there",
                BoxcovWarning,
                stacklevel=3,
            )
        return detections.covariance
    if detections.predictive is None:
        raise BoxcovError(
            "these detections have the epistemic covariance alone, which leaves out the noise of "
            "sensor and labels: a reader would trust the boxes too much. Calibrate (boxcov "
            "calibrate), or pass covariance='epistemic'"
        )
    return detections.predictive


def check_known(C: Tensor, fields: Sequence[str], way_out: str) -> None:
    """Raise if a predictive covariance (m, f, f) of ``fields`` is NaN, and say why."""
    is_unknown = C.diagonal(dim1=1, dim2=2).isnan().any(0).tolist()
    unknown = [name for name, is_nan in zip(fields, is_unknown) if is_nan]
    if unknown:
        raise BoxcovError(
            f"the predictive covariance of {', '.join(unknown)} is NaN: the calibration frames "
            "have too few labels of it. Calibrate on frames with such labels, or " + way_out
        )
