"""The classes of Stone Soup that a tracker uses, and two models of boxes."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from math import exp
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import import_package

Array = NDArray[Any]


@cache
def stone_soup() -> SimpleNamespace:
    """Return the classes of Stone Soup that a tracker uses, and two models of boxes."""

    def classes(module: str, *names: str) -> dict[str, Any]:
        found = import_package(f"stonesoup.{module}")
        return {name: getattr(found, name) for name in names}

    return SimpleNamespace(
        **_box_models(),
        **classes("predictor.kalman", "KalmanPredictor"),
        **classes("updater.kalman", "KalmanUpdater"),
        **classes("dataassociator.neighbour", "GNNWith2DAssignment"),
        **classes("types.detection", "Detection", "MissedDetection"),
        **classes("types.hypothesis", "SingleHypothesis", "SingleDistanceHypothesis"),
        **classes("types.multihypothesis", "MultipleHypothesis"),
        **classes("types.prediction", "Prediction"),
        **classes("types.state", "GaussianState"),
        **classes("types.track", "Track"),
    )


def _box_models() -> dict[str, Any]:
    """Return the models of measurement and motion, as classes of Stone Soup."""
    Property = import_package("stonesoup.base").Property
    linear = import_package("stonesoup.models.measurement.linear").LinearGaussian
    transition = import_package("stonesoup.models.transition.linear").LinearGaussianTransitionModel

    class BoxMeasurement(linear):  # type: ignore[misc, valid-type]
        """Box = state + error that lasts + white noise."""

        R: Array = Property(doc="Covariance of the box's error")
        H: Array = Property(doc="Matrix from state and lasting error to the box")

        def matrix(self, **_: Any) -> Array:
            return self.H

    class BoxMotion(transition):  # type: ignore[misc, valid-type]
        """Constant velocity, a yaw that wanders, and errors that fade."""

        densities: tuple[float, float, float] = Property(doc="Acceleration, turning, fading")

        def matrix(self, time_interval: timedelta = timedelta(0), **_: Any) -> Array:
            dt = time_interval.total_seconds()
            F = np.diag([*[1.0] * 5, *[exp(-dt / self.densities[2])] * 5])
            F[0, 1] = F[2, 3] = dt
            return F

        def covar(self, time_interval: timedelta = timedelta(0), **_: Any) -> Array:
            dt, (acceleration, turning, fading) = time_interval.total_seconds(), self.densities
            velocity = acceleration * np.array([[dt**3 / 3, dt**2 / 2], [dt**2 / 2, dt]])
            Q = np.diag([0.0] * 4 + [turning * dt] + [1 - exp(-2 * dt / fading)] * 5)
            Q[:2, :2] = Q[2:4, 2:4] = velocity
            return Q

    return {"BoxMeasurement": BoxMeasurement, "BoxMotion": BoxMotion}
