"""What boxcov.Monitor finds, beside the score and the number of boxes alone.

python studies/monitor.py --root OUT                  the tables; a stopped run resumes
python studies/monitor.py --root OUT --quick          does it run? writes no table

The protocol, fixed before the frames below were computed:

- The shipped CenterPoint with its shipped posterior and error model. Nothing is chosen: the numbers
  of the monitor and the settings are those of the library, and no earlier study has these seeds.
- Usual frames: 200 clear ones. Clear frames for false alarms: 300 others. Changes: 400 frames each
  of rain, fog, a sensor with half of its beams (sparse), crowds, objects of unseen shapes, and a
  sensor with left and right swapped (mirror). All frames are independent scenes.
- Power is the share of frames with a p-value of at most 5 %, with intervals over frames.
- Delay: ten streams for each change, with no frame in common. One has 20 clear frames, then 40 of
  the change; a delay of 1 is the first changed frame. Median over streams, with the interval by
  ranks. Streams of one number are those of all rows, and those of two changes have the same clear
  frames. A false change is one in a stream of the 300 clear frames.
- Baselines use the same p-values and the same evidence, but a single number: the mean score, or the
  number of boxes. Without an error model, the score takes the place of P(there is an object).
  Differences to the monitor, for the changes that earlier frames showed to be hard, are over the
  same frames and streams; delays above 40 count as 41.
- Added after these tables had been read: the draw of the usual frames. The 500 usual and clear
  frames are split 20 times at random into 200 usual and 300 clear ones.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame_results import each_frame, forget
from scipy.stats import binom, t

from boxcov import Detections, ExactGLM, Posterior
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.evaluate.intervals import bootstrap
from boxcov.monitor import SINGLE, Monitor, frame_numbers

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data"
CHANGES = ("rain", "fog", "sparse", "crowd", "unseen", "mirror")
USUAL_SEED, CLEAR_SEED, CHANGED_SEED = 8111, 8112, 8113
STREAMS, LEAD, LENGTH = 10, 20, 40  # streams for each change, and their clear and changed frames
FRAMES = {"usual": 200, "clear": 300} | dict.fromkeys(CHANGES, STREAMS * LENGTH)
QUICK_FRAMES = {"usual": 20, "clear": 3} | dict.fromkeys(CHANGES, 3)
RATE, RUN_LENGTH = 0.05, 1000.0
DRAWS, DRAWN = 20, ("clear", "sparse", "crowd", "unseen")  # of usual frames, and what is judged
OURS = "monitor"
Rows = list[dict[str, float]]  # the numbers of each frame


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="folder of the frames' numbers")
    parser.add_argument("--quick", action="store_true", help="a few frames: does it run?")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts = QUICK_FRAMES if args.quick else FRAMES
    sets = collect(args.root / "quick" if args.quick else args.root, counts)
    alarms, times, draws = {}, {}, []
    for name, some in kinds(sets).items():
        alarms[name] = {
            key: p_values(some["usual"], some[key]) <= RATE for key in ("clear", *CHANGES)
        }
        times[name] = {change: delays(some, change) for change in CHANGES}
        times[name]["clear"] = false_changes(some)
        draws.append([name, *draw_cells(some)])
    tables = {
        "monitor-power": [[name, *map(share_text, alarms[name].values())] for name in alarms],
        "monitor-delay": [
            [name, *(median_text(one[change], LENGTH) for change in CHANGES), one["clear"]]
            for name, one in times.items()
        ],
        "monitor-gain": [gain_row(name, alarms, times) for name in alarms if name != OURS],
        "monitor-draws": draws,
    }
    for name, rows in tables.items():
        print(name, *rows, sep="\n", flush=True)
    if not args.quick:
        write_tables(tables)


def collect(root: Path, counts: dict[str, int]) -> dict[str, Rows]:
    """Return the numbers of all frames, by scenario; those in ``root`` are not computed again."""
    root.mkdir(parents=True, exist_ok=True)
    detector = centerpoint.load("small")
    model = ExactGLM(detector, Posterior.load("small", detector))
    sets = {}
    for name, count in counts.items():
        path = root / f"{name}.json"
        if not path.exists():
            rows = list(each_frame(path, count, row_of(model, name, count)))
            part = path.with_suffix(".part")  # an interrupted run leaves no half file
            part.write_text(json.dumps(rows))
            part.rename(path)
            forget(path)
            print(name, count, "frames", flush=True)
        sets[name] = json.loads(path.read_text())
    return sets


def row_of(model: ExactGLM, name: str, count: int) -> Callable[[int], dict[str, float]]:
    """Return the function that gives the numbers of a frame of a set."""
    seed = {"usual": USUAL_SEED, "clear": CLEAR_SEED}.get(name, CHANGED_SEED)
    scenario = "clear" if name in ("usual", "mirror") else name
    frames = simulated.frames(scenario, seed=seed, count=count)
    sign = -1.0 if name == "mirror" else 1.0

    def compute(number: int) -> dict[str, float]:
        (cloud,), _ = frames[number]
        cloud = cloud.clone()
        cloud[:, 0] *= sign  # x points to the right
        return numbers(model([cloud]))

    return compute


def numbers(found: Detections) -> dict[str, float]:
    """Return the numbers of a frame, also those of the baselines."""
    # a name of SINGLE, so that both directions count
    plain = {"boxes": float(np.log1p(len(found))), "certainty": float(found.scores.mean())}
    # without the error model, the score stands for P(there is an object)
    bare = {k: v for k, v in found.numpy().items() if k in ("boxes", "scores", "covariance")}
    return {
        **{f"plain {k}": v for k, v in plain.items()},
        **{f"bare {k}": v for k, v in frame_numbers({"fields": found.fields, **bare}).items()},
        **{f"ours {k}": v for k, v in frame_numbers(found).items()},
    }


def kinds(sets: dict[str, Rows]) -> dict[str, dict[str, Rows]]:
    """Return the numbers that each row of the tables uses."""
    every = list(sets["usual"][0])
    chosen = {
        "number of boxes": ["plain boxes"],
        "1 - score": ["plain certainty"],
        "monitor, no error model": [name for name in every if name.startswith("bare ")],
        "monitor, no distance": [f"ours {name}" for name in SINGLE],
        OURS: [name for name in every if name.startswith("ours ")],
    }
    return {
        kind: {
            key: [{name.split(" ", 1)[1]: row[name] for name in names} for row in rows]
            for key, rows in sets.items()
        }
        for kind, names in chosen.items()
    }


def monitor_of(usual: Rows) -> Monitor:
    columns = {name: np.array([row[name] for row in usual]) for name in usual[0]}
    return Monitor(columns, RATE, RUN_LENGTH)


def p_values(usual: Rows, frames: Rows) -> np.ndarray:
    monitor = monitor_of(usual)
    return np.array([monitor.judge(row).p_value for row in frames])


def draw_cells(some: dict[str, Rows]) -> list[str]:
    """Return the share of alarms of each scenario: mean and middle 95 % over draws."""
    every, count = some["usual"] + some["clear"], len(some["usual"])
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(DRAWS):
        drawn = [every[i] for i in rng.permutation(len(every))]
        judged = {**some, "clear": drawn[count:]}
        shares.append([(p_values(drawn[:count], judged[key]) <= RATE).mean() for key in DRAWN])
    table = 100 * np.array(shares)  # (draws, scenarios)
    low, high = np.quantile(table, (0.025, 0.975), axis=0)
    return [f"{m:.0f} [{a:.0f}, {b:.0f}]" for m, a, b in zip(table.mean(0), low, high)]


def delays(some: dict[str, Rows], change: str) -> np.ndarray:
    """Return the delay in each stream, infinite where the change is not found."""
    times = []
    for start in range(0, len(some[change]), LENGTH):
        monitor, number = monitor_of(some["usual"]), start // LENGTH
        for row in some["clear"][number * LEAD : (number + 1) * LEAD]:
            monitor.judge(row)
        found = [monitor.judge(row).change for row in some[change][start : start + LENGTH]]
        times.append(1.0 + found.index(True) if any(found) else np.inf)
    return np.array(times)


def false_changes(some: dict[str, Rows]) -> int:
    """Return the number of changes in one stream of all clear frames."""
    monitor = monitor_of(some["usual"])
    return sum(monitor.judge(row).change for row in some["clear"])


def median_text(times: np.ndarray, most: int) -> str:
    """Return the median of delays and its 95 % interval by ranks; infinite ones are above most."""
    n, rows = len(times), sorted(times)
    rank = max(int(binom.ppf(0.025, n, 0.5)), 1)  # of the lower end
    sides = (float(np.median(rows)), rows[rank - 1], rows[n - rank])
    middle, low, high = (f"{x:.0f}" if np.isfinite(x) else f"above {most}" for x in sides)
    return middle if low == high else f"{middle} [{low}, {high}]"


def share_text(alarm: np.ndarray) -> str:
    """Return the share of alarms in percent, with an interval over frames."""
    interval = bootstrap(lambda rows: float(alarm[rows].mean()), np.arange(len(alarm)))
    share, low, high = (f"{100 * x:.0f}" for x in (alarm.mean(), interval.low, interval.high))
    return share if low == high else f"{share} [{low}, {high}]"


def gain_row(name: str, alarms: dict[str, Any], times: dict[str, Any]) -> list[Any]:
    """Return how much more often alarms are right, and how much earlier a change is found."""
    cells: list[Any] = [name]
    for change in ("unseen", "crowd"):
        more = 100.0 * (alarms[OURS][change].astype(float) - alarms[name][change])
        interval = bootstrap(lambda rows, more=more: float(more[rows].mean()), np.arange(len(more)))
        cells.append(f"{more.mean():.0f} [{interval.low:.0f}, {interval.high:.0f}]")
    for change in ("unseen", "crowd", "sparse"):
        theirs, ours = (np.minimum(times[kind][change], LENGTH + 1) for kind in (name, OURS))
        cells.append(mean_text(theirs - ours))
    return cells


def mean_text(steps: np.ndarray) -> str:
    """Return a mean with its 95 % t-interval."""
    half = t.ppf(0.975, len(steps) - 1) * steps.std(ddof=1) / len(steps) ** 0.5
    mean = steps.mean()
    return f"{mean:.1f} [{mean - half:.1f}, {mean + half:.1f}]"


def write_tables(rows: dict[str, list[list[Any]]]) -> None:
    about = {
        "command": "python studies/monitor.py --root OUT",
        "date": date.today().isoformat(),
        "machine": "one CPU thread",
    }
    tables: dict[str, tuple[str, list[str], str]] = {
        "monitor-power": (
            "Frames with an alarm at a false-alarm rate of 5 %, in percent",
            ["ranked by", "clear", *CHANGES],
            "200 usual frames; 300 clear frames, 400 of each other scenario. 95 % intervals over "
            "frames. Clear: false alarms.",
        ),
        "monitor-delay": (
            "Frames until a change is found, median over 10 streams",
            ["ranked by", *CHANGES, "false changes, 300 clear frames"],
            "Run length 1,000: at most one false change per 1,000 frames on average. A stream is "
            "20 clear frames, then 40 of the other scenario; no two streams of a change share a "
            "frame. Intervals over streams by ranks (98 %).",
        ),
        "monitor-gain": (
            "What the monitor adds: alarms in percentage points, and frames earlier",
            [
                *("ranked by", "unseen, alarms", "crowd, alarms"),
                *("unseen, earlier", "crowd, earlier", "sparse, earlier"),
            ],
            "The same frames and streams. 95 % intervals over frames (alarms) and over 10 streams "
            "(earlier). A change not found in 40 frames counts as found in the next one.",
        ),
        "monitor-draws": (
            "Frames with an alarm over 20 draws of the usual frames, in percent",
            ["ranked by", *DRAWN],
            "200 of 500 clear frames are usual ones, the other 300 are judged. In brackets: the "
            "middle 95 % of the draws.",
        ),
    }
    for name, (title, columns, note) in tables.items():
        content = {"title": title, **about, "columns": columns, "digits": [None] * len(columns)}
        content |= {"rows": rows[name], "notes": [note]}
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
