"""Errors of boxes from covariances and scores: the calibration and the risk of a box."""

from boxcov.error_model.risk import Risk, fit_risk

__all__ = ["Risk", "fit_risk"]
