"""Which covariance leaves boxcov: that of the errors, or, if somebody says so, what the weights do not know alone."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from boxcov.detections import Detections
from boxcov.errors import BoxcovError

Which = Literal["predictive", "epistemic"]


def chosen(detections: Detections, which: Which = "predictive") -> Tensor:
    """The covariances (m, D, D) that a reader may take for those of the boxes' errors; the epistemic ones only where they are asked for.

    >>> from torch import eye, ones, zeros
    >>> one = Detections(ones(1, 1), ones(1), zeros(1), zeros(1), ("x",), ("car",), eye(1)[None])
    >>> chosen(one, "epistemic").tolist()
    [[[1.0]]]
    >>> chosen(one)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: these detections carry the epistemic covariance alone, which leaves out the noise of sensor and labels: ...
    """
    if which not in ("predictive", "epistemic"):
        raise BoxcovError(f"covariance must be predictive or epistemic, got {which!r}")
    if detections.covariance is None and detections.predictive is None:
        raise BoxcovError(
            "these are plain detections without a covariance: make them with MCGLM, ExactGLM, GLM or MCI"
        )
    found = detections.predictive if which == "predictive" else detections.covariance
    if found is None and which == "predictive":
        raise BoxcovError(
            "these detections carry the epistemic covariance alone, which leaves out the noise of sensor and labels: a reader would trust the "
            "boxes too much. Calibrate (boxcov calibrate, then calibrated=True or --calibrated), or ask for it with covariance='epistemic'"
        )
    if found is None:
        raise BoxcovError(
            "these detections carry no epistemic covariance: ask for the predictive one"
        )
    return found
