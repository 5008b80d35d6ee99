"""``boxcov.Monitor``: does a frame look like the usual ones? Alarms at a chosen false-alarm rate.

A frame is described by a few numbers. How unusual it is, is ranked among the usual frames: the new
frame and the usual ones are treated alike (full conformal prediction), so if they are exchangeable
the p-value is at most ``a`` with a probability of at most ``a``, for any detector.

Evidence accumulates over frames by the Shiryaev-Roberts rule ``R = (R + 1) e(p)``, for each number
and each direction by itself. The mean of the bet ``e`` is 1 under uniform p-values, so ``R`` minus
the number of frames is a martingale while nothing changes. The same is true of the mean of all
``R``, which therefore reaches ``run_length`` after at least ``run_length`` frames on average. For
these p-values the frames of the stream join the usual ones, so they are independent over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from pathlib import Path
from typing import Any

import numpy as np

from boxcov._files.input_file import conform, read_json, reading
from boxcov._files.output_file import to_json, write_text
from boxcov.concatenation import check_single_frame
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, counted

Array = np.ndarray[Any, Any]
SINGLE = ("boxes", "objects", "certainty", "width")  # all further numbers make up the distance
MAX_FRAMES = 5000  # of usual frames and of the stream together, to bound the cost per frame
_KEY = "boxcov.monitor"
_RATES = ("false_alarm_rate", "run_length")
_SHRINKAGE = 0.3  # of the covariance of the numbers towards its diagonal
_LARGE = 2.0  # standard deviations from which on a number is given as a reason
_VELOCITY = ("vx", "vy")  # of next to nothing for objects at rest


@dataclass(frozen=True)
class Verdict:
    """What the monitor says about a frame."""

    p_value: float  # among the usual frames
    alarm: bool  # whether the p-value is at most the false-alarm rate
    evidence: float  # of the stream so far; 1 is none
    change: bool  # whether the evidence has reached the run length; then it is reset to 0
    reasons: tuple[str, ...]  # in words, the largest first; empty without alarm and change


class Monitor:
    """Compares the frames of a stream with usual frames.

    false_alarm_rate: share of usual frames with an alarm.
    run_length: mean number of usual frames before a false ``change``.

    >>> import torch
    >>> def frame(boxes, number=0):
    ...     zeros = torch.zeros(boxes, dtype=torch.long)
    ...     scores = torch.full((boxes,), 0.8)
    ...     fields, classes = ("x", "y"), ("car",)
    ...     return Detections(torch.zeros(boxes, 2), scores, zeros, zeros + number, fields, classes)
    >>> monitor = Monitor([frame(20 + number % 9) for number in range(40)])
    >>> monitor(frame(23)).alarm
    False
    >>> monitor(frame(2)).reasons[0]
    'fewer boxes than usual: 2, usually 20 to 28'
    """

    def __init__(
        self,
        usual: Sequence[Detections | Mapping[str, Any]] | Mapping[str, Array],
        false_alarm_rate: float = 0.05,
        run_length: float = 1000.0,
    ) -> None:
        if isinstance(usual, Detections):
            raise BoxcovError("usual holds the detections of each frame: give detections.frames()")
        rows = usual if isinstance(usual, Mapping) else _stack([frame_numbers(f) for f in usual])
        self.usual = {name: np.asarray(column, float) for name, column in rows.items()}  # (n,)
        self.false_alarm_rate, self.run_length = float(false_alarm_rate), float(run_length)
        if not 0 < self.false_alarm_rate < 1:
            raise BoxcovError(f"false_alarm_rate must lie between 0 and 1, got {false_alarm_rate}")
        if not self.run_length > 1:
            raise BoxcovError(f"run_length must be above 1 frame, got {run_length}")
        self._table = np.stack(list(self.usual.values()), 1) if self.usual else np.zeros((0, 0))
        needed = ceil(1 / self.false_alarm_rate - 1e-9) - 1
        if len(self._table) < max(needed, 2):
            raise BoxcovError(
                f"{len(self._table)} usual frames are too few for a false-alarm rate of "
                f"{self.false_alarm_rate:g}: give at least {max(needed, 2)}"
            )
        self._joined = self._table  # usual frames and frames of the stream
        self._evidence = np.zeros(())  # of each number: that it has become larger, then smaller

    def __repr__(self) -> str:
        return (
            f"Monitor({counted(len(self._table), 'usual frame')}, "
            f"{counted(len(self.usual), 'number')}, "
            f"false-alarm rate {self.false_alarm_rate:g}, run length {self.run_length:g})"
        )

    def __call__(self, found: Detections | Mapping[str, Any]) -> Verdict:
        """Return the verdict on the next frame: its detections, or a line of ``boxcov stream``."""
        return self.judge(frame_numbers(found))

    def judge(self, numbers: Mapping[str, float]) -> Verdict:
        """Return the verdict on the next frame, given as the numbers of the usual frames."""
        if numbers.keys() != self.usual.keys():
            missing = sorted(numbers.keys() ^ self.usual.keys())
            raise BoxcovError(
                f"the frame and the usual frames differ in {', '.join(missing)}: predict both with "
                "the same method and posterior"
            )
        row = np.array([numbers[name] for name in self.usual])
        deviations = _deviations(np.vstack([self._table, row]), self.usual)
        # of each row: how far the number that is farthest from its mean is from it
        unusual = np.maximum(np.abs(deviations[:, :-1]).max(1, initial=0), deviations[:, -1])
        p_value = _rank(unusual)
        alarm = p_value <= self.false_alarm_rate
        evidence = self._accumulate(np.vstack([self._joined, row]))
        change = bool(evidence.mean() >= self.run_length)
        self._evidence = np.zeros(()) if change else evidence
        reasons: list[str] = []
        if alarm:
            reasons = self._reasons(deviations[-1], _LARGE, numbers)
        elif change:  # the last frame need not be unusual
            larger, smaller = evidence.reshape(2, -1)
            signed = np.where(larger >= smaller, larger, -smaller)
            reasons = self._reasons(signed, self.run_length, {})
        return Verdict(p_value, alarm, float(evidence.mean()), change, tuple(reasons))

    def _accumulate(self, joined: Array) -> Array:
        """Return the evidence (2 S + 2,) of each number after the last of the joined frames."""
        if len(joined) <= MAX_FRAMES:
            self._joined = joined
        deviations = _deviations(joined, self.usual)
        bets = [_bet(_rank(side)) for side in (*deviations.T, *(-deviations[:, :-1]).T)]
        # the distance has one side; its second one never moves
        return (self._evidence + 1) * np.array([*bets, 0.0])

    def _reasons(self, signed: Array, least: float, numbers: Mapping[str, float]) -> list[str]:
        """Return in words which sizes (S + 1,) are at least ``least``; always the largest one."""
        names = [name for name in self.usual if name in SINGLE] + ["distance"]
        order = np.argsort(-np.abs(signed), kind="stable")
        return [
            _words(names[i], signed[i], numbers.get(names[i]), self.usual.get(names[i]))
            for i in order
            if i == order[0] or abs(signed[i]) >= least
        ]

    def save(self, path: str | Path) -> None:
        """Write one JSON file, which replaces ``path`` as a whole. The evidence is not stored."""
        usual = {  # JSON has no NaN
            name: [None if np.isnan(value) else value for value in column.tolist()]
            for name, column in self.usual.items()
        }
        rates = {name: getattr(self, name) for name in _RATES}
        write_text(path, to_json({_KEY: {"usual": usual, **rates}}) + "\n")

    @staticmethod
    def load(path: str | Path) -> Monitor:
        """Load a monitor; raise if the file is damaged."""
        with reading(path, "a file of a boxcov monitor"):
            stored = read_json(path)[_KEY]
            usual = conform(stored["usual"], dict[str, list[float | None]], "usual")
            rates = {name: conform(stored[name], float, name) for name in _RATES}
            return Monitor({name: np.array(c, float) for name, c in usual.items()}, **rates)


def frame_numbers(found: Detections | Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that describe one frame, by name.

    Means over the boxes are weighted by P(there is an object), or by the score if the detections
    are uncalibrated. They are NaN for a frame without boxes, and for fields whose errors the
    calibration frames did not show.
    """
    if isinstance(found, Detections):
        check_single_frame(found, "the monitor")
        found = {"fields": found.fields, **found.numpy()}
    if "error" in found:  # of a line
        raise BoxcovError(f"this frame could not be read: {found['error']}")
    arrays, fields = found, found["fields"]
    for name in ("scores", "no_object", "covariance"):
        if name in arrays and not np.isfinite(arrays[name]).all():
            raise BoxcovError(f"{name} are not finite")
    scores = np.asarray(arrays["scores"], float)
    m, weight = len(scores), scores
    if "no_object" in arrays:
        weight = 1 - np.asarray(arrays["no_object"], float)
    share = weight / weight.sum() if m and weight.sum() > 0 else np.full(m, 1 / max(m, 1))

    def mean(values: Array) -> float:
        return float(share @ values) if m else float("nan")

    clipped = scores.clip(1e-4, 1 - 1e-4)
    logs = {}
    for name in ("covariance", "predictive"):
        if name in arrays:
            C = np.asarray(arrays[name], float).reshape(m, len(fields), len(fields))
            logs[name] = np.log(np.einsum("mdd->md", C).clip(1e-12))  # (m, D)
    numbers = {"boxes": log(1 + m), "objects": log(1 + float(weight.sum()))}
    numbers["certainty"] = mean(weight)
    if logs:
        columns = [i for i, name in enumerate(fields) if name not in _VELOCITY]
        numbers["width"] = mean(0.5 * list(logs.values())[-1][:, columns].mean(1))
    numbers["score logit"] = mean(np.log(clipped / (1 - clipped)))
    for name, values in logs.items():
        numbers |= {f"{name} {f}": mean(values[:, i]) for i, f in enumerate(fields)}
    return numbers


def _stack(rows: Sequence[Mapping[str, float]]) -> dict[str, Array]:
    if any(row.keys() != rows[0].keys() for row in rows):
        raise BoxcovError("the usual frames differ in what they hold: predict them in one run")
    return {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def _deviations(table: Array, names: Iterable[str]) -> Array:
    """Return how unusual each row (n, P) is: standard scores (n, S + 1), the distance last.

    All rows are treated alike, which makes the ranks conformal.
    """
    known = ~np.isnan(table)
    mean = np.where(known, table, 0).sum(0) / known.sum(0).clip(1)
    rows = np.where(known, table - mean, 0)
    is_single = np.array([name in SINGLE for name in names])
    rest = rows[:, ~is_single]
    S = rest.T @ rest / len(rest)
    S = S + _SHRINKAGE * np.diag(S.diagonal()) + 1e-12 * np.eye(len(S))
    distance = np.sqrt(np.einsum("ni,ij,nj->n", rest, np.linalg.inv(S), rest))
    scores = np.column_stack([rows[:, is_single], distance - distance.mean()])
    return scores / scores.std(0).clip(1e-9)


def _rank(values: Array) -> float:
    """Return the conformal p-value of the last value, small if it is the largest."""
    # rounding must not put equal frames before the last one
    return float((values >= values[-1] - 1e-9 * abs(values[-1])).mean())


def _bet(p: float) -> float:
    """Return the mean of ``k p^(k - 1)`` over k from 0 to 1: an e-value, large for a small p."""
    return 0.5 if p > 1 - 1e-6 else (1 - p + p * log(p)) / (p * log(p) ** 2)


def _words(name: str, z: float, value: float | None, usual: Array | None) -> str:
    words = {
        "boxes": ("fewer boxes than usual", "more boxes than usual"),
        "objects": ("fewer objects than usual", "more objects than usual"),
        "certainty": ("objects less certain than usual", "objects more certain than usual"),
        "width": ("errors expected smaller than usual", "errors expected larger than usual"),
        "distance": ("boxes unlike the usual boxes", "boxes unlike the usual boxes"),
    }[name][int(z > 0)]
    if usual is None or value is None or np.isnan(value) or name == "width":
        return words
    low, high = np.nanquantile(usual, (0.05, 0.95), method="nearest")
    if name in ("boxes", "objects"):
        value, low, high = np.expm1([value, low, high])
        return f"{words}: {value:.0f}, usually {low:.0f} to {high:.0f}"
    return f"{words}: {value:.2f}, usually {low:.2f} to {high:.2f}"
