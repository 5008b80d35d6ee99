"""The cost of the exact covariance of ``small`` on two CPU cores, by the form of its posterior.

    python benchmarks/posterior_forms.py [--out FOLDER]

The posterior as it was fitted, at three tolerances of the engine, compressed, down to the backbone
with 16 directions, and that of the package with and without its error model. Whole frames in turns;
medians of 9 rounds on 3 frames. Writes performance-cpu.json and performance-tolerance.json, tables
of docs/results/performance.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from deep import timed

import boxcov
from boxcov import EngineOptions, ExactGLM, Posterior
from boxcov.data import simulated
from boxcov.detectors import centerpoint

ROUNDS, FRAMES, FIT_FRAMES = 9, 3, 20
DEEP = "down to the backbone, 16 directions"
Case = tuple[str, ExactGLM]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the two JSON files")
    args = parser.parse_args()
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(2)
    detector = centerpoint.load("small")
    frames = [points for points, _ in simulated.frames("clear", seed=1000, count=FRAMES)]
    cases = posterior_cases(detector)
    plain, times = measure(detector, [model for _, model in cases], frames)
    about = {
        "title": "",  # that of the table; first in the file
        "command": "python benchmarks/posterior_forms.py",
        "date": str(datetime.date.today()),
        "machine": f"2 CPU cores, torch {torch.__version__}",
    }
    tables = {
        "cpu": {**about, **frame_table(cases, detector, frames, plain, times)},
        "tolerance": {**about, **form_table(cases, frames, plain, times)},
    }
    for name, table in tables.items():
        print(*table["rows"], sep="\n")
        if args.out is not None:
            path = args.out / f"performance-{name}.json"
            path.write_text(json.dumps(table, indent=1) + "\n")


def posterior_cases(detector: boxcov.Detector) -> list[Case]:
    """The models to compare; the first is the reference of the others but those of the package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few frames reach few classes: the speed is the same
        fitted = boxcov.fit(detector, simulated.frames(seed=0, count=FIT_FRAMES), n_data=3500)
        deep = boxcov.fit(detector, simulated.frames(seed=0, count=4), "backbone", n_data=3500)
    shipped = Posterior.load("small", detector)
    return [
        ("as fitted", ExactGLM(detector, fitted)),
        ("tolerance 1e-3", ExactGLM(detector, fitted, engine=EngineOptions(tolerance=1e-3))),
        ("tolerance 1e-2", ExactGLM(detector, fitted, engine=EngineOptions(tolerance=1e-2))),
        ("compressed, 1 %", ExactGLM(detector, fitted.compress(0.01))),
        (DEEP, ExactGLM(detector, deep, samples=16)),
        ("of the package", ExactGLM(detector, shipped.with_error_model(None))),
        ("of the package, with error model", ExactGLM(detector, shipped)),
    ]


def measure(
    detector: boxcov.Detector, models: list[ExactGLM], frames: list[Any]
) -> tuple[list[float], list[list[float]]]:
    """Milliseconds of a frame, plain and by each model, per frame."""
    calls = [detector.detect, *models]
    times: list[list[list[float]]] = [[[] for _ in frames] for _ in calls]
    for turn in range(-2, ROUNDS):  # negative turns verify the route and warm up
        for number, points in enumerate(frames):
            for call, own in zip(calls, times):
                taken = timed(lambda call=call, points=points: call(points))
                if turn >= 0:
                    own[number].append(taken)
    plain, *others = [[median(rounds) for rounds in own] for own in times]
    return plain, others


def frame_table(
    cases: list[Case],
    detector: boxcov.Detector,
    frames: list[Any],
    plain: list[float],
    times: list[list[float]],
) -> dict[str, Any]:
    """Each frame: the plain detector, the exact covariance and the error model."""
    of = {name: own for (name, _), own in zip(cases, times)}
    shipped, calibrated = of["of the package"], of["of the package, with error model"]
    columns = [
        "boxes",
        "plain",
        "exact",
        "and error model",
        "exact / plain",
        "and error model / plain",
    ]
    rows = [
        [len(detector.detect(points)), f"{a:.0f} ms", f"{b:.0f} ms", f"{c:.0f} ms", b / a, c / a]
        for points, a, b, c in zip(frames, plain, shipped, calibrated)
    ]
    return {
        "title": "The small CenterPoint with the posterior of the package, whole frame",
        "columns": columns,
        "digits": [None, None, None, None, 2, 2],
        "rows": rows,
        "notes": [f"Ten-sweep simulated frames, medians of {ROUNDS}."],
    }


def form_table(
    cases: list[Case], frames: list[Any], plain: list[float], times: list[list[float]]
) -> dict[str, Any]:
    """Each form: columns of the shared convolution, added cost, change of the variances."""
    reference = cases[0][1](frames[0]).covariance.diagonal(dim1=1, dim2=2)
    rows = []
    for (name, model), own in zip(cases[:5], times):
        variances = model(frames[0]).covariance.diagonal(dim1=1, dim2=2)
        weights = model.router.staged_head.weights  # type: ignore[attr-defined]
        kept = weights.stem[0].posterior.U.shape[1]
        bound = max(model.engine.tolerance, model.posterior.error)
        change = float((variances / reference - 1).abs().max())
        is_close = name not in (cases[0][0], DEEP)  # to the first one
        shown = f"{100 * bound:.2g} % / {100 * change:.2g} %" if is_close else None
        cost = median(b / a - 1 for a, b in zip(plain, own))
        rows.append([name, kept, cost, shown])
    return {
        "title": "Posteriors of the small CenterPoint by form",
        "columns": [
            "posterior",
            "columns kept of 1,728",
            "added cost",
            "change of a variance: bound / measured",
        ],
        "digits": [None, None, 2, None],
        "rows": rows,
        "notes": [
            f"Cost in plain frames, median of {FRAMES} frames. Fitted on {FIT_FRAMES} frames "
            "(the last on 4), n = 3500, prior precision auto. The default tolerance is 1e-5."
        ],
    }


if __name__ == "__main__":
    main()
