"""YOLOX on COCO: compute the covariances of its boxes. Results: docs/results/quality.md.

python studies/coco.py STEP --root ROOT --weights WEIGHTS --out OUT

Steps:
  fit      fit the posterior on train2017
  predict  covariances per part of the network, MC dropout and NMS spread on val2017
  corrupt  the same on blurred, noisy, foggy and dark images

coco_report.py writes tables and pictures of the results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corruptions import KINDS, Corruption

from boxcov import MCGLM, MCI, ExactGLM, NMSSpread, Posterior, fit
from boxcov.concatenation import concatenate
from boxcov.data import coco
from boxcov.detectors import yolox
from boxcov.predict.predictor import Predictor

N_TRAIN = 118_287  # images that YOLOX was trained on
PARTS = ("head", "neck", "backbone")
LOGIT = 4  # index of the score logit in the joint covariance


def main() -> None:
    steps = {"fit": fit_posterior, "predict": predict, "corrupt": corrupt}
    run(steps, __doc__)


def run(steps: Mapping[str, Callable[[argparse.Namespace], None]], about: str | None) -> None:
    """Run the step that the command line names."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=steps)
    parser.add_argument(
        "--root", type=Path, required=True, help="COCO: annotations, train2017, val2017"
    )
    parser.add_argument("--weights", type=Path, required=True, help="YOLOX checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument(
        "--samples", type=int, default=32, help="samples of MC-GLM, for neck and backbone"
    )
    parser.add_argument("--corrupted", type=int, default=40, help="images per corruption")
    parser.add_argument("--methods", nargs="+", help="methods to predict with (default: all)")
    parser.add_argument("--threshold", type=float, default=0.3, help="score threshold")
    parser.add_argument("--prior", type=float, default=1.0, help="prior precision")
    parser.add_argument(
        "--photos",
        action="store_true",
        help="draw boxes on the photographs, which have their own licences",
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


def detector_of(args: argparse.Namespace) -> yolox.YOLOX:
    return yolox.load(args.weights, threshold=args.threshold, logit=True)


def images_of(args: argparse.Namespace, detector: yolox.YOLOX, split: str) -> coco.Coco:
    return coco.frames(args.root, split, detector.config.size, detector.classes)


def fit_posterior(args: argparse.Namespace) -> None:
    detector = detector_of(args)
    images = images_of(args, detector, "train2017")
    began = time.perf_counter()
    posterior = fit(
        detector,
        images,
        "backbone",
        N_TRAIN,
        args.prior,
        progress=lambda done, total: print(done, total, flush=True),
    )
    print(
        f"{posterior.frames} images, {time.perf_counter() - began:.0f} s, "
        f"mean loss {posterior.loss:.2f}"
    )
    posterior.save(args.out / "posterior.safetensors")


def models_of(
    args: argparse.Namespace, detector: yolox.YOLOX, samples: int
) -> dict[str, Predictor]:
    """Return one predictor per part of the network, and the baselines.

    The covariances of the parts add up to the covariance of the whole network.
    """
    posterior = Posterior.load(args.out / "posterior.safetensors", detector).with_prior(args.prior)
    names: dict[str, list[str]] = {part: [] for part in PARTS}
    for name in posterior.blocks:
        names[part_of(name)].append(name)
    head, neck, backbone = (posterior.restricted(names[part]) for part in PARTS)
    return {
        "head": ExactGLM(detector, head),
        "neck": MCGLM(detector, neck, samples),
        "backbone": MCGLM(detector, backbone, samples),
        "dropout": MCI(detector, dropout=0.1, samples=10, depth="backbone"),
        "head dropout": MCI(detector, dropout=0.1, samples=10),
        "NMS spread": NMSSpread(detector),
    }


def part_of(layer: str) -> str:
    """Return the part of YOLOX that a layer belongs to; its neck is named ``backbone.*``."""
    if layer.startswith("head."):
        return "head"
    return "backbone" if layer.startswith("backbone.backbone.") else "neck"


def predict(args: argparse.Namespace) -> None:
    detector = detector_of(args)
    images = images_of(args, detector, "val2017")
    for name, model in models_of(args, detector, args.samples).items():
        if name not in (args.methods or [name]):
            continue
        detections, seconds = [], []
        for number, (inputs, _) in enumerate(images):
            began = time.process_time()
            boxes = model(inputs)
            seconds.append(time.process_time() - began)
            detections.append(replace(boxes, frame=boxes.frame + number))
            print(name, number, len(boxes), f"{seconds[-1]:.2f}", flush=True)
        median = float(np.median(seconds))
        concatenate([replace(d, meta={**d.meta, "seconds": median}) for d in detections]).save(
            args.out / f"{name}.safetensors"
        )


def corrupt(args: argparse.Namespace) -> None:
    """Write the mean score, u and logit variance of the boxes, per image and corruption.

    Each result is one line of JSON. An interrupted run continues after the last line.
    """
    detector = detector_of(args)
    images = images_of(args, detector, "val2017")[: args.corrupted]
    models = models_of(args, detector, 8)
    path = args.out / "corrupted.jsonl"
    done = (
        {tuple(json.loads(line)["what"]) for line in path.read_text().splitlines()}
        if path.exists()
        else set()
    )
    conditions = [
        ("clean", 0),
        *((kind, strength) for strength in (5, 3, 1, 4, 2) for kind in KINDS),
    ]
    for kind, strength in conditions:
        changed = images.changed(Corruption(kind, strength)) if strength else images  # type: ignore[arg-type]
        for number in range(len(images)):
            if (kind, strength, number) in done:
                continue
            inputs = changed[number][0]
            line: dict[str, Any] = {"what": [kind, strength, number]}
            for part in ("head", "backbone", "head dropout"):
                found = models[part](inputs)
                if part == "head":
                    line |= {"boxes": len(found), "score": mean(found.scores)}
                line[f"u {part}"] = mean(
                    relative_trace(found.boxes.numpy(), found.covariance.numpy())
                )
                line[f"logit {part}"] = mean(found.covariance[:, LOGIT, LOGIT])
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def mean(values: Any) -> float | None:
    return float(values.mean()) if len(values) else None


def relative_trace(boxes: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Return the trace (m,) of the covariance of x1, y1, x2, y2 in units of the box's sides."""
    sides = np.maximum(np.concatenate([boxes[:, 2:4] - boxes[:, :2]] * 2, 1), 1.0)
    return (np.diagonal(covariance, axis1=1, axis2=2)[:, :4] / sides**2).sum(1)


if __name__ == "__main__":
    main()
