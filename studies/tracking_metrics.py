"""Numbers of tracks: consistency and errors of the state, MOTA, IDF1, AMOTA, identity switches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import motmetrics
import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from tracking_boxes import Drive
from tracking_noise import NEAR, P_LEAST, Noise

from boxcov.evaluate.intervals import bootstrap
from boxcov.export.tracker import Tracker, TrackerSettings

THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of P(object) of a track
RECALLS = np.linspace(0.1, 1.0, 10)
GROUPS = {"position": [0, 2], "velocity": [1, 3], "heading": [4]}  # of the state
COUNTS = ("num_objects", "num_misses", "num_false_positives", "num_switches")
ID_COUNTS = ("idtp", "idfp", "idfn")  # of IDF1
Counts = dict[str, float]


@dataclass(frozen=True)
class Row:
    """A track in one frame."""

    frame: int
    number: int
    label: int
    existence: float
    mean: np.ndarray  # (5,)
    P: np.ndarray  # (5, 5)
    nis: float  # of its box, divided by 5; NaN without one


def run(drive: Drive, noise: Noise, settings: TrackerSettings) -> list[Row]:
    """Return the tracks of a drive, frame by frame."""
    tracker, rows = Tracker(settings), []
    for frame, (raw, seconds, pose) in enumerate(zip(drive.found, drive.times, drive.poses)):
        found = noise(raw)
        for track in tracker.update(found[found.no_object < 1 - P_LEAST], seconds, pose):
            nis = track.nis[-1] if track.row is not None and track.nis else np.nan
            place = (track.number, track.label, track.existence)
            rows.append(Row(frame, *place, track.mean, track.covariance, nis))
    return rows


def truth_states(drive: Drive) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return states (n, 5) x vx y vy yaw in the world, labels and ids of each frame."""
    found = []
    for target, pose in zip(drive.targets, drive.poses):
        boxes = target["boxes"].double()
        place, velocity = pose(boxes[:, :3]), boxes[:, 7:] @ pose.R[:2, :2].T
        yaw = boxes[:, 6] + torch.atan2(pose.R[1, 0], pose.R[0, 0])
        columns = (place[:, 0], velocity[:, 0], place[:, 1], velocity[:, 1], yaw)
        state = torch.stack(columns, 1).numpy()
        found.append((state, target["labels"].numpy(), target["ids"].numpy()))
    return found


def distances(drive: Drive, rows: list[Row], threshold: float) -> Iterator[tuple[Any, ...]]:
    """Yield states, reported tracks, identities and distances (NaN: no pair) of each frame."""
    by_frame: dict[int, list[Row]] = {}
    for row in rows:
        if row.existence >= threshold:
            by_frame.setdefault(row.frame, []).append(row)
    for frame, (states, labels, ids) in enumerate(truth_states(drive)):
        tracks = by_frame.get(frame, [])
        means = np.array([row.mean for row in tracks]).reshape(-1, 5)
        kinds = np.array([row.label for row in tracks])
        far = np.linalg.norm(states[:, None, [0, 2]] - means[None][:, :, [0, 2]], axis=2)
        far[(far >= NEAR) | (labels[:, None] != kinds[None])] = np.nan
        yield states, tracks, ids, far


def accumulate(drive: Drive, rows: list[Row], threshold: float) -> motmetrics.MOTAccumulator:
    """Return which reported tracks follow which objects, class by class within 2 m."""
    result = motmetrics.MOTAccumulator(auto_id=True)
    for _, tracks, ids, far in distances(drive, rows, threshold):
        result.update(ids, [row.number for row in tracks], far)
    return result


def counts(result: motmetrics.MOTAccumulator) -> Counts:
    """Return the numbers of objects, misses, false tracks, switches, and those of IDF1."""
    names = [*COUNTS, *ID_COUNTS]
    computed = motmetrics.metrics.create().compute(result, metrics=names, name="drive")
    return {name: float(computed[name].iloc[0]) for name in names}


def unit_counts(result: motmetrics.MOTAccumulator) -> list[Counts]:
    """Return the same numbers of each object and of each track; their sum is ``counts``."""
    events = result.mot_events
    found = motmetrics.metrics.id_global_assignment(
        motmetrics.metrics.events_to_df_map(result.events)
    )
    pairs = list(zip(found["rids"], found["cids"]))
    missed = {row: found["fnmatrix"][row, column] for row, column in pairs}
    false = {column: found["fpmatrix"][row, column] for row, column in pairs}
    units: list[Counts] = []
    things = events[events.Type.isin(["MATCH", "SWITCH", "MISS"])]
    for row, (_, own) in enumerate(things.groupby("OId")):  # in the order of the assignment
        one = dict.fromkeys((*COUNTS, *ID_COUNTS), 0.0)
        one |= {"num_objects": len(own), "num_misses": (own.Type == "MISS").sum()}
        one |= {"num_switches": (own.Type == "SWITCH").sum()}
        units.append(one | {"idfn": missed[row], "idtp": len(own) - missed[row]})
    reported = events[events.Type.isin(["MATCH", "SWITCH", "FP"])]
    for column, (_, own) in enumerate(reported.groupby("HId")):
        one = dict.fromkeys((*COUNTS, *ID_COUNTS), 0.0)
        units.append(one | {"num_false_positives": (own.Type == "FP").sum(), "idfp": false[column]})
    return units


def total(found: Sequence[Counts]) -> Counts:
    return {name: sum(count[name] for count in found) for name in found[0]}


def pairs(drive: Drive, rows: list[Row], threshold: float) -> dict[tuple[int, int], dict[str, Any]]:
    """Return errors, NEES and NLL of each followed object, by frame and identity."""
    found = {}
    for frame, (states, tracks, ids, far) in enumerate(distances(drive, rows, threshold)):
        cost = np.where(np.isnan(far), 1e3, far)
        for thing, column in zip(*linear_sum_assignment(cost)):
            if cost[thing, column] < NEAR:
                number = int(ids[thing])
                found[frame, number] = judge(tracks[column], states[thing])
    return found


def judge(row: Row, state: np.ndarray) -> dict[str, Any]:
    """Return errors, NEES and NLL of a track against the state of its object."""
    error = row.mean - state
    error[4] = (error[4] + np.pi / 2) % np.pi - np.pi / 2  # of the axis
    one: dict[str, Any] = {"nees": error @ np.linalg.solve(row.P, error) / 5, "nis": row.nis}
    for name, index in GROUPS.items():
        e, P = error[index], row.P[np.ix_(index, index)]
        nll = e @ np.linalg.solve(P, e) + np.linalg.slogdet(2 * np.pi * P)[1]
        one |= {f"{name} nll": nll / 2, f"{name} square": e @ e}
    one["nll"] = sum(one[f"{name} nll"] for name in GROUPS)
    return one


def with_interval(
    statistic: Callable[[np.ndarray], float], groups: np.ndarray, form: str = ".2f"
) -> str:
    """Return a function of rows with its 95 % interval; ``groups`` (n,) are drawn as a whole."""
    interval = bootstrap(statistic, groups)
    every = np.arange(len(groups))
    return f"{statistic(every):{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def cell(values: list[float], groups: np.ndarray, name: str, form: str = ".2f") -> str | None:
    """Return a mean, or the root of a mean square, with an interval over groups; None of none."""
    if not values:
        return None
    column = np.array(values)

    def statistic(rows: np.ndarray) -> float:
        mean = float(np.nanmean(column[rows]))
        return mean**0.5 if name.endswith("square") else mean

    return with_interval(statistic, groups, form)


def count_cell(value: Callable[[Counts], float], found: list[Counts], form: str) -> str:
    """Return MOTA, IDF1 or another number of the summed counts, with an interval over them."""
    return with_interval(
        lambda rows: value(total([found[i] for i in rows])), np.arange(len(found)), form
    )


def mota(count: Counts) -> float:
    wrong = count["num_misses"] + count["num_false_positives"] + count["num_switches"]
    return 1 - wrong / count["num_objects"]


def idf1(count: Counts) -> float:
    return 2 * count["idtp"] / (2 * count["idtp"] + count["idfp"] + count["idfn"])


def amota(by_threshold: dict[float, Counts]) -> float:
    """Return the mean over 10 recalls of MOTA, each relative to what the recall allows."""
    values = []
    for recall in RECALLS:
        least = [t for t, c in by_threshold.items() if _recall(c) >= recall - 1e-9]
        if not least:
            values.append(0.0)
            continue
        count = by_threshold[max(least)]
        wrong = count["num_false_positives"] + count["num_switches"]
        values.append(max(0.0, 1 - wrong / (recall * count["num_objects"])))
    return float(np.mean(values))


def _recall(count: Counts) -> float:
    return 1 - count["num_misses"] / count["num_objects"]
