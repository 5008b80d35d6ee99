"""Time of the exported ONNX file in onnxruntime against PyTorch, on the small CenterPoint.

    python benchmarks/onnx_file.py [--repeats 9] [--write]

Everything uses one thread. onnxruntime starts after the encoder, PyTorch includes it; "plain
detector" has the encoder and no covariances. Medians over alternating runs after a warm-up.
``--write`` updates docs/results/data/performance-onnx.json; ``make results`` then writes it to the
page on reliability.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime
import torch
from torch import Tensor

import boxcov
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.export.onnx import StaticLimits, export

DATA = Path(__file__).parents[1] / "docs" / "results" / "data"
LIMITS = StaticLimits(boxes=150)
WARM_UP = 2
COLUMNS = [
    "covariance",
    "onnxruntime, after the encoder",
    "PyTorch, with encoder",
    "plain detector",
    "file",
    "difference",
]


def session(path: Path) -> Callable[[Tensor], Tensor]:
    """Return a function from the encoder's map to the covariances of the file at ``path``."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    run = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run
    return lambda grid: torch.from_numpy(run(["covariance"], {"map": grid.numpy()})[0])


def milliseconds(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median time of each run, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(WARM_UP + repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: median(spent[WARM_UP:]) for name, spent in times.items()}


def measure(samples: Any, folder: Path, repeats: int) -> tuple[list[Any], int]:
    """Return the table's row for ``samples`` (a number, or "exact") and the number of boxes."""
    detector = centerpoint.load("small")
    inputs = simulated.frames("clear", seed=1000, count=1)[0][0]
    frames = simulated.frames("clear", seed=3, count=4)
    posterior = boxcov.fit(detector, frames, n_data=3500, prior_precision=100.0)
    exact = samples == "exact"
    model = (
        boxcov.ExactGLM(detector, posterior)
        if exact
        else boxcov.MCGLM(detector, posterior, samples)
    )
    with torch.no_grad():
        grid = detector.encoder(inputs).contiguous()
    path = folder / f"{samples}.onnx"
    export(detector, posterior, path, grid, samples, limits=LIMITS, input_name="map")
    file = session(path)
    expected = model(inputs).covariance  # (n, D, D)
    difference = (file(grid)[: len(expected)] - expected).norm() / expected.norm()
    times = milliseconds(
        {
            "file": lambda: file(grid),
            "torch": lambda: model(inputs),
            "plain": lambda: detector.detect(inputs),
        },
        repeats,
    )
    row = [
        "exact" if exact else f"{samples} samples",
        *(f"{times[name]:.0f} ms" for name in ("file", "torch", "plain")),
        f"{path.stat().st_size / 1e6:.1f} MB",
        f"{difference:.0e}",
    ]
    return row, len(expected)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--machine", default="1 CPU thread", help="shown above the table")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measured = [measure(which, Path(folder), options.repeats) for which in (10, "exact")]
    result = {
        "title": "ONNX file in onnxruntime against PyTorch, small CenterPoint",
        "command": "python benchmarks/onnx_file.py",
        "date": date.today().isoformat(),
        "machine": options.machine,
        "columns": COLUMNS,
        "digits": [None] * len(COLUMNS),
        "rows": [row for row, _ in measured],
        "notes": [
            f"{measured[0][1]} boxes in the frame, {LIMITS.boxes} rows. "
            f"Medians of {options.repeats}. The difference is that of all covariances, in norm."
        ],
    }
    print(json.dumps(result, indent=1))
    if options.write:
        (DATA / "performance-onnx.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
