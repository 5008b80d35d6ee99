"""The tables of studies/active_learning.py, also of a run that is not finished.

python studies/active_learning_tables.py --out OUT
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from active_learning import METHODS, QUICK, Job, Settings, read_results
from scipy.stats import t

from boxcov._files.output_file import write_text

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data"
COMMAND = "python studies/active_learning.py --out OUT --cache CACHE --device cuda --workers 16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="print the tables of a quick run")
    args = parser.parse_args()
    write(args.out / "quick" if args.quick else args.out, args.quick)


def write(out: Path, quick: bool) -> None:
    """Print the tables, and write those that have rows; of a quick run none is written."""
    settings = QUICK if quick else Settings()
    for name, table in tables_of(settings, dict(read_results(out))).items():
        print(table["title"], *table["rows"], sep="\n")
        if table["rows"] and not quick:
            write_text(RESULTS / f"{name}.json", json.dumps(table, indent=1) + "\n")


def interval(values: Sequence[float]) -> str:
    """Return the mean and its 95 % t-interval over seeds."""
    x = np.array(values)
    half = t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x)) if len(x) > 1 else np.nan
    return f"{x.mean():+.3f} [{x.mean() - half:+.3f}, {x.mean() + half:+.3f}]"


def random_frames_for(AP: float, curve: Sequence[tuple[int, float]]) -> float:
    """Return how many random frames reach an AP, by interpolation; infinite beyond the curve.

    >>> random_frames_for(0.25, [(0, 0.1), (50, 0.2), (100, 0.3)])
    75.0
    """
    counts, values = zip(*sorted(curve))
    rising = np.maximum.accumulate(values)
    if rising[-1] < AP:
        return float("inf")
    end = int(np.argmax(rising >= AP))
    if end == 0:
        return float(counts[0])
    low, high = rising[end - 1], rising[end]
    return float(counts[end - 1] + (AP - low) / (high - low) * (counts[end] - counts[end - 1]))


def tables_of(s: Settings, results: dict[Job, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the content of the table; methods with a missing result are left out."""
    columns = ["chosen by", *map(str, s.budgets), "minus random", "as random"]
    columns += ["clear", "others", "not clear", "objects"]
    note = (
        f"{len(s.seeds)} seeds; each has its own first detector and pool of {sum(s.pool)} frames. "
        f"AP on {sum(s.test)} frames by the number of chosen ones. Minus random: mean over the "
        "budgets, 95 % t-interval over seeds. As random: how many random frames give the same AP. "
        f"The last four columns: AP on clear and on other frames, share and objects of the "
        f"{s.budgets[-1]} chosen."
    )
    table = {
        "title": "AP by the frames that were labelled",
        "command": COMMAND,
        "date": date.today().isoformat(),
        "machine": "one NVIDIA H200",
        "columns": columns,
        "digits": [None] * len(columns),
        "rows": [row for row in (cells(results, s, method) for method in METHODS) if row],
        "notes": [note, *_ends(results, s)],
    }
    return {"labelling-active": table}


def _ends(results: dict[Job, Any], s: Settings) -> list[str]:
    """Return a note with the AP of no further frame and of the most random ones."""
    APs = [[results.get(Job(x, "random", b)) for x in s.seeds] for b in (0, s.longest)]
    if not all(map(all, APs)):
        return []
    none, most = (np.mean([one["AP"] for one in row if one]) for row in APs)
    return [f"No further frame: AP {none:.3f}; {s.longest} random frames: {most:.3f}."]


def cells(results: dict[Job, Any], s: Settings, method: str) -> list[Any]:
    """Return the cells of a method over all seeds; empty if a result is missing."""
    runs = [[Job(x, method, b) for b in s.budgets] for x in s.seeds]
    needed = {job for row in runs for job in row}
    needed |= {Job(x, "random", b) for x in s.seeds for b in s.budgets}
    if not needed <= results.keys():
        return []
    AP = np.array([[results[job]["AP"] for job in row] for row in runs])
    chance = {j: result["AP"] for j, result in results.items() if j.method == "random"}
    curve = [
        (b, float(np.mean([chance[Job(x, "random", b)] for x in s.seeds])))
        for b in (0, *s.budgets, s.longest)
        if all(Job(x, "random", b) in chance for x in s.seeds)
    ]
    gain = AP - [[chance[Job(x, "random", b)] for b in s.budgets] for x in s.seeds]
    as_many = [random_frames_for(value, curve) for value in AP.mean(0)]
    last = [results[row[-1]] for row in runs]
    is_random = method == "random"
    return [
        method,
        *(f"{value:.3f}" for value in AP.mean(0)),
        None if is_random else interval(gain.mean(1).tolist()),
        None
        if is_random
        else ", ".join(_limited(n, min(curve)[0], max(curve)[0]) for n in as_many),
        *(f"{np.mean([one[key] for one in last]):.3f}" for key in ("AP clear", "AP others")),
        f"{np.mean([1 - one['picked']['clear'] / s.budgets[-1] for one in last]):.0%}",
        f"{np.mean([one['objects'] for one in last]):.0f}",
    ]


def _limited(count: float, least: int, most: int) -> str:
    """Return a number of random frames, or the end of the curve that it is beyond."""
    if not np.isfinite(count):
        return f"> {most}"
    return f"<= {least}" if count <= least else f"{count:.0f}"


if __name__ == "__main__":
    main()
