"""Tracks of boxes with Stone Soup: a Kalman filter with each box's own noise R.

Needs Stone Soup: ``pip install stonesoup``. A box measures ``x y yaw vx vy`` in the world;
the state is ``x vx y vy yaw``. A detector makes similar errors in successive frames. Therefore a
part of each box's error is a state of its own that fades in time (coloured noise): a filter that
takes all of R as white becomes sure of an error that it sees again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import inf, isfinite, nan, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.box_layout import columns
from boxcov.concatenation import check_single_frame
from boxcov.data.poses import Pose, transform_detections
from boxcov.detections import Detections, to_array
from boxcov.errors import BoxcovError, import_package, join_names
from boxcov.export.kalman import measurements
from boxcov.export.stone_soup import stone_soup

Array = NDArray[Any]
MEASURED = ("x", "y", "yaw", "vx", "vy")
STATE = ("x", "vx", "y", "vy", "yaw")
_H = np.eye(5)[[STATE.index(name) for name in MEASURED]]  # (5, 5) measured fields of the state
_YAW = MEASURED.index("yaw")
_DIFFUSE = (1e4, 1e3, 1e4, 1e3, 1e1)  # variances of the state before the first box
_MISSED = 1e6  # cost of a missed detection: a box in the gate is better
_STANDING = {"barrier": 1e-3, "traffic_cone": 1e-3}  # classes that do not move by themselves
_EPOCH = datetime(2000, 1, 1)
_LATEST = 6e10  # seconds before and after it that a datetime can hold
_LONGEST = 3600.0  # seconds between two frames of a drive
_SUREST = 1 - 1e-6  # most P(object) of a box: a track that is certain would never end


@dataclass(frozen=True)
class TrackerSettings:
    """The settings of a tracker. Tune them on drives of your own."""

    # density in m^2 / s^3, for all or by class; else 1, and next to nothing for barriers and cones
    acceleration: float | Mapping[str, float] = field(default_factory=dict)
    turning: float = 0.02  # density of the yaw rate in rad^2 / s
    noise: float = 1.0  # factor of R
    persistence: float = 0.5  # share of R that successive frames have in common
    fading: float = 5.0  # seconds until that share has fallen to 1 / e
    dof: float = inf  # of a Student-t update, which mistrusts outliers; inf: Kalman
    gate: float = 0.99  # level of the regions
    birth: float = 0.3  # P(object) of a box that starts a track
    death: float = 0.05  # P(object) of a track below which it ends
    detection: float = 0.6  # P(a present object is reported)
    memory: float = 0.5  # weight of the newest box in the P(object) of its track

    def __post_init__(self) -> None:
        for name in ("persistence", "gate", "birth", "death", "detection", "memory"):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (name in ("persistence", "gate") and value == 1):
                raise BoxcovError(f"{name} must lie from 0 to 1 (gate, persistence below): {value}")
        for name in ("acceleration", "turning", "noise", "fading", "dof"):
            value = getattr(self, name)
            if not all(v > 0 for v in (value.values() if isinstance(value, Mapping) else [value])):
                raise BoxcovError(f"{name} must be above 0, got {value}")


@dataclass(eq=False)
class BoxTrack:
    """One object over time."""

    number: int
    label: int
    states: Any  # stonesoup.types.track.Track
    existence: float  # P(there is an object)
    box: Array  # (D,) its newest box, in the world
    row: int | None  # of its box in the newest frame; None if it was not reported there
    direction: float = 0.0  # log odds that yaw is the front, not the back
    nis: list[float] = field(default_factory=list)  # of each box, divided by the 5 fields

    def __repr__(self) -> str:
        x, _, y, *_ = self.mean
        return (
            f"BoxTrack({self.number}, label {self.label}, {len(self.states)} states, at x={x:.4g} "
            f"y={y:.4g}, P(object) {self.existence:.2g})"
        )

    @property
    def mean(self) -> Array:
        """The state ``x vx y vy yaw``, (5,)."""
        return np.asarray(self.states.state_vector, dtype=float)[:5, 0]

    @property
    def covariance(self) -> Array:
        """The covariance of the state, (5, 5)."""
        return np.asarray(self.states.covar, dtype=float)[:5, :5]


class Tracker:
    """Tracks the boxes of one frame after another.

    R of a box is its ``predictive`` covariance, or ``residual`` plus the epistemic one, see
    ``kalman.measurements``. A box can belong to a track of its class if every field lies in the
    box's region of level ``gate``, widened by the track's own uncertainty; without an error model
    the region is that of a Gaussian. The cost of a pair is its negative log likelihood. Tracks are
    born and ended by P(object): 1 - ``no_object`` of calibrated boxes, else the score.

    >>> from torch import eye, ones, tensor, zeros
    >>> from boxcov.data.poses import BOX_FIELDS
    >>> one, car = zeros(1).long(), tensor([[10.0, 0, 0, 2, 4, 1.5, 0, 0, 0]])
    >>> box = Detections(car, ones(1), one, one, BOX_FIELDS, ("car",), 0.01 * eye(9)[None])
    >>> tracker = Tracker(residual=0.04 * eye(9))
    >>> tracks = [tracker.update(box, seconds) for seconds in (0.0, 0.5, 1.0)][-1]
    >>> len(tracks), len(tracks[0].states), tracks[0].covariance.shape
    (1, 3, (5, 5))
    """

    def __init__(self, settings: TrackerSettings | None = None, residual: Any = None) -> None:
        self.settings, self.residual = settings or TrackerSettings(), residual
        self.tracks: list[BoxTrack] = []
        self.seconds, self._in_world, self._count = -inf, False, 0
        self._classes: tuple[str, ...] = ()
        self.parts = stone_soup()
        self.updater = self.parts.KalmanUpdater(use_joseph_cov=True)

    def update(self, found: Detections, seconds: float, pose: Pose | None = None) -> list[BoxTrack]:
        """Return the tracks after the boxes of one frame at a time in seconds.

        pose: from the coordinates of the boxes to those of the tracks, such as the ego pose. The
            boxes stay where they are without one, which is right only for a sensor at rest.
        """
        seconds = self._check_time(seconds)
        self._check(found, seconds, pose)
        boxes = _Boxes(found, pose, self.residual, self.settings)
        self._classes = found.classes
        time = _EPOCH + timedelta(seconds=seconds)
        measured = [
            self.parts.Detection(
                z[:, None], timestamp=time, measurement_model=self._model(R), metadata={"row": row}
            )
            for row, (z, R) in enumerate(zip(boxes.z, boxes.R))
        ]
        by_states = {track.states: track for track in self.tracks}
        for track in self.tracks:
            track.row = None
        associate = self.parts.GNNWith2DAssignment(_Hypotheses(self, by_states, boxes))
        matches = associate.associate(set(by_states), set(measured), time) if by_states else {}
        for states, hypothesis in matches.items():
            self._extend(by_states[states], hypothesis, boxes)
        used = {track.row for track in self.tracks}
        self.tracks = [t for t in self.tracks if t.existence >= self.settings.death]
        for row, box in enumerate(measured):
            if row not in used and boxes.p[row] >= self.settings.birth:
                self._start(boxes, row, box)
        self.seconds, self._in_world = seconds, pose is not None
        return list(self.tracks)

    def _check_time(self, time: Any) -> float:
        """Return the time of a frame; raise if it cannot follow that of the frame before."""
        try:
            seconds = float(time)
        except (TypeError, ValueError):
            seconds = nan
        if not isfinite(seconds):
            raise BoxcovError(f"the time of a frame must be a number of seconds, got {time!r}")
        if seconds <= self.seconds:
            raise BoxcovError(
                f"frames must come in the order of time: {seconds} s follows {self.seconds} s. "
                "Sort them, or start another Tracker for another drive"
            )
        if abs(seconds) > _LATEST:
            raise BoxcovError(
                f"{seconds:.5g} is no time in seconds: multiply time stamps in microseconds by 1e-6"
            )
        if self.seconds > -inf and seconds - self.seconds > _LONGEST:
            raise BoxcovError(
                f"{seconds} s follows {self.seconds} s, more than an hour later: multiply time "
                "stamps in microseconds by 1e-6, or start another Tracker for another drive"
            )
        return seconds

    def _check(self, found: Detections, seconds: float, pose: Pose | None) -> None:
        if found.classes != (self._classes or found.classes):
            raise BoxcovError(
                f"the classes are {join_names(found.classes)}, and were "
                f"{join_names(self._classes)} before: start another Tracker"
            )
        if pose is not None and not isinstance(pose, Pose):
            raise BoxcovError(
                f"pose must be a boxcov.data.poses.Pose, got {type(pose).__name__}: a 4 x 4 matrix "
                "T of torch is Pose(T[:3, :3], T[:3, 3])"
            )
        if self.seconds > -inf and (pose is not None) != self._in_world:
            raise BoxcovError(
                f"the frame at {seconds} s has {'an' if pose is not None else 'no'} ego pose, "
                "unlike the one before: give a pose for every frame or for none"
            )
        density = self.settings.acceleration
        named = set(density) if isinstance(density, Mapping) else set()
        if unknown := named - set(found.classes):
            raise BoxcovError(
                f"acceleration has {join_names(sorted(unknown))}, but the classes are "
                f"{join_names(found.classes)}"
            )
        check_single_frame(found, "an update of the tracker")

    def _model(self, R: Array) -> Any:
        """Return the measurement model of a box."""
        lasts = self.settings.persistence
        H = np.hstack([_H, sqrt(lasts) * np.linalg.cholesky(R)])
        return self.parts.BoxMeasurement(
            ndim_state=10, mapping=tuple(range(5)), noise_covar=(1 - lasts) * R, R=R, H=H
        )

    def predictor(self, label: int) -> Any:
        """Return the predictor of a class."""
        density = self.settings.acceleration
        if isinstance(density, Mapping):
            density = {**_STANDING, **density}.get(self._classes[label], 1.0)
        motion = self.parts.BoxMotion((density, self.settings.turning, self.settings.fading))
        return self.parts.KalmanPredictor(motion)

    def _start(self, boxes: _Boxes, row: int, detection: Any) -> None:
        mean = np.concatenate([_H.T @ boxes.z[row], np.zeros(5)])[:, None]
        P = np.diag([*_DIFFUSE, *[1.0] * 5])
        prior = self.parts.GaussianState(mean, P, timestamp=detection.timestamp)
        first = self.updater.update(self.parts.SingleHypothesis(prior, detection))
        self._count += 1
        track = BoxTrack(
            number=self._count,
            label=int(boxes.labels[row]),
            states=self.parts.Track([first]),
            existence=float(boxes.p[row]),
            box=boxes.boxes[row],
            row=row,
            direction=float(boxes.front[row]),
        )
        self.tracks.append(track)

    def _extend(self, track: BoxTrack, hypothesis: Any, boxes: _Boxes) -> None:
        """Append the state after this frame to a track."""
        if not hypothesis:
            track.states.append(hypothesis.prediction)
            seen = self.settings.detection
            track.existence *= (1 - seen) / (1 - seen * track.existence)
            return
        row = hypothesis.measurement.metadata["row"]
        predicted = hypothesis.measurement_prediction
        step = hypothesis.measurement.state_vector - predicted.state_vector
        distance = float((step.T @ np.linalg.solve(predicted.covar, step))[0, 0])
        if isfinite(self.settings.dof):
            square = np.asarray(step, dtype=float)[:, 0] ** 2 / np.diag(predicted.covar)
            hypothesis = self._mistrust(hypothesis, square)
        state = self.updater.update(hypothesis)
        turns = round((state.state_vector[4, 0] - track.mean[4]) / pi)
        track.direction += float(boxes.front[row]) * (-1) ** turns
        is_back = track.direction < 0
        track.direction = abs(track.direction)
        state.state_vector[4, 0] += (is_back - turns) * pi
        track.states.append(state)
        track.nis.append(distance / 5)
        track.box, track.row = boxes.boxes[row], row
        track.existence += self.settings.memory * (float(boxes.p[row]) - track.existence)

    def _mistrust(self, hypothesis: Any, square: Array) -> Any:
        """Return a hypothesis with a larger R for fields (5,) that are off by many deviations."""
        box, dof = hypothesis.measurement, self.settings.dof
        larger = np.sqrt(np.maximum(1.0, (dof + square) / (dof + 1)))
        box.measurement_model = self._model(np.outer(larger, larger) * box.measurement_model.R)
        return self.parts.SingleHypothesis(hypothesis.prediction, box)


class _Boxes:
    """The boxes of one frame as arrays, in the world."""

    def __init__(
        self, found: Detections, pose: Pose | None, residual: Any, settings: TrackerSettings
    ) -> None:
        measured = measurements(found, MEASURED, residual=residual, pose=pose)
        moved = found if pose is None else transform_detections(found, pose)
        self.z, self.R = measured.z.cpu().numpy(), settings.noise * measured.R.cpu().numpy()
        arrays = moved.numpy()
        self.boxes, self.labels = arrays["boxes"], arrays["labels"]
        p = 1 - arrays["no_object"] if "no_object" in arrays else arrays["scores"]
        self.p = p.clip(max=_SUREST)
        flipped = arrays.get("flipped", np.full(len(found), 0.05)).clip(1e-3, 0.5)
        self.front = np.log((1 - flipped) / flipped)
        # regions are wider in the axes of the world, so gates are in those of the sensor
        self.to_sensor = np.eye(5)
        if pose is not None:
            self.to_sensor[:2, :2] = self.to_sensor[3:, 3:] = pose.R[:2, :2].T.numpy()
        self.reach = import_package("scipy.stats").chi2.ppf(settings.gate, 1)  # of a Gaussian
        R = self.to_sensor @ self.R @ self.to_sensor.T
        self.widths = np.sqrt(self.reach * np.diagonal(R, axis1=1, axis2=2))
        if found.region_widths is not None:
            at = columns(found.fields, MEASURED)
            region = to_array(found.region(settings.gate)[:, at].double())
            # infinite where a class had too few calibration boxes
            self.widths = np.where(np.isfinite(region), region, self.widths)

    def in_gate(self, step: Array, P: Array) -> Array:
        """Return which boxes (m,) are in the gate of a track with the covariance P.

        step: (m, 5) from the predicted to the measured fields.
        """
        A = self.to_sensor @ _H
        widths = np.sqrt(self.widths**2 + self.reach * np.diag(A @ P @ A.T))
        return np.asarray((np.abs(step @ self.to_sensor.T) <= widths).all(1))


class _Hypotheses:
    """Which boxes may belong to which tracks; a hypothesiser of Stone Soup."""

    def __init__(self, tracker: Tracker, tracks: dict[Any, BoxTrack], boxes: _Boxes) -> None:
        self.tracker, self.tracks, self.boxes = tracker, tracks, boxes

    def hypothesise(self, states: Any, detections: Any, timestamp: datetime, **_: Any) -> Any:
        """Return the hypotheses of one track: a missed detection, and the boxes in its gate."""
        parts, boxes, track = self.tracker.parts, self.boxes, self.tracks[states]
        predicted = self.tracker.predictor(track.label).predict(states, timestamp=timestamp)
        mean = np.asarray(predicted.state_vector, dtype=float)[:5, 0]
        P = np.asarray(predicted.covar, dtype=float)[:5, :5]
        step = boxes.z - _H @ mean  # (m, 5)
        turns = np.round(step[:, _YAW] / pi)
        step[:, _YAW] -= turns * pi  # yaw is an axis
        in_gate = boxes.in_gate(step, P) & (boxes.labels == track.label)
        missed = parts.MissedDetection(timestamp=timestamp)
        found = [parts.SingleDistanceHypothesis(predicted, missed, _MISSED)]
        for box in detections:
            row = box.metadata["row"]
            if not in_gate[row]:
                continue
            turned = parts.Prediction.from_state(predicted, predicted.state_vector.copy())
            turned.state_vector[4, 0] += turns[row] * pi
            seen = self.tracker.updater.predict_measurement(turned, box.measurement_model)
            y = step[row]
            cost = y @ np.linalg.solve(seen.covar, y) + np.linalg.slogdet(seen.covar)[1]
            found.append(parts.SingleDistanceHypothesis(turned, box, float(cost), seen))
        return parts.MultipleHypothesis(sorted(found, reverse=True))
