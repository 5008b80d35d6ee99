"""Collect what is known about every box of a CenterPoint on simulated frames, for error models.

python studies/collect.py STEP --out OUT

Steps:
  boxes     boxes, signals, covariances, baselines and errors of each set of frames (``SETS``)
            that is not there yet
  ensemble  the same boxes as seen by further networks, trained with other seeds
  points    the signals from points alone, for boxes that were collected without them
  pack      split the results into files of at most 15 MiB

The sets and their seeds are fixed here, before any result is looked at: ``fit`` is for error
models, ``develop`` for choices between them, ``test`` is read once, for the tables. Whenever the
error model was changed, ``test`` got another seed: 777, 1777, 2777, 5777 and 6777 were read for
earlier versions. ``ceiling`` are the frames of 1777, which the deep ensemble was tried on.
``fit-copies`` are the copies of the first 542 frames of ``fit`` that ``boxcov.calibrate`` makes.
"""

from __future__ import annotations

import argparse
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame_results import each_frame, forget

from boxcov import MCGLM, MCI, Detections, ExactGLM, NMSSpread, Posterior, fit
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint.point_signals import point_maps, point_signals
from boxcov.detectors.centerpoint.voxels import concatenate
from boxcov.error_model.labelled_frames import COPIES, changed_copies
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.matching import match

SHIFTS = ("rain", "fog", "sparse", "crowd", "unseen")
SETS: dict[str, tuple[str, int, int]] = {  # name: scenario, seed, frames
    "fit": ("clear", 4242, 1200),
    "fit-copies": ("clear", 4242, 542 * COPIES),
    "develop": ("clear", 9001, 208),
    "test": ("clear", 8777, 300),
    "ceiling": ("clear", 1777, 300),
    **{f"develop-{shift}": (shift, 4343, 60) for shift in SHIFTS},
    **{f"test-{shift}": (shift, 778, 60) for shift in SHIFTS},
}
# frames with dropout, identity and NMS
BASELINES = {"fit": 542, "develop": 208, "test": 300, "ceiling": 300}
N_TRAIN = 3500
PRIOR = 100.0


def main() -> None:
    steps = {
        "boxes": collect_boxes,
        "ensemble": collect_ensemble,
        "points": collect_points,
        "pack": pack,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=steps)
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--detector", default="small", help="small, or a file of weights")
    parser.add_argument("--members", nargs="*", default=[], help="weights of further networks")
    parser.add_argument("--sets", nargs="*", default=list(SETS), help="names of the sets")
    parser.add_argument("--most", type=int, default=10**9, help="frames per set")
    parser.add_argument("--samples", type=int, default=16, help="directions below the head")
    parser.add_argument("--bare", action="store_true", help="covariances of the head alone")
    parser.add_argument("--cheap", action="store_true", help="no dropout, NMS, identity Fisher")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    args.out.mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


def collect_boxes(args: argparse.Namespace) -> None:
    missing = [name for name in args.sets if not (args.out / f"{name}.npz").exists()]
    if not missing:
        return
    detector = centerpoint.load(args.detector).to(args.device)
    models, expensive = estimators(detector, args)
    for name in missing:
        scenario, seed, count = SETS[name]
        count = min(count, args.most)
        frames = simulated.frames(scenario, seed=seed, count=count, device=args.device)
        frames = Copies(detector, frames) if name.endswith("copies") else frames

        def row_of(number: int, frames: Any = frames, name: str = name) -> dict[str, np.ndarray]:
            inputs, targets = frames[number]
            row = describe(detector, inputs, targets, number)
            more = expensive if number < BASELINES.get(name, 0) and not args.cheap else {}
            for method, model in {**models, **more}.items():
                row |= covariance_columns(method, model(inputs), correlations=method == "head")
            return row

        path = args.out / f"{name}.npz"
        save(path, list(each_frame(path, count, row_of)))
        forget(path)
        print(name, count, "frames", flush=True)


class Copies:
    """The copies of all frames that ``boxcov.calibrate`` makes, one after the other."""

    def __init__(self, detector: Any, frames: Any) -> None:
        def of_frame(source: int) -> list[Any]:
            return list(changed_copies(detector, *frames[source], source, COPIES))

        self.of_frame = lru_cache(maxsize=1)(of_frame)

    def __getitem__(self, number: int) -> Any:
        source, copy = divmod(number, COPIES)
        return self.of_frame(source)[copy]


def estimators(detector: Any, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the models of all frames, and the expensive ones of the first frames."""
    training = simulated.frames("clear", seed=0, count=min(60, args.most), device=args.device)
    passes = {
        "dropout": MCI(detector, dropout=0.1, samples=8, depth="backbone", with_logit=True),
        "nms": NMSSpread(detector),
    }
    if args.bare:
        head = fit(detector, training, "head", N_TRAIN, prior_precision=PRIOR)
        identity = fit(detector, training, "head", N_TRAIN, PRIOR, fisher="identity")
        exact = ExactGLM(detector, identity, with_logit=True)
        return {"head": ExactGLM(detector, head, with_logit=True)}, {**passes, "identity": exact}
    posterior = fit(detector, training, "backbone", N_TRAIN, prior_precision=PRIOR)
    identity = fit(detector, training, "backbone", N_TRAIN, PRIOR, fisher="identity")
    head, below = split(posterior)
    models = {
        "head": ExactGLM(detector, head, with_logit=True),
        "below": MCGLM(detector, below, args.samples, with_logit=True),
    }
    sampled = MCGLM(detector, split(identity)[1], args.samples, with_logit=True)
    return models, {**passes, "identity": sampled}


def split(posterior: Posterior) -> tuple[Posterior, Posterior]:
    """Return the posterior of the head, and that of the layers below it."""
    head = [name for name in posterior.blocks if name.startswith("head.")]
    below = [name for name in posterior.blocks if not name.startswith("head.")]
    return posterior.restricted(head), posterior.restricted(below)


def describe(detector: Any, inputs: Any, targets: Any, number: int) -> dict[str, np.ndarray]:
    """Return the boxes of a frame with signals, features and the paired objects."""
    with torch.no_grad():
        raw = detector(inputs)
        chosen = detector.select(raw)
        found = detector.detections(chosen, detector.decode(raw, chosen))
        signals = detector.signals(raw, chosen)
        where = chosen.where
        features = detector.head.shared(raw["features"])
        features = features[where.frame, :, where.row, where.column]
    truth = GroundTruth.from_frames([(None, targets)])
    arrays = found.numpy()
    m = len(found)
    records = match(
        *(arrays["boxes"].astype(float), arrays["scores"].astype(float), arrays["labels"]),
        *(np.zeros(m, int), truth.boxes[:, : len(found.fields)], truth.labels, truth.frame),
        *(found.fields, found.classes, np.zeros(m)),
        threshold=-1.0,
    )
    row = {
        "boxes": arrays["boxes"].astype(np.float32),
        "scores": arrays["scores"].astype(np.float32),
        "labels": arrays["labels"].astype(np.int8),
        "frame": np.full(m, number, np.int16),
        "errors": records.errors.astype(np.float32),
        "iou": records.iou.astype(np.float32),
        "l2": records.l2.astype(np.float32),
        "features": features.cpu().numpy().astype(np.float16),
    }
    if m:
        stacked = torch.stack(list(signals.values()), 1).cpu().numpy()
        row["signals"] = stacked.astype(np.float16)
    row["signal names"] = np.array(list(signals))
    return row


def covariance_columns(
    method: str, found: Detections, correlations: bool = False
) -> dict[str, np.ndarray]:
    """Return log variances (m, D + 1) with the logit's last, and the box's correlations."""
    C = found.covariance
    assert C is not None
    variance = C.diagonal(dim1=1, dim2=2)
    if found.score_variance is not None:
        variance = torch.cat([variance, found.score_variance[:, None]], 1)
    columns = {method: variance.clamp(min=1e-30).log().cpu().numpy().astype(np.float16)}
    if correlations:
        sd = C.diagonal(dim1=1, dim2=2).clamp(min=1e-30).sqrt()
        i, j = torch.tril_indices(C.shape[1], C.shape[1], -1)
        R = (C / sd[:, :, None] / sd[:, None, :])[:, i, j]
        columns[f"{method} correlations"] = R.cpu().numpy().astype(np.float16)
    return columns


def collect_ensemble(args: argparse.Namespace) -> None:
    """Write, per box and member, its nearest box of the same class within 2 m: score and fields."""
    members = [centerpoint.load(path).to(args.device) for path in args.members]
    for name in args.sets:
        scenario, seed, _ = SETS[name]
        with np.load(args.out / f"{name}.npz") as file:
            boxes, labels, frame = (file[key] for key in ("boxes", "labels", "frame"))
        count = min(int(frame.max()) + 1, BASELINES.get(name, SETS[name][2]), args.most)
        frames = simulated.frames(scenario, seed=seed, count=count, device=args.device)
        parts = []
        for number in range(count):
            inputs, _ = frames[number]
            own = frame == number
            parts.append(
                np.stack([nearest(boxes[own], labels[own], m.detect(inputs)) for m in members], 1)
            )
        np.savez_compressed(args.out / f"{name}-ensemble.npz", members=np.concatenate(parts))
        print(name, "ensemble", count, flush=True)


def collect_points(args: argparse.Namespace) -> None:
    """Write the signals from points, and their names, of the boxes of each set."""
    config = centerpoint.load(args.detector).config
    for name in args.sets:
        scenario, seed, _ = SETS[name]
        with np.load(args.out / f"{name}.npz") as file:
            boxes, frame = (
                torch.as_tensor(file[key], device=args.device) for key in ("boxes", "frame")
            )
        count = min(int(frame.max()) + 1, args.most)
        frames = simulated.frames(scenario, seed=seed, count=count, device=args.device)
        rows, names = [], []
        for number in range(count):
            maps = point_maps(*concatenate(frames[number][0]), 1, config)
            own = boxes[frame == number]
            found = point_signals(maps, own, torch.zeros_like(own[:, 0]).long(), config)
            names = list(found)
            rows.append(torch.stack(list(found.values()), 1).half().cpu().numpy())
        np.savez(args.out / f"{name}-points.npz", names=names, signals=np.concatenate(rows))
        print(name, "points", count, flush=True)


def nearest(boxes: np.ndarray, labels: np.ndarray, found: Detections) -> np.ndarray:
    """Return score and fields (m, 1 + D) of the nearest box; NaN where there is none."""
    other = found.numpy()
    out = np.full((len(boxes), 1 + boxes.shape[1]), np.nan, np.float32)
    if not len(boxes) or not len(found):
        return out
    distance = np.linalg.norm(boxes[:, None, :2] - other["boxes"][None, :, :2], axis=2)
    distance[labels[:, None] != other["labels"][None]] = np.inf
    best = distance.argmin(1)
    near = distance[np.arange(len(boxes)), best] < 2.0
    out[near, 0] = other["scores"][best[near]]
    out[near, 1:] = other["boxes"][best[near]]
    return out


def save(path: Path, rows: list[dict[str, np.ndarray]]) -> None:
    """Write one array per name; baselines cover the first frames only."""
    names = next(row["signal names"] for row in rows)
    keys = {key for row in rows for key in row if key != "signal names"}
    arrays = {key: np.concatenate([r[key] for r in rows if key in r]) for key in sorted(keys)}
    part = path.with_suffix(".part.npz")  # an interrupted run leaves no half file
    np.savez_compressed(part, **{"signal names": names}, **arrays)
    part.rename(path)


def pack(args: argparse.Namespace) -> None:
    """Write every array of every set to files of at most 15 MiB, in parts."""
    most, number, size = 15 * 2**20, 0, 0
    held: dict[str, np.ndarray] = {}

    def flush() -> None:
        nonlocal held, number, size
        if held:
            np.savez(args.out / f"pack-{number:02d}.npz", **held)
        held, number, size = {}, number + 1, 0

    for path in sorted(args.out.glob("*.npz")):
        if path.name.startswith("pack-"):
            continue
        with np.load(path) as file:
            for key in file.files:
                value = file[key]
                rows = max(1, int(most * 0.9 // max(value.nbytes // max(len(value), 1), 1)))
                for start in range(0, max(len(value), 1), rows):
                    piece = value[start : start + rows]
                    if size + piece.nbytes > most:
                        flush()
                    held[f"{path.stem}|{key}|{start:09d}"] = piece
                    size += piece.nbytes
    flush()


if __name__ == "__main__":
    main()
