"""What a Tracker gives without tuning, at 2 and at 10 Hz.

python studies/tracking_default.py --root OUT         the table; resumes
python studies/tracking_default.py --root OUT --quick does it run? writes no table

The protocol, fixed before the tracks were computed (the default motion of barriers and cones was
chosen after the first drive had been looked at): the first 10 s of the first three drives
``tune``, which are not among the drives of the other tables; at 10 Hz, the same drives with all
frames (sets ``fast``). The shipped detector and error model, default settings, tracks with
P(object) of at least 0.5. Rows differ from the first one in what they name:

- all may move: a density of the acceleration of 1 for barriers and cones too, not of 0.001;
- by class: R of an error model with a residual by class (with_class_noise), from the last three
  drives ``tune``;
- constant: R is the mean square error of all boxes of those drives;
- lasting: persistence and fading as the boxes' errors at 10 Hz have them.

Every row is over the objects that it follows. Intervals resample objects.
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
from tracking_boxes import FAST, FAST_RATE, QUICK_FRAMES, RATE, TUNE, Drive, collect, load
from tracking_metrics import accumulate, cell, counts, mota, pairs, run
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
THRESHOLD, SECONDS, DRIVES = 0.5, 10, 3


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


def judge(root: Path, case: Case, drives: list[Drive]) -> list[Any]:
    """Return a row of the table."""
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
        found = pairs(drive, rows, THRESHOLD)
        states += [(number * 100_000 + key[1], one) for key, one in found.items()]
        followed.append(counts(accumulate(drive, rows, THRESHOLD)))
    identity = np.array([number for number, _ in states])
    names = ("nees", "position square", "nll")
    cells = [cell([one[name] for _, one in states], identity, name) for name in names]
    total = {name: sum(count[name] for count in followed) for name in followed[0]}
    row = [f"{case.rate} Hz", case.name, *cells, mota(total), int(total["num_switches"])]
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="folder of boxes and tracks")
    parser.add_argument("--quick", action="store_true", help="a few frames: does it run?")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    root, drives = (args.root / "quick", 1) if args.quick else (args.root, DRIVES)
    others = TUNE[-drives:]
    most = QUICK_FRAMES if args.quick else None
    collect(root, [*TUNE[:drives], *others, *FAST[:drives]], most)
    fast = [load(root, name) for name in FAST[:drives]]
    slow = [start(load(root, name)) for name in TUNE[:drives]]
    every = cases([load(root, name) for name in others], fast)
    rows = [judge(root, case, slow if case.rate == RATE else fast) for case in every]
    if not args.quick:
        write(rows, every[-1].settings)


def start(drive: Drive) -> Drive:
    """Return the first seconds of a drive."""
    names = ("found", "targets", "poses", "times")
    return replace(drive, **{name: getattr(drive, name)[: SECONDS * RATE] for name in names})


def write(rows: list[list[Any]], lasting: TrackerSettings) -> None:
    content = {
        "title": "Default settings",
        "command": "python studies/tracking_default.py --root OUT",
        "date": date.today().isoformat(),
        "machine": "one CPU thread",
        "columns": [
            *("frames", "R and motion", "ANEES", "position, m", "NLL", "MOTA", "switches"),
        ],
        "digits": [None] * 5 + [3, None],
        "rows": rows,
        "notes": [
            f"The first {SECONDS} s of {DRIVES} drives for tuning. Position: RMSE. 95 % intervals "
            f"over objects. Lasting: {lasting.persistence:.2f} of R, for {lasting.fading:.1f} s."
        ],
    }
    (RESULTS / "tracking-default.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
