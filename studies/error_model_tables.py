"""Tables of the documentation from the results of studies/error_model.py.

python studies/error_model_tables.py RESULTS [TABLE ...]

It writes docs/results/data/error-model-TABLE.json, by default those of the protocol: rows, gains,
learning, coverage and groups. The others are of earlier looks: shift, ceiling and pillar.

RESULTS holds the rows of the small network; RESULTS/pillar those of the full-size pillar network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from boxcov.data import simulated
from boxcov.error_model.regions import RANGES
from boxcov.evaluate.intervals import bootstrap
from boxcov.evaluate.quality import auroc, quality
from error_model import (
    ALONE,
    ENSEMBLE,
    FREE,
    FREE_ENSEMBLE,
    OURS,
    RAW,
    RAW_COVARIANCES,
    ROWS,
    SIZE,
    slug,
)

GPU = "collected on one NVIDIA H200, fitted on one CPU thread"
FRAMES = 500  # of the fit, where a table does not say otherwise
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data"


def write_tables(folder: Path, names: Sequence[str] = ()) -> None:
    """Write the tables from the results of all rows in ``folder`` and its folder ``pillar``."""
    tables: dict[str, Callable[[], dict[str, Any]]] = {
        "rows": lambda: rows_table(folder, "test", "Small network"),
        "gains": lambda: gains_table(folder),
        "learning": lambda: learning_table(folder),
        "coverage": lambda: coverage_table(folder),
        "groups": lambda: groups_table(folder),
        "shift": lambda: shift_table(folder),
        "ceiling": lambda: ceiling_table(folder),
        "pillar": lambda: {
            **rows_table(folder / "pillar", "ceiling", "Full-size pillar network"),
            "command": "python studies/collect.py boxes --out OUT --detector "
            "weights/pillar.safetensors --sets fit ceiling --device cuda; "
            "python studies/error_model.py --root OUT --out RESULTS/pillar --test ceiling "
            "--rows ROWS; python studies/error_model_tables.py RESULTS pillar",
            "machine": GPU,
            "notes": [],
        },
    }
    about = {
        "command": "python studies/collect.py boxes --out OUT --sets fit fit-copies test --bare "
        "--cheap; for frames in 20 40 150 500 1200; do python studies/error_model.py --root OUT "
        "--out RESULTS --frames $frames; done; python studies/error_model_tables.py RESULTS",
        "date": date.today().isoformat(),
        "machine": "2 CPU cores",
    }
    fields = ("title", "command", "date", "machine", "columns", "digits", "rows", "notes")
    for name in names or ("rows", "gains", "learning", "coverage", "groups"):
        content = {**about, **tables[name]()}
        path = RESULTS / f"error-model-{name}.json"
        path.write_text(json.dumps({field: content[field] for field in fields}, indent=1) + "\n")


def read_rows(folder: Path, frames: int, test: str = "test") -> dict[str, dict[str, Any]]:
    """Return the results of all rows of one number of frames, in the order of ``ROWS``."""
    found = {}
    for name in ROWS:
        path = folder / f"{test} {frames} {slug(name)}.json"
        if path.exists():
            found[name] = json.loads(path.read_text())
    return found


def rows_table(folder: Path, test: str, network: str) -> dict[str, Any]:
    rows = read_rows(folder, FRAMES, test)
    first = next(iter(rows.values()))["sets"][test]
    score = [first["ranking"][f"1 - score, {key}"] for key in ("IoU < 0.4", "risk")]
    lines: list[list[Any]] = [["1 - score", score[0], None, None, score[1], *[None] * 8]]
    for name, result in rows.items():
        one = result["sets"][test]
        ranking = [one["ranking"][key] for key in ("IoU < 0.4", "IoU < 0.7", "distance", "risk")]
        paper = [one["paper"][key] for key in ("AvU", "P(A|C)", "P(U|I)")]
        nll = [one["NLL"][key] for key in ("nine fields", "without velocity")]
        inside = [100 * one["coverage"][level]["all"] for level in ("0.5", "0.9")]
        lines.append([name, *ranking, *paper, one["ECE"]["misplaced"], *nll, *inside])
    return {
        "title": f"{network}: {first['paired']:,} boxes with an object in 300 test frames",
        "columns": [
            *("inputs", "IoU < 0.4", "IoU < 0.7", "distance", "risk", "AvU", "P(A|C)", "P(U|I)"),
            *("ECE", "NLL", "no velocity", "50 %", "90 %"),
        ],
        "digits": [None, 3, 3, 3, 3, 3, 3, 3, 3, 1, 2, 1, 1],
        "rows": lines,
        "notes": [
            "AUROC of IoU < 0.4, IoU < 0.7 and distance above its mean: boxes with an object, "
            "ranked by misplaced (by the scales of x, y, z for the distance). Risk: IoU < 0.4 or "
            "no object, among all boxes. AvU, P(A|C), P(U|I) and ECE: u = misplaced, boxes with an "
            "object. NLL: Student-t, nine fields and without velocity. 50 and 90 %: percent of the "
            "errors in the regions of these levels.",
            "Ours, with 95 % intervals over frames: "
            f"{paper_intervals(row_file(folder, OURS, test))}.",
        ],
    }


def row_file(folder: Path, name: str, test: str = "test") -> Path:
    """The numbers of each box of a row."""
    return folder / f"{test} {FRAMES} {slug(name)}.npz"


def gains_table(folder: Path) -> dict[str, Any]:
    """What a row adds to a baseline, for three questions."""
    questions = ("IoU < 0.4", "risk", "NLL")
    short = {"ours": OURS, SIZE: SIZE, "raw outputs": RAW, "free": FREE}
    short |= {"raw + covariances": RAW_COVARIANCES, "without copies": ALONE}
    pairs = [("ours", name) for name in (SIZE, "raw outputs", "free", "without copies")]
    lines = []
    for pair in [*pairs, ("raw + covariances", "raw outputs")]:
        paths = [row_file(folder, short[name]) for name in pair]
        cells = [interval_text(*difference(*paths, question)) for question in questions]
        lines.append([*pair, *cells])
    return {
        "title": "Difference of a row to a baseline, with 95 % intervals over frames",
        "columns": ["row", "baseline", *questions],
        "digits": [None] * 5,
        "rows": lines,
        "notes": ["AUROC, higher is better; NLL of nine fields per box, lower is better."],
    }


def interval_text(mean: float, low: float, high: float) -> str:
    return f"{mean:+.3f} [{low:.3f}, {high:.3f}]"


def ceiling_table(folder: Path) -> dict[str, Any]:
    """The deep ensemble beside the error model, on the frames ``ceiling``."""
    rows = read_rows(folder, FRAMES, "ceiling")
    lines = []
    for name in (SIZE, ENSEMBLE, FREE, FREE_ENSEMBLE, OURS):
        one = rows[name]["sets"]["ceiling"]
        ranking = [one["ranking"][key] for key in ("IoU < 0.4", "IoU < 0.7", "distance", "risk")]
        nll = [one["NLL"][key] for key in ("nine fields", "without velocity")]
        lines.append([name, *ranking, *nll])
    gains = [
        f"Ours minus {name}: IoU < 0.4 {interval_text(*difference(*paths, 'IoU < 0.4'))}, distance "
        f"{interval_text(*difference(*paths, 'distance'))}, NLL "
        f"{interval_text(*difference(*paths, 'NLL'))}."
        for name in (ENSEMBLE, FREE_ENSEMBLE)
        for paths in [[row_file(folder, one, "ceiling") for one in (OURS, name)]]
    ]
    return {
        "title": "The deep ensemble, on earlier frames (seed 1777)",
        "command": "python studies/collect.py boxes --out OUT --sets fit ceiling --device cuda; "
        "python studies/collect.py ensemble --out OUT --sets fit ceiling --members FILES --device "
        "cuda; python studies/error_model.py --root OUT --out RESULTS --test ceiling --rows ROWS; "
        "python studies/error_model_tables.py RESULTS ceiling",
        "machine": GPU,
        "columns": ["inputs", "IoU < 0.4", "IoU < 0.7", "distance", "risk", "NLL", "no velocity"],
        "digits": [None, 3, 3, 3, 3, 2, 2],
        "rows": lines,
        "notes": ["Covariances of head and backbone.", *gains],
    }


def learning_table(folder: Path) -> dict[str, Any]:
    lines = []
    for frames in (20, 40, 150, 500, 1200):
        rows = read_rows(folder, frames)
        sets = {name: result["sets"]["test"] for name, result in rows.items()}
        scores = [
            sets[n]["ranking"]["IoU < 0.4"] if n in sets else None for n in (SIZE, FREE, OURS)
        ]
        lines.append([frames, *scores, sets[OURS]["ECE"]["misplaced"]])
    return {
        "title": "AUROC of IoU < 0.4 over the number of calibration frames",
        "columns": ["frames", SIZE, FREE, OURS, "ECE of ours"],
        "digits": [None, 3, 3, 3, 3],
        "rows": lines,
        "notes": [],
    }


def coverage_table(folder: Path) -> dict[str, Any]:
    lines = []
    for level, one in read_rows(folder, FRAMES)[OURS]["sets"]["test"]["coverage"].items():
        groups = one["groups"].values()
        fields = one["by field"]
        cells = [one["all"], min(fields), max(fields), min(groups), max(groups), one["joint"]]
        lines.append([f"{float(level):.0%}", *(100 * cell for cell in cells)])
    return {
        "title": "Share of errors inside the regions, in percent, on 300 test frames",
        "columns": [
            *("level", "all", "lowest field", "highest field", "lowest group", "highest group"),
            "all fields jointly",
        ],
        "digits": [None, 1, 1, 1, 1, 1, 1],
        "rows": lines,
        "notes": ["Groups: class and range bin (20 m, 40 m) with at least 200 boxes."],
    }


def groups_table(folder: Path) -> dict[str, Any]:
    """AUROC of IoU < 0.4 by class and by range, and the share of errors in the 90 % regions."""
    names = (SIZE, RAW, FREE, OURS)
    rows = [dict(np.load(row_file(folder, name))) for name in names]
    own, has_object = rows[-1], ~np.isnan(rows[-1]["l2"])
    edges = (0.0, *RANGES, np.inf)
    groups = {name: own["labels"] == c for c, name in enumerate(simulated.CLASSES)}
    for low, high in pairwise(edges):
        name = f"beyond {low:g} m" if high == np.inf else f"{low:g} to {high:g} m"
        groups[name] = (own["range"] >= low) & (own["range"] < high)
    lines = []
    for name, in_group in groups.items():
        mask = in_group & has_object
        bad = own["iou"][mask] < 0.4
        if min(bad.sum(), (~bad).sum()) < 30:
            continue
        scores = [auroc(bad, row["misplaced"][mask]) for row in rows]
        gain = bootstrap(
            lambda rows_, mask=mask, bad=bad: (
                auroc(bad[rows_], own["misplaced"][mask][rows_])
                - auroc(bad[rows_], rows[1]["misplaced"][mask][rows_])
            ),
            own["frame"][mask],
        )
        first = auroc(bad, 1 - own["scores"][mask])
        interval = f"[{gain.low:.3f}, {gain.high:.3f}]"
        lines.append([name, int(mask.sum()), 100 * float(bad.mean()), first, *scores, interval])
    return {
        "title": "AUROC of IoU < 0.4 by class and range, boxes with an object",
        "columns": [
            *("class or range", "boxes", "misplaced, %", "1 - score", SIZE, "raw outputs"),
            *("all free", "ours", "gain, 95 %"),
        ],
        "digits": [None, None, 1, 3, 3, 3, 3, 3, None],
        "rows": lines,
        "notes": [
            "Misplaced: IoU < 0.4. Gain: ours over raw outputs. Groups with at least 30 misplaced "
            "boxes and 30 others."
        ],
    }


def shift_table(folder: Path) -> dict[str, Any]:
    sets = read_rows(folder, FRAMES)[OURS]["sets"]
    lines = []
    for name, one in sets.items():
        scenario = name.removeprefix("test-") if "-" in name else "clear"
        inside = 100 * one["coverage"]["0.9"]["all"]
        ranking = one["ranking"]["IoU < 0.4"], one["ranking"]["1 - score, IoU < 0.4"]
        lines.append([scenario, one["paired"], inside, *ranking, one["ECE"]["misplaced"]])
    return {
        "title": "The error model of clear frames on other scenarios",
        "columns": [
            *("scenario", "boxes with an object", "errors in 90 % regions"),
            *("AUROC, misplaced", "AUROC, 1 - score", "ECE"),
        ],
        "digits": [None, None, 1, 3, 3, 3],
        "rows": lines,
        "notes": [],
    }


def paper_intervals(path: Path) -> str:
    """Return AUROC, P(A|C) and P(U|I) of IoU < 0.4 with their intervals over frames."""
    one = dict(np.load(path))
    has_object = ~np.isnan(one["l2"])
    iou, l2, u, frame = (one[key][has_object] for key in ("iou", "l2", "misplaced", "frame"))

    def metric(name: str, rows: Any) -> float:
        if name == "AUROC":
            return auroc(iou[rows] < 0.4, u[rows])
        return float(quality(iou[rows], l2[rows], u[rows])[name]["IoU"])

    parts = []
    for name in ("AUROC", "P(A|C)", "P(U|I)"):
        interval = bootstrap(partial(metric, name), frame)
        value = metric(name, np.arange(len(iou)))
        parts.append(f"{name} {value:.3f} [{interval.low:.3f}, {interval.high:.3f}]")
    return ", ".join(parts)


def difference(a: Path, b: Path, question: str) -> tuple[float, float, float]:
    """Return the AUROC, or NLL, of row a minus that of row b, with its interval over frames."""
    one, two = (dict(np.load(path)) for path in (a, b))
    has_object = ~np.isnan(one["l2"])
    bad, key, mask = one["iou"] < 0.4, "misplaced", has_object
    if question == "IoU < 0.7":
        bad, key = one["iou"] < 0.7, "misplaced 0.7"
    elif question == "distance":
        bad, key = one["l2"] > one["l2"][mask].mean(), "distance"
    elif question == "risk":
        key, mask = "risk", np.ones(len(bad), bool)
    bad, frame = bad[mask], one["frame"][mask]
    x, y = (d["nll" if question == "NLL" else key][mask] for d in (one, two))

    def gain(rows: Any) -> float:
        if question == "NLL":
            return float(np.nanmean((x - y)[rows].sum(1)))
        return auroc(bad[rows], x[rows]) - auroc(bad[rows], y[rows])

    interval = bootstrap(gain, frame)
    return gain(np.arange(len(bad))), float(interval.low), float(interval.high)


if __name__ == "__main__":
    write_tables(Path(sys.argv[1]), sys.argv[2:])
