"""Is a Kalman filter better with each box's own noise? Simulated drives, shipped CenterPoint.

python studies/tracking.py --root OUT
python studies/tracking.py --root OUT --quick         does it run? writes no table

It collects the boxes (tracking_boxes.py), finds the settings of every method on the drives
``tune``, and makes the tables of the drives ``test``, once; a stopped run resumes.

The protocol, fixed before the drives ``test`` are read:

- Methods differ in what they say about a box: R constant, per class, from score and size (all three
  with P(object) from score and size), the error model without and with the covariance as input
  (with its own P(object)). Everything else is the same.
- Error models are fitted on 200 single frames, equal for all. Constant R, R per class, the share
  and decay of errors that last, and the motion of the classes come from the six drives ``tune``. R
  of an error model is the variance of its distribution plus a residual by class from there; R of
  the velocity is per class in all methods but the first (tracking_noise.py says why).
- Every method is tuned for itself on ``tune``: Kalman or Student-t update (3 degrees of freedom),
  factor of R (1, 2); the lowest NLL of the tracked state wins. The threshold on P(object) of
  reported tracks is the one with the highest MOTA there.
- Reported on 15 drives of 20 s at 2 Hz, 5 seeds with 3 each. A track belongs to the object of its
  class within 2 m (CLEAR MOT, motmetrics). NEES, NIS, RMSE and NLL are over the objects that all
  methods follow; heading counts as an axis. Intervals resample drives.
- Goals: ANEES from 0.8 to 1.25; NLL below that of every baseline, clear of zero; no more identity
  switches than the best baseline.
- The drives ``test`` were read before, with error models of 55 signals. They are read once more
  with those of today (69 signals), with nothing else changed; the page reports both.
"""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tracking_boxes import FIT_SEED, QUICK_FRAMES, TEST, TUNE, Drive, collect, load
from tracking_metrics import (
    THRESHOLDS,
    Counts,
    Row,
    accumulate,
    amota,
    counts,
    idf1,
    mota,
    pairs,
    run,
    total,
    with_interval,
)
from tracking_noise import Noise, methods, tracker_settings

from boxcov.export.tracker import TrackerSettings

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data"
FACTORS, DOF = (1.0, 2.0), 3.0
OURS = "boxcov"
SHORT = {
    "constant R": "constant",
    "R per class": "per class",
    "R from score + size": "score + size",
    "boxcov, no covariance": "no covariance",
    OURS: OURS,
}
BASELINES = ("constant R", "R per class", "R from score + size", "boxcov, no covariance")
COMMAND = "python studies/tracking.py --root OUT"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", nargs="?", choices=("tune", "test"), help="only this one")
    parser.add_argument("--root", type=Path, required=True, help="folder of boxes and tracks")
    parser.add_argument("--methods", nargs="*", help="only these, to share the work of tracking")
    parser.add_argument("--quick", action="store_true", help="a few frames: does it run?")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    root = args.root / "quick" if args.quick else args.root
    few = 2 if args.quick else None  # drives
    names = [f"fit-{FIT_SEED}-0", *TUNE[:few], *TEST[:few]]
    collect(root, names, most=QUICK_FRAMES if args.quick else None)
    tuned = [load(root, name) for name in TUNE[:few]]
    noises = methods(root, tuned)
    noises = {name: noises[name] for name in args.methods or noises}
    if args.step != "test":
        tune(root, tuned, noises)
    if args.step == "tune":
        return
    tables = test(root, [load(root, name) for name in TEST[:few]], noises)
    if tables and not args.quick:
        write_tables(*tables)


def tracks(
    root: Path, drive: Drive, noise: Noise, key: str, settings: TrackerSettings
) -> list[Row]:
    """Return the tracks of a drive; kept in ``root``, so that a stopped run resumes."""
    path = root / "tracks" / f"{drive.name}-{key.replace(' ', '')}.pickle"
    if path.exists():
        kept, rows = pickle.loads(path.read_bytes())
        if kept == settings:
            return rows
    rows = run(drive, noise, settings)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")  # an interrupted run leaves no half file
    part.write_bytes(pickle.dumps((settings, rows)))
    part.rename(path)
    return rows


def tune(root: Path, drives: list[Drive], noises: dict[str, Noise]) -> None:
    """Write the settings and the threshold of every method."""
    chosen: dict[str, tuple[TrackerSettings, float]] = {}
    for method, noise in noises.items():
        base = tracker_settings(drives, noise)
        kept: dict[float, tuple[TrackerSettings, list[list[Row]]]] = {}
        for dof in (inf, DOF):
            for factor in FACTORS:
                settings = replace(base, noise=factor, dof=dof)
                key = f"{method} {factor:g} {dof:g}"
                rows = [tracks(root, drive, noise, key, settings) for drive in drives]
                every = [one for d, r in zip(drives, rows) for one in pairs(d, r, 0.5).values()]
                nll, nees = (
                    float(np.mean([one[name] for one in every])) for name in ("nll", "nees")
                )
                print(f"{key}: NLL {nll:.3f}, ANEES {nees:.2f}", flush=True)
                kept[nll] = settings, rows
        settings, rows = kept[min(kept)]
        chosen[method] = settings, best_threshold(drives, rows)
        print(method, chosen[method], flush=True)
        path = root / f"settings-{method.replace(' ', '')}.pickle"
        path.write_bytes(pickle.dumps(chosen[method]))


def best_threshold(drives: list[Any], rows: list[list[Row]]) -> float:
    """Return the threshold with the highest MOTA over all drives."""
    scores = {}
    for threshold in THRESHOLDS[2:]:
        each = [counts(accumulate(d, r, threshold)) for d, r in zip(drives, rows)]
        scores[threshold] = mota(total(each))
    return max(scores, key=lambda threshold: scores[threshold])


def test(
    root: Path, drives: list[Drive], noises: dict[str, Noise]
) -> tuple[dict[str, list[list[Any]]], int] | None:
    """Return the rows of all tables, and the number of states; None if methods are missing."""
    state: dict[str, list[dict[Any, Any]]] = {}
    follow: dict[str, list[dict[str, Any]]] = {}
    is_whole = set(BASELINES) < set(noises)  # else another run writes the tables
    for method, noise in noises.items():
        path = root / f"settings-{method.replace(' ', '')}.pickle"
        settings, threshold = pickle.loads(path.read_bytes())
        for drive in drives:
            rows = tracks(root, drive, noise, method, settings)
            if not is_whole:
                continue
            state.setdefault(method, []).append(pairs(drive, rows, threshold))
            each = {t: counts(accumulate(drive, rows, t)) for t in {*THRESHOLDS, threshold}}
            about = {"at": each.pop(threshold), "every": each}
            if threshold in THRESHOLDS:
                each[threshold] = about["at"]
            follow.setdefault(method, []).append(about)
        print(method, "done", flush=True)
    if not is_whole:
        return None
    common = [set.intersection(*(set(state[m][i]) for m in noises)) for i in range(len(drives))]
    groups = ("position", "velocity", "heading")
    tables = {
        "tracking-consistency": [state_row(m, state[m], common, ("nees", "nis")) for m in noises],
        "tracking-rmse": [
            state_row(m, state[m], common, [f"{g} square" for g in groups]) for m in noises
        ],
        "tracking-nll": [
            state_row(m, state[m], common, [f"{g} nll" for g in groups]) for m in noises
        ],
        "tracking-gain": [gain_row(m, state, common) for m in BASELINES],
        "tracking-follow": [track_row(m, follow[m]) for m in noises],
        "tracking-switches": [switch_row(m, follow) for m in noises],
    }
    for name, cells in tables.items():
        print(name, *cells, sep="\n", flush=True)
    return tables, sum(map(len, common))


def state_row(
    method: str, state: list[dict[Any, Any]], common: list[set[Any]], names: Sequence[str]
) -> list[Any]:
    """Return means, or roots of mean squares, with intervals over drives."""

    def mean(name: str) -> str:
        values = [np.array([s[key][name] for key in sorted(c)]) for s, c in zip(state, common)]
        sums = np.array([[np.nansum(v), np.isfinite(v).sum()] for v in values])
        root = np.sqrt if name.endswith("square") else np.asarray

        def statistic(rows: np.ndarray) -> float:
            whole, number = sums[rows].sum(0)
            return float(root(whole / number))

        return with_interval(statistic, np.arange(len(sums)))

    return [SHORT[method], *map(mean, names)]


def gain_row(
    method: str, state: dict[str, list[dict[Any, Any]]], common: list[set[Any]]
) -> list[Any]:
    """Return how much lower the NLL of boxcov is than that of a method, over the same objects."""
    cells: list[Any] = [SHORT[method]]
    for name in ("nll", "position nll", "velocity nll", "heading nll"):
        steps = [
            [theirs[key][name] - ours[key][name] for key in sorted(c)]
            for theirs, ours, c in zip(state[method], state[OURS], common)
        ]
        sums = np.array([[sum(s), len(s)] for s in steps])

        def statistic(rows: np.ndarray, sums: np.ndarray = sums) -> float:
            return float(sums[rows, 0].sum() / sums[rows, 1].sum())

        cells.append(with_interval(statistic, np.arange(len(sums)), "+.2f"))
    return cells


def switch_row(method: str, follow: dict[str, list[dict[str, Any]]]) -> list[Any]:
    """Return all identity switches, and how many per drive boxcov saves against a method."""
    switches = [[one["at"]["num_switches"] for one in follow[m]] for m in (method, OURS)]
    steps = np.subtract(*switches)
    saved = with_interval(lambda rows: float(steps[rows].mean()), np.arange(len(steps)), "+.1f")
    return [SHORT[method], int(sum(switches[0])), None if method == OURS else saved]


def track_row(method: str, follow: list[dict[str, Any]]) -> list[Any]:
    """Return MOTA, IDF1, AMOTA and identity switches with intervals over drives."""

    def summed(rows: np.ndarray, threshold: float | None = None) -> Counts:
        return total(
            [follow[i]["at"] if threshold is None else follow[i]["every"][threshold] for i in rows]
        )

    def curve(rows: np.ndarray) -> float:
        return amota({threshold: summed(rows, threshold) for threshold in THRESHOLDS})

    statistics = (
        (lambda rows: mota(summed(rows)), ".3f"),
        (lambda rows: idf1(summed(rows)), ".3f"),
        (curve, ".3f"),
        (lambda rows: summed(rows)["num_switches"] / len(rows), ".1f"),
    )
    every = np.arange(len(follow))
    return [
        SHORT[method],
        *(with_interval(statistic, every, form) for statistic, form in statistics),
    ]


def write_tables(rows: dict[str, list[list[Any]]], number: int) -> None:
    """Write one result file per table."""
    about = {"command": COMMAND, "date": date.today().isoformat(), "machine": "one CPU thread"}
    drives = "15 simulated drives of 20 s at 2 Hz, 5 seeds. 95 % intervals over drives."
    same = f"{number} states of objects that all methods follow. {drives}"
    fields = ("position", "velocity", "heading")
    tables = {
        "tracking-consistency": ("Consistency of the filter: 1 is right", ("ANEES", "NIS"), same),
        "tracking-rmse": (
            "RMSE of the tracked state",
            ("position, m", "velocity, m/s", "heading, rad"),
            same,
        ),
        "tracking-nll": ("NLL of the tracked state: lower is better", fields, same),
        "tracking-gain": (
            "NLL of a baseline minus that of boxcov: above 0, boxcov is better",
            ("state", *fields),
            same,
        ),
        "tracking-follow": (
            "Which objects are followed",
            ("MOTA", "IDF1", "AMOTA", "switches per drive"),
            f"AMOTA: 10 recalls. {drives}",
        ),
        "tracking-switches": (
            "Identity switches of all drives",
            ("switches", "boxcov saves per drive"),
            drives,
        ),
    }
    for name, (title, columns, note) in tables.items():
        content = {"title": title, **about, "columns": ["R", *columns]}
        content |= {"digits": [None] * (1 + len(columns)), "rows": rows[name], "notes": [note]}
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
