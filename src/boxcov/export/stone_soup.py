"""Two models of boxes for Stone Soup: their measurement and their motion."""

from __future__ import annotations

from datetime import timedelta
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stonesoup.base import Property
from stonesoup.models.measurement.linear import LinearGaussian
from stonesoup.models.transition.linear import LinearGaussianTransitionModel

Array = NDArray[Any]


class BoxMeasurement(LinearGaussian):  # type: ignore[misc]
    """Box = state + error that lasts + white noise."""

    R: Array = Property(doc="Covariance of the box's error")
    H: Array = Property(doc="Matrix from state and lasting error to the box")

    def matrix(self, **_: Any) -> Array:
        return self.H


class BoxMotion(LinearGaussianTransitionModel):  # type: ignore[misc]
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
