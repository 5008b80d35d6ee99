"""Active learning: does boxcov choose frames that are worth more labels than random ones?

python studies/active_learning.py --out OUT --cache CACHE --device cuda --workers 8

It does only what OUT does not hold yet, and writes the tables (active_learning_tables.py). CACHE
holds simulated frames and may be deleted.

The protocol, written before any of its frames was rendered. All of it for each of three seeds:

- A small CenterPoint is trained from scratch on 150 clear frames of 5 sweeps: 1,500 steps of eight
  frames, 80 epochs. 50 further clear frames are labelled too: boxcov's error model is fitted on
  them.
- The pool: 800 clear frames and 200 from rain, crowd and unseen shapes. 50, 100 or 200 are chosen.
- Every method then fine-tunes the same network on the 200 labelled and the chosen frames: equal
  steps (600), rates and seeds. So the 50 frames of the error model serve all methods.
- AP (nuScenes, mean over classes and distances) on 400 other frames, mixed as the pool.

A frame's value is the sum over its boxes of 1 - score, of the score's binary entropy, or of score
times risk; for ``epistemic`` it is the mean over its boxes of score times the standard deviations
relative to typical ones. The last two are those of ``boxcov rank``. The mean over boxes of score
times risk (``boxcov rank --aggregate mean``) is a row of its own. Coreset is k-centre greedy on the
mean features of the neck, from the labelled frames on.

The first number to look at: AP minus that of random frames, mean over the three budgets, with a
95 % t-interval over seeds. Then: how many random frames give the AP of 50, 100 and 200 chosen ones.

An earlier protocol, on other frames, had too little power: 800 steps for the first detector and 250
for each choice gained 0.02 to 0.03 AP, and 200 random frames hardly more than 50.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import multiprocessing

from boxcov import BoxcovError, ExactGLM, Posterior, calibrate, fit, join_frames
from boxcov._files.output_file import write_text
from boxcov._torch.modules import move
from boxcov.concatenation import concatenate
from boxcov.data import simulated
from boxcov.data.augment import Augmentation
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.training import Recipe, train
from boxcov.evaluate.average_precision import average_precision, mean_precision
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.label_order import box_values, frame_values

SCENARIOS = ("clear", "rain", "crowd", "unseen")
METHODS = (
    "random",
    "coreset",
    "1 - score, sum",
    "entropy, sum",
    "risk, sum",
    "risk, mean",
    "epistemic, mean",
)
PRIOR, CHUNK = 100.0, 10


@dataclass(frozen=True)
class Settings:
    """Sizes of the study; ``quick`` ones show that it runs."""

    sweeps: int = 5
    training: int = 150
    calibration: int = 50
    pool: tuple[int, ...] = (800, 67, 67, 66)  # by scenario
    test: tuple[int, ...] = (320, 27, 27, 26)
    start_steps: int = 1500  # 0: the shipped weights instead
    steps: int = 600
    batch: int = 8
    budgets: tuple[int, ...] = (50, 100, 200)
    longest: int = 400  # random frames, to read off how many are needed for the same AP
    seeds: tuple[int, ...] = (0, 1, 2)


QUICK = Settings(3, 3, 8, (3, 1, 1, 1), (2, 1, 1, 1), 0, 1, 2, (2,), 4, (0, 1))


@dataclass(frozen=True)
class Place:
    """Where a run reads and writes."""

    out: Path
    cache: Path
    device: str
    settings: Settings


@dataclass(frozen=True)
class Job:
    """One fine-tuning: which frames, chosen how."""

    seed: int
    method: str
    budget: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--cache", type=Path, help="folder of the frames; by default OUT/frames")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes that train")
    parser.add_argument("--quick", action="store_true", help="tiny settings: does it run?")
    args = parser.parse_args()
    settings, part = (QUICK, "quick") if args.quick else (Settings(), "")
    out, cache = args.out / part, (args.cache or args.out / "frames") / part
    place = Place(out, cache, args.device, settings)
    place.out.mkdir(parents=True, exist_ok=True)
    place.cache.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def report(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {text}", flush=True)

    run_all(place, args.workers, report)
    from active_learning_tables import write  # it imports this module

    write(place.out, args.quick)


def run_all(place: Place, workers: int, report: Any) -> None:
    """Make the frames, train the first detectors, and fine-tune them on each choice."""
    s = place.settings
    sets = [f"{kind}-{seed}" for seed in s.seeds for kind in ("start", "pool")] + ["test"]
    chunks = [(place, *chunk) for name in sets for chunk in chunks_of(name, s)]
    context, cores = multiprocessing.get_context("spawn"), os.cpu_count() or 1
    threads = max(1, cores // len(s.seeds))  # for the error models
    renderers = cores if place.device == "cpu" else workers
    with context.Pool(min(renderers, len(chunks)), _prepare, (1,)) as pool:
        for _ in pool.imap_unordered(make_chunk, chunks):
            pass
    report(f"{len(chunks)} files of {CHUNK} frames")
    with context.Pool(min(workers, len(s.seeds)), _prepare, (threads,)) as pool:
        for text in pool.imap_unordered(first_detector, [(place, seed) for seed in s.seeds]):
            report(text)
    done = {job for job, _ in read_results(place.out)}
    left = [(place, job) for job in jobs(s) if job not in done]
    if not left:
        return
    with context.Pool(min(workers, len(left)), _prepare, (1,)) as pool:
        for result in pool.imap_unordered(fine_tune, left):
            append_result(place.out, result)
            about = " ".join(map(str, result["job"].values()))
            report(f"{about}: AP {result['AP']:.3f}, {result['seconds']:.0f} s")


def _prepare(threads: int) -> None:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")


def jobs(s: Settings) -> list[Job]:
    """Return all fine-tunings."""
    ends = [Job(seed, "random", budget) for seed in s.seeds for budget in (0, s.longest)]
    return ends + [
        Job(seed, method, budget) for budget in s.budgets for seed in s.seeds for method in METHODS
    ]


# frames


def chunks_of(name: str, s: Settings) -> Iterator[tuple[str, str, int, int, int]]:
    """Yield the files of a set: its name, scenario, seed, first frame and number of frames."""
    kind, _, seed = name.partition("-")
    counts = {"start": (s.training + s.calibration,), "pool": s.pool, "test": s.test}[kind]
    base = {"start": 71_000, "pool": 72_000, "test": 73_000}[kind] + 10 * int(seed or 0)
    for k, count in enumerate(counts):
        for first in range(0, count, CHUNK):
            yield name, SCENARIOS[k], base + k, first, min(CHUNK, count - first)


def _chunk_path(place: Place, name: str, scenario: str, first: int) -> Path:
    return place.cache / f"{name}-{scenario}-{first:04d}.pt"


def make_chunk(task: tuple[Place, str, str, int, int, int]) -> None:
    """Write some frames to a file, unless it is there."""
    place, name, scenario, seed, first, count = task
    path = _chunk_path(place, name, scenario, first)
    if path.exists():
        return
    sweeps, device = place.settings.sweeps, place.device
    frames = simulated.frames(scenario, seed, first + count, sweeps, device=device)
    partial = path.with_suffix(".partial")
    torch.save(move([frames[first + i] for i in range(count)], torch.device("cpu")), partial)
    partial.rename(path)


@lru_cache(maxsize=8)
def load_set(place: Place, name: str) -> tuple[list[Any], list[str]]:
    """Return the frames of a set, mapped from its files, and the scenario of each."""
    frames: list[Any] = []
    scenarios: list[str] = []
    for _, scenario, _, first, count in chunks_of(name, place.settings):
        frames += torch.load(_chunk_path(place, name, scenario, first), mmap=True)
        scenarios += [scenario] * count
    return frames, scenarios


# the first detector and what it says about the pool


def first_detector(task: tuple[Place, int]) -> str:
    """Train the detector of a seed, and write the values of the pool's frames by each method."""
    place, seed = task
    s, path = place.settings, place.out / f"pool-{seed}.json"
    weights = place.out / f"start-{seed}.safetensors"
    if path.exists() and not weights.exists():
        raise BoxcovError(
            f"{weights}: no such file, but {path.name} was chosen with it: restore it, or delete "
            f"{path.name} and results.jsonl to start again"
        )
    if path.exists():
        return f"seed {seed}: is there"
    began = time.perf_counter()
    labelled = move(load_set(place, f"start-{seed}")[0], torch.device(place.device))
    if not weights.exists():
        centerpoint.save(train_first(labelled[: s.training], seed, place), weights)
    trained = time.perf_counter()
    detector = centerpoint.load(str(weights)).to(place.device)
    training = labelled[: s.training]
    posterior: Posterior = fit(detector, training, "head", s.training, prior_precision=PRIOR)
    model = calibrate(ExactGLM(detector, posterior), labelled[s.training :])
    calibrated = time.perf_counter()
    columns = pool_values(model, load_set(place, f"pool-{seed}")[0], place.device)
    known = np.stack([features(detector, inputs) for inputs, _ in labelled])
    rng = np.random.default_rng(seed)
    most = max(*s.budgets, s.longest)
    orders = {"random": rng.permutation(sum(s.pool))[:most].tolist()}
    orders["coreset"] = coreset(np.array(columns.pop("features")), known, max(s.budgets))
    orders |= {
        name: np.argsort(-np.array(values), kind="stable")[: max(s.budgets)].tolist()
        for name, values in columns.items()
    }
    AP = mean_precision(precision(detector, place)["mixture"])
    write_text(path, json.dumps({"AP": AP, "orders": orders, "values": columns}))
    seconds = np.diff([began, trained, calibrated, time.perf_counter()]).round(1).tolist()
    return f"seed {seed}: AP {AP:.3f}; training, error model, pool: {seconds} s"


def train_first(frames: Sequence[Any], seed: int, place: Place) -> Any:
    s = place.settings
    if not s.start_steps:
        return centerpoint.load("small")
    detector = centerpoint.CenterPoint(Config.small(), seed).to(place.device)
    recipe = Recipe(s.start_steps, s.batch, 2.5e-3, seed=seed, augmentation=Augmentation())
    train(detector, frames, recipe)
    return detector


def pool_values(model: Any, frames: Sequence[Any], device: str) -> dict[str, Any]:
    """Return the value of each frame by method and aggregate, and the features of the frames."""
    parts, pooled = [], []
    for frame in frames:
        inputs, _ = move(frame, torch.device(device))
        parts.append(model(inputs).to("cpu"))
        pooled.append(features(model.linearized.shadow, inputs).tolist())
    found = join_frames(parts)
    p = found.scores.double().clamp(1e-6, 1 - 1e-6).numpy()
    boxes = {
        "1 - score": 1 - p,
        "entropy": -p * np.log(p) - (1 - p) * np.log(1 - p),
        "risk": box_values(found, "risk"),
        "epistemic": box_values(found, "epistemic"),
    }
    number = found.frame.numpy()
    return {
        f"{name}, {aggregate}": frame_values(values, number, len(frames), aggregate).tolist()
        for name, values in boxes.items()
        for aggregate in ("sum", "mean")
    } | {"features": pooled}


def features(detector: Any, inputs: Any) -> np.ndarray:
    """Return the neck's features, averaged over the map (C,)."""
    with torch.no_grad():
        maps = detector.neck(detector.backbone(detector.encoder(inputs)))
    pooled: np.ndarray = maps.double().mean((0, 2, 3)).cpu().numpy()
    return pooled


def coreset(x: np.ndarray, known: np.ndarray, count: int) -> list[int]:
    """Return ``count`` rows of ``x``, each the farthest from the known and the chosen ones."""
    spread = np.concatenate([x, known]).std(0) + 1e-9
    x, known = x / spread, known / spread
    distance = np.linalg.norm(x[:, None] - known[None], axis=2).min(1)
    chosen: list[int] = []
    for _ in range(count):
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(x - x[chosen[-1]], axis=1))
    return chosen


# fine-tuning


def fine_tune(task: tuple[Place, Job]) -> dict[str, Any]:
    """Return the AP of the seed's detector after fine-tuning on the frames of a choice."""
    place, job = task
    s, began = place.settings, time.perf_counter()
    orders = json.loads((place.out / f"pool-{job.seed}.json").read_text())["orders"]
    chosen = orders[job.method][: job.budget]
    pool, scenarios = load_set(place, f"pool-{job.seed}")
    frames = load_set(place, f"start-{job.seed}")[0] + [pool[i] for i in chosen]
    detector = centerpoint.load(str(place.out / f"start-{job.seed}.safetensors")).to(place.device)
    recipe = Recipe(s.steps, s.batch, 1e-3, seed=job.seed, augmentation=Augmentation())
    train(detector, move(frames, torch.device(place.device)), recipe)
    tables = precision(detector, place)
    picked = [scenarios[i] for i in chosen]
    return {
        "job": vars(job),
        "AP": mean_precision(tables["mixture"]),
        "AP clear": mean_precision(tables["clear"]),
        "AP others": mean_precision(tables["others"]),
        "classes": {name: np.mean([*row.values()]) for name, row in tables["mixture"].items()},
        "picked": {name: picked.count(name) for name in SCENARIOS},
        "objects": sum(len(pool[i][1][0]["labels"]) for i in chosen),
        "seconds": time.perf_counter() - began,
    }


@lru_cache(maxsize=1)
def _test_frames(place: Place) -> tuple[list[Any], list[str]]:
    frames, scenarios = load_set(place, "test")
    return move(frames, torch.device(place.device)), scenarios


def precision(detector: Any, place: Place) -> dict[str, Any]:
    """Return the tables of AP on all test frames, on the clear ones and on the others."""
    frames, scenarios = _test_frames(place)
    parts, size = [], place.settings.batch
    for first in range(0, len(frames), size):
        clouds = [inputs[0] for inputs, _ in frames[first : first + size]]
        boxes = detector.detect(clouds).to("cpu")
        parts.append(replace(boxes, frame=boxes.frame + first))
    found, truth = concatenate(parts), GroundTruth.from_frames(frames)
    is_clear = np.array(scenarios) == "clear"
    tables = {}
    for name, kept in {"mixture": is_clear | True, "clear": is_clear, "others": ~is_clear}.items():
        rows = kept[truth.frame]
        objects = {key: getattr(truth, key)[rows] for key in ("boxes", "labels", "frame")}
        own = found[torch.from_numpy(kept)[found.frame]]
        tables[name] = average_precision(own, replace(truth, **objects))
    return tables


def append_result(out: Path, result: dict[str, Any]) -> None:
    with (out / "results.jsonl").open("a") as file:
        file.write("\n" + json.dumps(result))  # the line before may have been cut off


def read_results(out: Path) -> list[tuple[Job, dict[str, Any]]]:
    """Return the finished jobs and their results; a line that was cut off is left out."""
    path = out / "results.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        found.append((Job(**result["job"]), result))
    return found


if __name__ == "__main__":
    main()
