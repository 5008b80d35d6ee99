"""What boxcov.Monitor finds, beside the score and the number of boxes alone.

python studies/monitor.py --root OUT --set develop --device cuda      for choices
python studies/monitor.py --root OUT --set test --device cuda         for the tables, once; resumes
python studies/monitor.py --root OUT --set test --quick               does it run? writes no table

Boxes that OUT does not hold yet are collected first (collect.py); without ``--device`` on the CPU.

Usual frames: 200 clear frames that the error model was not fitted on (``fit``, from frame 500 on).
Power is the share of frames with a p-value of at most 5 %. For the delay, 20 clear frames are
followed by frames of the other scenario in random order; a delay of 1 is the first changed frame.
"""

from __future__ import annotations

import argparse
import json
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from collect import MIRROR, SHIFTS, collect_boxes
from scipy.stats import binom
from widening import FIT_FRAMES, RESULTS, load, study_model

from boxcov.detections import Detections
from boxcov.evaluate.intervals import bootstrap
from boxcov.monitor import SPOKEN, Monitor, frame_numbers

CHANGES = (*SHIFTS, MIRROR)
COLLECTED = {"detector": "small", "bare": True}  # see collect.py
USUAL, LEAD, RUN_LENGTH, ORDERS = 200, 20, 1000.0, 30
QUICK_FRAMES, QUICK_USUAL, QUICK_CHANGED = 6, 20, 3  # of fits, usual and clear, changed
Rows = list[dict[str, float]]  # the numbers of each frame


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="folder of studies/collect.py")
    parser.add_argument("--set", choices=("develop", "test"), required=True)
    parser.add_argument("--device", default="cpu", help="of the detector")
    parser.add_argument("--quick", action="store_true", help="a few frames: does it run?")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sets = collect_numbers(args)
    power, delay = [], []
    for name, some in kinds(sets).items():
        values = {shift: p_values(some["usual"], some[shift]) for shift in ("clear", *CHANGES)}
        power.append([name, *(_share(p) for p in values.values())])
        delay.append([name, *delays(some)])
        print(power[-1], delay[-1], flush=True)
    if args.set == "test" and not args.quick:
        write_tables(power, delay, args.device)


def collect_numbers(args: argparse.Namespace) -> dict[str, Rows]:
    """Return the numbers of all frames, by scenario; boxes that are missing are collected."""
    root = args.root / "quick" if args.quick else args.root
    first, usual = (QUICK_FRAMES, QUICK_USUAL) if args.quick else (FIT_FRAMES, USUAL)
    names = {shift: f"{args.set}-{shift}" for shift in CHANGES}
    root.mkdir(parents=True, exist_ok=True)
    parts = [(["fit", args.set, *names.values()], 10**9)]  # at once: the posterior is fitted once
    if args.quick:
        parts = [(["fit", args.set], first + usual), ([*names.values()], QUICK_CHANGED)]
    for wanted, most in parts:
        where = {"out": root, "sets": wanted, "device": args.device, "most": most}
        collect_boxes(argparse.Namespace(**where, **COLLECTED))
    torch.set_num_threads(1)
    model = study_model(root, first)
    found = load(root, "fit", first + usual)[0]
    sets = {"usual": numbers(model.apply(found[found.frame >= first]))}
    for shift, name in {"clear": args.set, **names}.items():
        sets[shift] = numbers(model.apply(load(root, name)[0]))
    return sets


def numbers(found: Detections) -> Rows:
    """Return the numbers of each frame, also those of the two baselines."""
    rows = []
    for number in found.frame.unique():
        frame = found[found.frame == number]
        # a name of SPOKEN, so that both directions count
        plain = {"boxes": float(np.log1p(len(frame))), "certainty": float(frame.scores.mean())}
        # without the error model, the score stands for P(there is an object)
        bare = {k: v for k, v in frame.numpy().items() if k in ("boxes", "scores", "covariance")}
        bare = frame_numbers({"fields": frame.fields, **bare})
        rows.append({f"plain {k}": v for k, v in plain.items()})
        rows[-1] |= {f"bare {k}": v for k, v in bare.items()}
        rows[-1] |= {f"ours {k}": v for k, v in frame_numbers(frame).items()}
    return rows


def kinds(sets: dict[str, Rows]) -> dict[str, dict[str, Rows]]:
    """Return the numbers that each row of the table uses."""
    chosen = {
        "number of boxes": ("plain", ("boxes",)),
        "1 - score": ("plain", ("certainty",)),
        "monitor, no error model": ("bare", None),
        "monitor, no distance": ("ours", SPOKEN),
        "monitor": ("ours", None),
    }
    return {
        name: {
            key: [
                {
                    column.removeprefix(f"{start} "): value
                    for column, value in row.items()
                    if column.startswith(f"{start} ")
                    and (only is None or column.removeprefix(f"{start} ") in only)
                }
                for row in rows
            ]
            for key, rows in sets.items()
        }
        for name, (start, only) in chosen.items()
    }


def monitor_of(usual: Rows) -> Monitor:
    columns = {name: np.array([row[name] for row in usual]) for name in usual[0]}
    return Monitor(columns, 0.05, RUN_LENGTH)


def p_values(usual: Rows, frames: Rows) -> np.ndarray:
    monitor = monitor_of(usual)
    return np.array([monitor.judge(row).p_value for row in frames])


def delays(some: dict[str, Rows]) -> list[Any]:
    """Return the delay after each change as text, and the false changes per 1,000 clear frames."""
    rng = np.random.default_rng(0)
    found: list[Any] = []
    false = seen = 0
    for shift in CHANGES:
        times = []
        for _ in range(ORDERS):
            monitor = monitor_of(some["usual"])
            lead = [some["clear"][i] for i in rng.permutation(len(some["clear"]))[:LEAD]]
            false += sum(monitor.judge(row).change for row in lead)
            seen += LEAD
            order = rng.permutation(len(some[shift]))
            changes = [monitor.judge(some[shift][i]).change for i in order]
            times.append(1 + changes.index(True) if any(changes) else np.inf)
        found.append(median_text(times, len(some[shift])))
    return [*found, 1000 * false / seen]


def median_text(times: list[float], most: int) -> str:
    """Return the median of delays and its 95 % interval by ranks; infinite ones are above most."""
    n, rows = len(times), sorted(times)
    rank = int(binom.ppf(0.025, n, 0.5))  # of the lower end, from 1
    sides = (float(np.median(rows)), rows[rank - 1], rows[n - rank])
    middle, low, high = (f"{x:.0f}" if np.isfinite(x) else f"above {most}" for x in sides)
    return middle if low == high else f"{middle} [{low}, {high}]"


def _share(p: np.ndarray) -> str:
    alarm = (p <= 0.05).astype(float)
    interval = bootstrap(lambda rows: float(alarm[rows].mean()), np.arange(len(p)))
    share, low, high = (f"{100 * x:.0f}" for x in (alarm.mean(), interval.low, interval.high))
    return share if low == high else f"{share} [{low}, {high}]"


def write_tables(power: list[list[Any]], delay: list[list[Any]], device: str) -> None:
    where = "the CPU" if device == "cpu" else f"one {torch.cuda.get_device_name()}"
    about = {
        "command": "python studies/monitor.py --root OUT --set test --device cuda",
        "date": date.today().isoformat(),
        "machine": f"collected on {where}, judged on one CPU thread",
    }
    tables: dict[str, dict[str, Any]] = {
        "monitor-power": {
            "title": "Frames with an alarm at a false-alarm rate of 5 %, in percent",
            "columns": ["ranked by", "clear", *CHANGES],
            "digits": [None] * (2 + len(CHANGES)),
            "rows": power,
            "notes": [
                "200 usual frames; 300 clear frames, 60 of each other scenario. 95 % intervals "
                "over frames. Clear: false alarms."
            ],
        },
        "monitor-delay": {
            "title": "Frames until a change is found, median over 30 orders",
            "columns": ["ranked by", *CHANGES, "false changes per 1,000 clear frames"],
            "digits": [*([None] * (1 + len(CHANGES))), 1],
            "rows": delay,
            "notes": [
                "Run length 1,000: at most one false change per 1,000 frames on average. 20 clear "
                "frames, then the other scenario: rain sets in, beams die (sparse), or left and "
                "right of the sensor are swapped (mirror). 95 % intervals over orders."
            ],
        },
    }
    for name, table in tables.items():
        content = {"title": table["title"], **about, **table}
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
