"""Which covariance an exported file contains: that of the errors, or the epistemic one alone."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from boxcov.detections import Detections
from boxcov.errors import BoxcovError

CovarianceKind = Literal["predictive", "epistemic"]


def select_covariance(detections: Detections, kind: CovarianceKind = "predictive") -> Tensor:
    """Return the covariances (m, D, D) of the given kind.

    The default is the covariance of the errors, because that is what a reader of an exported file
    expects. The epistemic covariance must be requested.

    >>> from torch import eye, ones, zeros
    >>> box = Detections(ones(1, 1), ones(1), zeros(1), zeros(1), ("x",), ("car",), eye(1)[None])
    >>> select_covariance(box, "epistemic").tolist()
    [[[1.0]]]
    """
    if kind not in ("predictive", "epistemic"):
        raise BoxcovError(f"covariance must be predictive or epistemic, got {kind!r}")
    if detections.covariance is None and detections.predictive is None:
        raise BoxcovError(
            "these are plain detections without a covariance: make them with MCGLM, ExactGLM, GLM "
            "or MCI"
        )
    if kind == "epistemic":
        if detections.covariance is None:
            raise BoxcovError(
                "these detections have no epistemic covariance: use covariance='predictive'"
            )
        return detections.covariance
    if detections.predictive is None:
        raise BoxcovError(
            "these detections have the epistemic covariance alone, which leaves out the noise of "
            "sensor and labels: a reader would trust the boxes too much. Calibrate (boxcov "
            "calibrate), or pass covariance='epistemic'"
        )
    return detections.predictive
