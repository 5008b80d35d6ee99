"""What a Tracker gives without tuning, at 2 and at 10 Hz.

python studies/tracking_default.py --root OUT         the table; resumes
python studies/tracking_default.py --root OUT --quick does it run? writes no table

The protocol, fixed before a track of these drives was computed: eight simulated drives of 10 s that
no other study uses, at 10 Hz (sets ``fast``), and every fifth of their frames at 2 Hz. The shipped
detector and error model, default settings, tracks with P(object) of at least 0.5. Rows differ from
the first one of their rate in what they name:

- all may move: a density of the acceleration of 1 for barriers and cones too, not of 0.001;
- by class: R of an error model with a residual by class (with_class_noise), from three drives
  ``tune``;
- constant: R is the mean square error of all boxes of those drives;
- lasting: persistence and fading as the boxes' errors at 10 Hz have them, in one drive ``tune``.

Errors of states are over the objects that a row follows. Intervals resample drives.
"""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tracking_boxes import (
    DEFAULT,
    FAST_RATE,
    FAST_TUNE,
    QUICK_FRAMES,
    RATE,
    TUNE,
    Drive,
    collect,
    load,
)
from tracking_metrics import (
    Counts,
    accumulate,
    cell,
    count_cell,
    counts,
    mota,
    pairs,
    run,
    with_interval,
)
from tracking_noise import (
    Noise,
    collect_pairs,
    tracker_settings,
    with_class_noise,
    with_variances,
)

from boxcov import Detections, Posterior
from boxcov.detectors import centerpoint
from boxcov.export.tracker import TrackerSettings

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data"
THRESHOLD, TUNE_DRIVES = 0.5, 3


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    rate: int
    name: str
    noise: Noise
    settings: TrackerSettings = field(default_factory=TrackerSettings)


def cases(others: list[Drive], fast: list[Drive]) -> list[Case]:
    """Return the rows of the table; R and what lasts come from these drives."""
    shipped = Posterior.load("small", centerpoint.load("small")).error_model
    assert shipped is not None
    spread = collect_pairs(others, shipped.apply).errors.square().mean(0)  # (5,)
    by_class = with_class_noise(others, shipped.apply)
    measured = tracker_settings(fast, shipped.apply, FAST_RATE)
    lasting = TrackerSettings(persistence=measured.persistence, fading=measured.fading)
    print(lasting, flush=True)

    def constant(found: Detections) -> Detections:
        return with_variances(shipped.apply(found), spread.expand(len(found), -1))

    return [
        Case(RATE, "default", shipped.apply),
        Case(RATE, "all may move", shipped.apply, TrackerSettings(acceleration=1.0)),
        Case(RATE, "by class", by_class),
        Case(RATE, "constant", constant),
        Case(FAST_RATE, "default", shipped.apply),
        Case(FAST_RATE, "lasting", shipped.apply, lasting),
    ]


def judge(root: Path, case: Case, drives: list[Drive]) -> tuple[list[Any], list[Counts]]:
    """Return errors of the states, and which objects are followed in each drive."""
    states, followed = [], []
    lasts = f"{case.settings.persistence:.3f}-{case.settings.fading:.3f}"
    for number, drive in enumerate(drives):
        name = f"{drive.name}-{case.rate}-{case.name.replace(' ', '')}-{lasts}.pickle"
        path = root / "tracks" / name
        if not path.exists():  # else an earlier run stopped later
            path.parent.mkdir(exist_ok=True)
            part = path.with_suffix(".part")  # an interrupted run leaves no half file
            part.write_bytes(pickle.dumps(run(drive, case.noise, case.settings)))
            part.rename(path)
        rows = pickle.loads(path.read_bytes())
        states += [(number, one) for one in pairs(drive, rows, THRESHOLD).values()]
        followed.append(counts(accumulate(drive, rows, THRESHOLD)))
    groups = np.array([number for number, _ in states])
    names = ("nees", "position square", "nll")
    cells = [cell([one[name] for _, one in states], groups, name) for name in names]
    print(case.rate, case.name, cells, flush=True)
    return cells, followed


def follow_cells(followed: list[Counts], default: list[Counts]) -> list[Any]:
    """Return MOTA, switches per drive, and how many of them the default settings save."""
    saved = np.subtract(*([one["num_switches"] for one in some] for some in (followed, default)))
    return [
        count_cell(mota, followed, ".3f"),
        with_interval(
            lambda rows: float(np.mean([followed[i]["num_switches"] for i in rows])),
            np.arange(len(followed)),
            ".1f",
        ),
        None
        if followed is default
        else with_interval(lambda rows: float(saved[rows].mean()), np.arange(len(saved)), "+.1f"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="folder of boxes and tracks")
    parser.add_argument("--quick", action="store_true", help="a few frames: does it run?")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    root = args.root / "quick" if args.quick else args.root
    names, others = (DEFAULT[:1], TUNE[:1]) if args.quick else (DEFAULT, TUNE[:TUNE_DRIVES])
    collect(root, [*others, FAST_TUNE, *names], QUICK_FRAMES if args.quick else None)
    fast = [load(root, name) for name in names]
    drives = {FAST_RATE: fast, RATE: [every_fifth(drive) for drive in fast]}
    every = cases([load(root, name) for name in others], [load(root, FAST_TUNE)])
    results = [judge(root, case, drives[case.rate]) for case in every]
    default = {
        case.rate: followed for case, (_, followed) in zip(every, results) if case.name == "default"
    }
    about = [(f"{case.rate} Hz", case.name) for case in every]
    states = [[*name, *cells] for name, (cells, _) in zip(about, results)]
    follow = [
        [*name, *follow_cells(followed, default[case.rate])]
        for name, case, (_, followed) in zip(about, every, results)
    ]
    print(*follow, sep="\n")
    if not args.quick:
        write(states, follow, every[-1].settings)


def every_fifth(drive: Drive) -> Drive:
    """Return a drive at 10 Hz as one at 2 Hz."""
    names = ("found", "targets", "poses", "times")
    step = FAST_RATE // RATE
    return replace(drive, **{name: getattr(drive, name)[::step] for name in names})


def write(states: list[list[Any]], follow: list[list[Any]], lasting: TrackerSettings) -> None:
    """Write two tables: the tracked states, and which objects are followed."""
    drives = f"{len(DEFAULT)} simulated drives of 10 s; 95 % intervals over drives."
    tables = {
        "tracking-default": (
            "Default settings: ANEES, RMSE of the position, NLL of the state",
            ("ANEES", "position, m", "NLL"),
            states,
            f"{drives} Lasting: {lasting.persistence:.2f} of R, for {lasting.fading:.1f} s.",
        ),
        "tracking-default-follow": (
            "Default settings: which objects are followed",
            ("MOTA", "switches per drive", "default saves per drive"),
            follow,
            f"The same {drives}",
        ),
    }
    for name, (title, columns, rows, note) in tables.items():
        content = {
            "title": title,
            "command": "python studies/tracking_default.py --root OUT",
            "date": date.today().isoformat(),
            "machine": "one CPU thread",
            "columns": ["frames", "R and motion", *columns],
            "digits": [None] * (2 + len(columns)),
            "rows": rows,
            "notes": [note],
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
