"""YOLOX on COCO: what the covariances of its boxes are worth. See docs/results/quality.md for the commands and what came out.

python studies/coco.py fit     --root ROOT --weights WEIGHTS --out OUT    # the posterior, from the split train2017
python studies/coco.py predict --root ROOT --weights WEIGHTS --out OUT    # covariances by part of the network, and MC dropout, on val2017
python studies/coco.py corrupt --root ROOT --weights WEIGHTS --out OUT    # the same on blurred, noisy, foggy and dark images

coco_report.py makes tables and pictures of what these steps write.
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

from boxcov import MCGLM, MCI, ExactGLM, NMSSpread, Posterior, fit
from boxcov.data import coco
from boxcov.data.corruptions import KINDS, Corruption
from boxcov.detections import concatenate
from boxcov.detectors import yolox
from boxcov.predict.predictor import Predictor

N_TRAIN = 118_287  # images that YOLOX was trained on
PARTS = ("head", "neck", "backbone")
LOGIT = 4  # its place among the numbers of a box


def main() -> None:
    steps = {"fit": fit_posterior, "predict": predict, "corrupt": corrupt}
    run(steps, __doc__)


def run(steps: Mapping[str, Callable[[argparse.Namespace], None]], about: str | None) -> None:
    """The step that the command line names."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=steps)
    parser.add_argument(
        "--root", type=Path, required=True, help="COCO: annotations, train2017, val2017"
    )
    parser.add_argument("--weights", type=Path, required=True, help="YOLOX checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is written")
    parser.add_argument("--samples", type=int, default=32, help="of MC-GLM, for neck and backbone")
    parser.add_argument("--corrupted", type=int, default=40, help="images of each corruption")
    parser.add_argument("--methods", nargs="+", help="to predict with; all unless given")
    parser.add_argument("--threshold", type=float, default=0.3, help="of the score")
    parser.add_argument("--prior", type=float, default=1.0, help="prior precision")
    parser.add_argument(
        "--photos",
        action="store_true",
        help="draw boxes on the photographs, which have licences of their own",
    )
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    steps[given.step](given)


def detector_of(given: argparse.Namespace) -> yolox.YOLOX:
    return yolox.load(given.weights, threshold=given.threshold, logit=True)


def images_of(given: argparse.Namespace, detector: yolox.YOLOX, split: str) -> coco.Coco:
    return coco.frames(given.root, split, detector.config.size, detector.classes)


def fit_posterior(given: argparse.Namespace) -> None:
    detector = detector_of(given)
    images = images_of(given, detector, "train2017")
    began = time.perf_counter()
    posterior = fit(
        detector,
        images,
        "backbone",
        N_TRAIN,
        given.prior,
        progress=lambda done, total: print(done, total, flush=True),
    )
    print(
        f"{posterior.frames} images, {time.perf_counter() - began:.0f} s, mean loss {posterior.loss:.2f}"
    )
    posterior.save(given.out / "posterior.safetensors")


def models_of(
    given: argparse.Namespace, detector: yolox.YOLOX, samples: int
) -> dict[str, Predictor]:
    """One for each part of the network alone: their covariances add up to that of the whole."""
    posterior = Posterior.load(given.out / "posterior.safetensors", detector).with_prior(
        given.prior
    )
    names = {"head": [], "neck": [], "backbone": []}
    for name in posterior.blocks:
        part = (
            "head"
            if name.startswith("head.")
            else "backbone"
            if name.startswith("backbone.backbone.")
            else "neck"
        )
        names[part].append(name)
    head, neck, backbone = (posterior.restricted(names[part]) for part in PARTS)
    return {
        "head": ExactGLM(detector, head),
        "neck": MCGLM(detector, neck, samples),
        "backbone": MCGLM(detector, backbone, samples),
        "dropout": MCI(detector, dropout=0.1, samples=10, depth="backbone"),
        "head dropout": MCI(detector, dropout=0.1, samples=10),
        "NMS spread": NMSSpread(detector),
    }


def predict(given: argparse.Namespace) -> None:
    detector = detector_of(given)
    images = images_of(given, detector, "val2017")
    for name, model in models_of(given, detector, given.samples).items():
        if name not in (given.methods or [name]):
            continue
        found, spent = [], []
        for number, (inputs, _) in enumerate(images):
            began = time.process_time()
            boxes = model(inputs)
            spent.append(time.process_time() - began)
            found.append(replace(boxes, frame=boxes.frame + number))
            print(name, number, len(boxes), f"{spent[-1]:.2f}", flush=True)
        concatenate(
            [replace(f, meta={**f.meta, "seconds": float(np.median(spent))}) for f in found]
        ).save(given.out / f"{name}.safetensors")


def corrupt(given: argparse.Namespace) -> None:
    """For each image and corruption the mean over its boxes of score, u and logit variance; a line of JSON each, so that it can go on."""
    detector = detector_of(given)
    images = images_of(given, detector, "val2017")[: given.corrupted]
    models = models_of(given, detector, 8)
    path = given.out / "corrupted.jsonl"
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
        changed = images if not strength else images.changed(Corruption(kind, strength))  # type: ignore[arg-type]
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
    """The trace of the covariance of x1 y1 x2 y2 with each number divided by the width or height of its box."""
    sides = np.maximum(np.concatenate([boxes[:, 2:4] - boxes[:, :2]] * 2, 1), 1.0)
    return (np.diagonal(covariance, axis1=1, axis2=2)[:, :4] / sides**2).sum(1)


if __name__ == "__main__":
    main()
