"""What CenterPoint's covariances are worth on simulated LiDAR. Results: docs/results/quality.md.

python studies/worth.py STEP --out OUT

Steps:
  fit      fit posteriors on 1, 10 and 100 frames
  predict  covariances per part of the network, on clear and shifted frames;
           an interrupted run continues
  report   print tables of the results
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measures import heading, nats, products, show_coverage, show_nats, show_ranking
from shift import Frame, auroc_of_shift, shift_auroc_over_folds, show, statistics
from student import student_nats

from boxcov import MCGLM, MCI, Detections, ExactGLM, Posterior, fit
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.evaluate.baselines import covariance_features, features
from boxcov.evaluate.matching import match
from boxcov.evaluate.quality import accurate_iou, clipped_mean
from boxcov.evaluate.records import Records
from boxcov.pipeline.calibrate import half_turn_share

FIELDS = ("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")
SHARES = {"1 %": 1, "10 %": 10, "100 %": 100}  # frames behind each posterior
N_TRAIN = 3500  # n_data of the posterior of 100 % of the frames
SHIFTS = ("rain", "fog", "sparse", "unseen")
KNOWN = 40  # training frames that define the Mahalanobis distance of features


def main() -> None:
    steps = {"fit": fit_posteriors, "predict": predict, "report": report}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=steps)
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--clear", type=int, default=120, help="clear frames")
    parser.add_argument(
        "--shifted",
        type=int,
        default=20,
        help="frames per shift",
    )
    parser.add_argument(
        "--samples", type=int, default=24, help="directions of MC-GLM through the backbone"
    )
    parser.add_argument("--prior", type=float, default=100.0, help="prior precision")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    args.out.mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


# predictions


def fit_posteriors(args: argparse.Namespace) -> None:
    detector = centerpoint.load("small").to(args.device)
    for name, count in SHARES.items():
        path = args.out / f"posterior {name}.safetensors"
        if not path.exists():
            frames = simulated.frames("clear", seed=0, count=count, device=args.device)
            n = N_TRAIN * count / SHARES["100 %"]
            fit(detector, frames, depth="backbone", n_data=n, prior_precision=args.prior).save(path)
            print(path, flush=True)


def predict(args: argparse.Namespace) -> None:
    """Write one file per frame: boxes, covariances (the score logit is last), features, objects."""
    detector = centerpoint.load("small").to(args.device)
    whole = Posterior.load(args.out / "posterior 100 %.safetensors", detector)
    models: dict[str, Any] = {"head": ExactGLM(detector, part(whole, "head"), with_logit=True)}
    models["backbone"] = MCGLM(detector, part(whole, "backbone"), args.samples, with_logit=True)
    models["dropout"] = MCI(detector, dropout=0.1, samples=10, depth="backbone", with_logit=True)
    for name in ("1 %", "10 %"):
        models[f"head {name}"] = ExactGLM(
            detector,
            part(Posterior.load(args.out / f"posterior {name}.safetensors", detector), "head"),
        )
    for scenario, number in order(args):
        path = args.out / f"{scenario} {number}.npz"
        if path.exists():
            continue
        seed = 0 if scenario == "train" else 1000
        inputs, targets = simulated.frames(
            "clear" if scenario == "train" else scenario,
            seed=seed,
            count=number + 1,
            device=args.device,
        )[number]
        made = dict(zip(("features", "pooled"), features_at(detector, inputs)))
        made |= {
            name: targets[0][key].cpu().numpy()
            for name, key in (("objects", "boxes"), ("object labels", "labels"))
        }
        found = detector.detect(inputs)
        made |= {name: getattr(found, name).cpu().numpy() for name in ("boxes", "scores", "labels")}
        for name, model in models.items():
            if is_needed(name, scenario, number, args):
                made[name] = with_logit(model(inputs))
        np.savez_compressed(path, **made)
        print(path.name, len(found), flush=True)


def order(args: argparse.Namespace) -> list[tuple[str, int]]:
    first = [("clear", i) for i in range(2 * args.shifted)] + [
        (shift, i) for i in range(args.shifted) for shift in SHIFTS
    ]
    rest = [("clear", i) for i in range(2 * args.shifted, args.clear)]
    return [("train", i) for i in range(KNOWN)] + first + rest


def is_needed(name: str, scenario: str, number: int, args: argparse.Namespace) -> bool:
    """Return whether a model predicts a frame.

    Training frames need only features. Dropout runs on as many clear frames as shifted ones, and
    the posteriors of fewer frames on the same clear frames.
    """
    if scenario == "train":
        return False
    return name in ("head", "backbone") or (
        number < args.shifted and (name == "dropout" or scenario == "clear")
    )


def part(posterior: Posterior, name: str) -> Posterior:
    return posterior.restricted(
        [block for block in posterior.blocks if block.startswith(f"{name}.")]
    )


def features_at(detector: centerpoint.CenterPoint, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the neck's features at each box's cell (m, channels), and their mean (channels,)."""
    with torch.no_grad():
        raw = detector(inputs)
        where = detector.select(raw).where
        maps = raw["features"].cpu()
    at = maps[where.frame.cpu(), :, where.row.cpu(), where.column.cpu()].numpy()
    return at.astype(np.float16), maps.mean((0, 2, 3)).numpy()


def with_logit(found: Detections) -> np.ndarray:
    """Return the joint covariances with the logit (m, D + 1, D + 1), or (m, D, D) without one."""
    C = found.covariance
    if found.score_variance is not None:
        side = found.score_covariance[:, :, None]
        C = torch.cat(
            [torch.cat([C, side], 2), torch.cat([side.mT, found.score_variance[:, None, None]], 2)],
            1,
        )
    return C.cpu().numpy().astype(np.float32)


# results


def report(args: argparse.Namespace) -> None:
    clear = sorted(int(path.stem.split()[1]) for path in args.out.glob("clear *.npz"))
    rows = {part: records_of(args, clear, part) for part in ("head", "backbone")}
    ranking(rows)
    paired = rows["head"].paired
    frame = rows["head"].frame[paired]
    share = half_turn_share(rows["head"])
    print(f"\nheading as a direction; share of boxes off by more than a quarter turn: {share:.3f}")
    show_nats(nats(rows), frame, FIELDS)
    show_coverage(rows["head"])
    axes = {part: one.as_axes() for part, one in rows.items()}
    print("\nheading as an axis")
    show_nats(nats(axes), frame, FIELDS)
    show_coverage(axes["head"])
    print("\nheading as a direction, Student's t")
    show_nats(student_nats(rows), frame, FIELDS)
    show_data_shares(args)
    show_shifts(args, clear)


def records_of(
    args: argparse.Namespace, numbers: list[int], part: str, scenario: str = "clear"
) -> Records:
    """Return the records of some frames, with the covariance of a part."""
    frames = [load_frame(args, scenario, number) for number in numbers]
    number, of_object = (
        np.repeat(np.arange(len(frames)), [len(f[name]) for f in frames])
        for name in ("scores", "objects")
    )
    boxes, scores, labels, objects, kinds = (
        np.concatenate([f[name] for f in frames])
        for name in ("boxes", "scores", "labels", "objects", "object labels")
    )
    C = np.concatenate([f[part] for f in frames]).astype(float)
    D = boxes.shape[1]
    variances = np.trace(C[:, :D, :D], axis1=1, axis2=2)
    names = simulated.CLASSES
    return match(
        boxes,
        scores.astype(float),
        labels,
        number,
        objects,
        kinds,
        of_object,
        FIELDS,
        names,
        variances,
        C[:, :D, :D],
        score_variance=C[:, -1, -1],
    )


def load_frame(args: argparse.Namespace, scenario: str, number: int) -> dict[str, np.ndarray]:
    with np.load(args.out / f"{scenario} {number}.npz") as file:
        return dict(file)


def ranking(rows: dict[str, Records]) -> None:
    one = rows["head"]
    base = features(one)
    continuous = base[:, : -len(one.classes)]
    bases = {
        "score + size": base,
        "richer": np.concatenate([products(continuous), base[:, -len(one.classes) :]], 1),
    }
    more = {part: covariance_features(r) for part, r in rows.items()}
    heading(bases, more)
    selections = {
        "with an object, IoU < 0.4": (one.paired, ~accurate_iou(one.iou)),
        "with an object, IoU < 0.7": (one.paired, one.iou < 0.7),
        "with an object, l2": (one.paired, ~(one.l2 < clipped_mean(one.l2[one.paired]))),
        "all above 0.3, IoU < 0.4": (one.scores > 0.3, ~accurate_iou(one.iou)),
    }
    for what, (mask, bad) in selections.items():
        some = ({n: c[mask] for n, c in columns.items()} for columns in (bases, more))
        show_ranking(what, bad[mask], one.frame[mask], one.scores[mask], *some)


def show_data_shares(args: argparse.Namespace) -> None:
    """Print the head's u under posteriors of fewer frames, relative to u under all frames.

    ``n_data`` of each posterior is proportional to its frames.
    """
    frames = [load_frame(args, "clear", i) for i in range(args.shifted)]
    whole = np.concatenate([np.trace(f["head"][:, :9, :9], axis1=1, axis2=2) for f in frames])
    print("\n| share of the data | median u | median ratio to all data | boxes with larger u |")
    print("| --- | ---: | ---: | ---: |")
    for name in SHARES:
        key = "head" if name == "100 %" else f"head {name}"
        u = np.concatenate([np.trace(f[key][:, :9, :9], axis1=1, axis2=2) for f in frames])
        ratio, larger = np.median(u / whole), (u > whole).mean()
        print(f"| {name} | {np.median(u):.3g} | {ratio:.2f} | {larger:.3f} |", flush=True)


def show_shifts(args: argparse.Namespace, clear: list[int]) -> None:
    """Print the AUROC of recognising shifted frames, by fourfold cross-validation.

    The numbers are fitted on three quarters of the clear frames, and compared on the others.
    Dropout has fewer clear frames.
    """
    known = {number: frame_of(load_frame(args, "clear", number)) for number in clear}
    train = [frame_of(load_frame(args, "train", number)) for number in range(KNOWN)]
    shifted = {
        name: [frame_of(load_frame(args, name, i)) for i in range(args.shifted)] for name in SHIFTS
    }
    values: dict[str, dict[str, list[Any]]] = {}
    for k in range(4):
        usual, rest = (
            [f for i, f in known.items() if (i % 4 == k) == held] for held in (False, True)
        )
        for name, number in statistics(usual, ("head", "backbone", "dropout"), train).items():
            here = rest if "dropout" not in name else [f for f in rest if "dropout" in f.variances]
            for shift, frames in shifted.items():
                values.setdefault(name, {}).setdefault(shift, []).append(
                    (number(here), number(frames))
                )
    show(
        {
            name: {shift: shift_auroc_over_folds(pairs) for shift, pairs in row.items()}
            for name, row in values.items()
        }
    )
    show_unseen_boxes(args, clear)


def show_unseen_boxes(args: argparse.Namespace, clear: list[int]) -> None:
    """Print the AUROC of recognising boxes on objects of unseen shapes."""
    known, unseen = (
        {part: records_of(args, numbers, part, scenario) for part in ("head", "backbone")}
        for scenario, numbers in (("clear", clear), ("unseen", list(range(args.shifted))))
    )
    print("\n| paired boxes, shapes unseen or known | AUROC |\n| --- | ---: |")
    for name, u in BOX_NUMBERS.items():
        a, b = (u(rows)[rows["head"].paired] for rows in (known, unseen))
        print(f"| {name} | {auroc_of_shift(a, b):.2f} |", flush=True)


BOX_NUMBERS: dict[str, Callable[[dict[str, Records]], np.ndarray]] = {
    "1 - score": lambda rows: 1 - rows["head"].scores,
    **{
        f"{part}, trace": lambda rows, part=part: rows[part].uncertainty
        for part in ("head", "backbone")
    },
    **{
        f"{part}, logit": lambda rows, part=part: rows[part].score_variance
        for part in ("head", "backbone")
    },
    **{
        f"{part}, fields": lambda rows, part=part: covariance_features(rows[part])[:, :-1].mean(1)
        for part in ("head", "backbone")
    },
}


def frame_of(made: dict[str, np.ndarray]) -> Frame:
    boxes, scores = (
        made["boxes"].astype(float),
        np.clip(made["scores"].astype(float), 1e-6, 1 - 1e-6),
    )
    known = [
        np.log(scores / (1 - scores))[:, None],
        np.log(np.maximum(boxes[:, 3:6], 0.05)),
        np.log1p(np.hypot(*boxes[:, :2].T))[:, None],
    ]
    C = {part: made[part].astype(float) for part in ("head", "backbone", "dropout") if part in made}
    variances = {part: np.diagonal(c, axis1=1, axis2=2) for part, c in C.items()}
    trace = {part: v[:, :9].sum(1) for part, v in variances.items()}
    return Frame(
        scores,
        np.concatenate(known, 1),
        made["labels"],
        made["features"],
        made.get("pooled"),
        variances,
        trace,
    )


if __name__ == "__main__":
    main()
