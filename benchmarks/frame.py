"""Every stage of a CenterPoint's frame, and every way to run it, beside the limit of the machine.

    python benchmarks/frame.py [pillar | voxel | small] ... [--out FOLDER]

Stages: milliseconds as a CUDA graph, launches, busy time, and the least time in which this machine
could do the same operations and read and write the same bytes once. NMS is part of the selection,
and shown by itself beside torchvision's, which takes boxes without rotation and runs outside a
graph. Ways to run a frame: as it is, compiled (boxes bit for bit), fused, and batches of eight.
Medians of 30 after a warm-up, with synchronization. Writes performance-stages.json,
performance-frame.json and performance-methods.json, the tables of stages.md and frame.md in
docs/results, after each row; their names end in -cpu without a GPU, where a stage runs step by
step, and medians are of 3.
"""

from __future__ import annotations

import argparse
import datetime
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deep import detector_named
from torch import Tensor

import boxcov
from boxcov import GLM, MCGLM, MCI, EngineOptions, ExactGLM
from boxcov._files.output_file import write_text
from boxcov._torch.process_state import Precision
from boxcov.data import simulated
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.pipeline.bench import BATCH, GLM_OUTPUTS, batch_limits, paper_glm, paper_mcglm
from boxcov.pipeline.stages import measure_stages, milliseconds
from boxcov.static_selection import StaticLimits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS = 30 if DEVICE == "cuda" else 3
_KERNELS = (
    " Busy: the sum of the times of all kernels, more than ms where kernels run side by side. "
    "Launches: kernels and copies."
    if DEVICE == "cuda"
    else ""
)
NOTES = {
    "stages": f"Medians of {ROUNDS}.{_KERNELS} GFLOP: products and convolutions. MB: inputs, "
    "weights and outputs, each once. Limit: the larger of the times for GFLOP and for MB, at the "
    "rates of a large product and of a large copy on the same machine.",
    "frame": f"Medians of {ROUNDS}, everything included. Compiled: boxes bit for bit those of the "
    "detector. Fused: equal up to rounding, bit for bit with and without covariances.",
    "methods": f"k = 10 samples. As published: finite differences of whole passes, one after the "
    f"other; one backward pass per output, extrapolated from {GLM_OUTPUTS}. MC dropout runs the "
    f"head once per box and pass; it was not written for a GPU. MC-GLM: medians of {ROUNDS}; as "
    "published, and MC dropout: of 3.",
}  # by table


@dataclass(frozen=True)
class Case:
    """A network with a posterior, and frames for it."""

    name: str
    detector: CenterPoint
    posterior: boxcov.Posterior
    frames: list[list[Tensor]]
    limits: StaticLimits

    @staticmethod
    def make(name: str) -> Case:
        detector = detector_named(name, DEVICE)
        frames = simulated.frames("clear", seed=11, count=BATCH, device=DEVICE)
        points = [frames[number][0] for number in range(BATCH)]
        limits = StaticLimits(boxes=160 if name == "small" else 128, candidates=192, pairs=8192)
        if name == "voxel":  # untrained: a threshold that lets about a hundred boxes through
            threshold = float(detector.detect(points[0]).scores.sort(descending=True).values[97])
            rules = replace(detector.config.reporting, threshold=threshold)
            detector.config = replace(detector.config, reporting=rules)
            limits = replace(limits, candidates=500, pairs=60_000)
        if name == "small":
            return Case(name, detector, boxcov.Posterior.load("small", detector), points, limits)
        training = simulated.frames("clear", seed=3, count=4, device=DEVICE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = boxcov.fit(detector, training, n_data=3500, prior_precision=100.0)
        return Case(name, detector, posterior, points, limits)

    def model(self, precision: Any) -> ExactGLM:
        return ExactGLM(self.detector, self.posterior, engine=EngineOptions(precision))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=["pillar", "voxel", "small"])
    parser.add_argument("--out", type=Path, help="folder for the three JSON files")
    args = parser.parse_args()
    stages: list[list[Any]] = []
    frames: list[list[Any]] = []
    for name in args.networks:
        case = Case.make(name)
        for precision in ("float32", "tf32") if DEVICE == "cuda" else ("float32",):
            set_tf32(precision == "tf32")
            for kept, measured in (
                (stages, stage_rows(case, precision)),
                (frames, frame_rows(case, precision)),
            ):
                for row in measured:
                    print(*row, flush=True)
                    kept.append(row)
                    if args.out is not None:  # a run that is cut off keeps its rows
                        write(args.out, stages, frames)


def set_tf32(is_allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_allowed


def middle(run: Callable[[], Any], rounds: int = ROUNDS) -> float:
    return milliseconds(run, DEVICE, rounds)


# stages


def stage_rows(case: Case, precision: Precision) -> Iterator[list[Any]]:
    columns = ("stage", "ms", "busy_ms", "launches", "gflop", "mb", "limit_ms")
    posterior, inputs = case.posterior, case.frames[0]
    for row in measure_stages(case.detector, posterior, inputs, case.limits, precision, ROUNDS):
        yield [case.name, precision, *(row.get(column) for column in columns)]


# whole frames


def frame_rows(case: Case, precision: str) -> Iterator[list[Any]]:
    """Milliseconds per frame: as it is, compiled, fused, and fused in batches."""
    model, detector = case.model(precision), case.detector
    plain_posterior = case.posterior.with_error_model(None)
    exact = ExactGLM(detector, plain_posterior, engine=model.engine)
    ways: dict[str, tuple[Any, Callable[[Any], Any]]] = {"plain": (detector, detector.detect)}
    ways["exact covariance"] = exact, exact
    if model.error_model is not None:
        ways["exact covariance and error model"] = model, model
    boxes = f"{case.name}, {len(detector.detect(case.frames[0]))} boxes"
    for name, (source, call) in ways.items():
        times = [middle(lambda call=call: call(case.frames[0]))]
        for fused in (False, True):
            compiled = boxcov.compile(source, case.frames[0], case.limits, fused=fused)
            times.append(middle(lambda c=compiled: c(case.frames[0])))
            assert not compiled.fallbacks
        yield [boxes, precision, name, *times, batched(case, source)]
    sampled = MCGLM(detector, plain_posterior, samples=10, engine=model.engine)
    dropout = MCI(detector, dropout=0.1, samples=10)
    published = paper_glm(GLM(detector, plain_posterior))
    for name, run in {
        "MC-GLM, head, k = 10": lambda: middle(lambda: sampled(case.frames[0])),
        "MC-GLM as published, head, k = 10": lambda: middle(
            lambda: paper_mcglm(sampled)(case.frames[0]), 3
        ),
        "MC dropout, head, k = 10": lambda: middle(lambda: dropout(case.frames[0]), 3),
        "GLM as published, head": lambda: 1e3 * published(case.frames[0]),
    }.items():
        yield [boxes, precision, name, run(), None, None, None]


def batched(case: Case, source: Any) -> float | None:
    """Frames per second of a fused model in batches; None on a CPU."""
    if DEVICE == "cpu":
        return None
    # the threshold of the untrained network is that of its first frame
    own = replace(case.limits, boxes=256) if case.name == "voxel" else case.limits
    batch = [frame[0] for frame in case.frames]
    compiled = boxcov.compile(source, batch, batch_limits(own), fused=True)
    return 1e3 * BATCH / middle(lambda: compiled(batch))


def write(folder: Path, stages: list[list[Any]], frames: list[list[Any]]) -> None:
    machine = (
        f"one {torch.cuda.get_device_name()}"
        if DEVICE == "cuda"
        else f"{torch.get_num_threads()} CPU cores"
    )
    common = {
        "command": "python benchmarks/frame.py",
        "date": str(datetime.date.today()),
        "machine": f"{machine}, torch {torch.__version__}",
    }
    whole = [row for row in frames if row[4] is not None]  # with a compiled form
    others: dict[tuple[str, str], list[float]] = {}
    for network, precision, _, ms, compiled, *_ in frames:
        if compiled is None:
            others.setdefault((network, precision), []).append(ms)
    columns = {
        "stages": ["stage", "ms", "busy ms", "launches", "GFLOP", "MB", "limit ms"],
        "frame": ["method", "as it is", "compiled", "fused", "frames per second in batches of 8"],
        "methods": ["MC-GLM", "MC-GLM as published", "MC dropout", "GLM as published"],
    }
    digits = {
        "stages": [None, 2, 2, None, 1, 0, 2],
        "frame": [None, 1, 1, 1, 0],
        "methods": [1, 1, 1, 0],
    }
    titles = {
        "stages": f"Stages of a fused frame{', as CUDA graphs' if DEVICE == 'cuda' else ''}",
        "frame": "Whole frame from points to boxes, milliseconds",
        "methods": "Other methods on the head, as they are, milliseconds per frame",
    }
    rows = {
        "stages": stages,
        "frame": whole,
        "methods": [[*key, *times, *[None] * (4 - len(times))] for key, times in others.items()],
    }
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "" if DEVICE == "cuda" else "-cpu"
    for name, title in titles.items():
        if not rows[name]:
            continue
        table = {
            "title": title,
            **common,
            "columns": ["network", "precision", *columns[name]],
            "digits": [None, None, *digits[name]],
            "rows": rows[name],
            "notes": [NOTES[name]],
        }
        path = folder / f"performance-{name}{suffix}.json"
        write_text(path, json.dumps(without_empty_columns(table), indent=1) + "\n")


def without_empty_columns(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table without the columns that this machine cannot measure."""
    rows = table["rows"]
    kept = [k for k in range(len(table["columns"])) if any(row[k] is not None for row in rows)]
    return {
        **table,
        "columns": [table["columns"][k] for k in kept],
        "digits": [table["digits"][k] for k in kept],
        "rows": [[row[k] for k in kept] for row in rows],
    }


if __name__ == "__main__":
    main()
