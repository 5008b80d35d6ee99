"""The error model of YOLOX on COCO, beside score + size and the free signals.

python studies/coco_error_model.py --root ROOT --weights WEIGHTS --out OUT

The posterior is fitted on train2017. The error models are fitted and judged on val2017 by five
folds over images: each image is judged by a model of the other folds. Three repetitions with other
folds are averaged, because there are few images. The decay of the linear map was chosen on
train2017: fitted on 64 images, judged on the other 142, six times. With --clip the boxes are
clipped to the image, as many detectors do, and the report is about the covariances of clipped
boxes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from boxcov import ExactGLM, Posterior, fit
from boxcov.box_layout import log_variances
from boxcov.data import coco
from boxcov.detections import PART_BELOW, Detections
from boxcov.detectors import yolox
from boxcov.error_model.calibrate import fit_error_model
from boxcov.error_model.labelled_frames import predict_frames
from boxcov.error_model.network import TrainingOptions
from boxcov.evaluate.covariance_metrics import LEVELS, covariance_metrics, region_coverage
from boxcov.evaluate.ground_truth import match_detections
from boxcov.evaluate.intervals import bootstrap
from boxcov.evaluate.quality import auroc
from boxcov.evaluate.records import Records

N_TRAIN = 118_287  # images that YOLOX was trained on
FOLDS = 5
NEIGHBOURS = ("nearest", "boxes in frame", "scores nearby")
ROWS = {  # name: prefixes of the inputs that are left out
    "score + size": ("signal", "variance", *NEIGHBOURS),
    "score + size + signals": ("variance", "signal variance"),
    "ours: + covariances": (),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="COCO: annotations, images")
    parser.add_argument("--weights", type=Path, required=True, help="YOLOX checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--samples", type=int, default=32, help="directions below the head")
    parser.add_argument("--threshold", type=float, default=0.1, help="score threshold")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clip", action="store_true", help="clip the boxes to the image")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found, records = predictions(args)
    if args.clip:
        report = covariances_of_clipped(found, records)
    else:
        rows = {name: held_out(found, records, left, args.repeats) for name, left in ROWS.items()}
        report = compare(records, rows)
    name = "coco-clipped.json" if args.clip else "coco-error-model.json"
    (args.out / name).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def predictions(args: argparse.Namespace) -> tuple[Detections, Records]:
    """Return the boxes of val2017 with signals and covariances, and their records."""
    detector = yolox.load(args.weights, threshold=args.threshold)
    images = {
        split: coco.frames(args.root, split, detector.config.size, detector.classes)
        for split in ("train2017", "val2017")
    }
    path = args.out / "posterior.safetensors"
    if not path.exists():
        fit(detector, images["train2017"], "backbone", N_TRAIN).save(path)
    model = ExactGLM(detector, Posterior.load(path, detector), args.samples)
    found, truth = predict_frames(model, images["val2017"])
    if args.clip:
        found = clip_boxes(found, images["val2017"])
    found = found[found.scores > args.threshold]
    return found, match_detections(found, truth, threshold=-1.0)


def clip_boxes(found: Detections, images: coco.Coco) -> Detections:
    """Return what a detector that clips its boxes to the image would give."""
    sizes = [(p.width, p.height, p.width, p.height) for p in images.annotations.pictures]
    scales = torch.tensor([images.scale(item) for item in range(len(images))])
    high = (torch.tensor(sizes) * scales[:, None])[found.frame].to(found.boxes)
    boxes = found.boxes.clamp(min=0).minimum(high)
    fixed = boxes != found.boxes
    assert found.covariance is not None
    assert found.signals is not None
    covariance = found.covariance.masked_fill(fixed[:, :, None] | fixed[:, None, :], 0.0)
    clipped = replace(found, boxes=boxes, covariance=covariance)
    names = found.meta["signals"]
    columns = [names.index(f"{PART_BELOW} {name}") for name in found.fields]
    signals = found.signals.clone()
    part = signals[:, columns].exp()
    signals[:, columns] = log_variances(found.fields, part, clipped.clipped)
    return replace(clipped, signals=signals)


def covariances_of_clipped(found: Detections, records: Records) -> dict[str, Any]:
    """Return metrics of the epistemic and of the predictive covariance, by models of other images.

    Also of the epistemic one if the sides at the border were taken as known exactly.
    """
    paired = records.paired
    predictive = np.zeros(records.covariance.shape)  # type: ignore[union-attr]
    widths = np.zeros((len(LEVELS), *records.boxes.shape))
    for mine, out in calibrated_folds(found, records, (), 0):
        predictive[mine] = out.predictive.numpy()  # type: ignore[union-attr]
        widths[:, mine] = torch.stack([out.region(level) for level in LEVELS]).numpy()
    rows = {
        "covariance, clipped sides as if exact": (
            records.boxes - records.truth,
            records.covariance,
        ),
        "covariance": (records.errors_under(records.covariance), records.covariance),
        "predictive": (records.errors_under(predictive), predictive),
    }
    report: dict[str, Any] = {
        name: covariance_metrics(errors[paired], covariance[paired])
        for name, (errors, covariance) in rows.items()
    }
    for name, side in (("clipped", records.clipped), ("other", ~records.clipped)):
        errors = np.where(side, records.errors, np.nan)[paired]
        report[f"regions of {name} sides"] = {
            "errors": int((~np.isnan(errors)).sum()),
            **{str(level): region_coverage(errors, w[paired]) for level, w in zip(LEVELS, widths)},
        }
    clipped = records.clipped[paired]
    report["pairs"] = {"boxes": int(paired.sum()), "clipped": int(clipped.any(1).sum())}
    return report


def held_out(
    found: Detections, records: Records, exclude: tuple[str, ...], repeats: int
) -> dict[str, np.ndarray]:
    """Return misplaced and the expected distance of each box by models of other images."""
    sums: dict[str, np.ndarray] = {}
    for repeat in range(repeats):
        for mine, out in calibrated_folds(found, records, exclude, repeat):
            assert out.scale is not None
            for name, value in (
                ("misplaced", out.misplaced),
                ("distance", out.scale.square().sum(1).sqrt()),
                ("risk", out.risk),
            ):
                sums.setdefault(name, np.zeros(len(mine)))[mine] += value.numpy() / repeats
    return sums


def calibrated_folds(
    found: Detections, records: Records, exclude: tuple[str, ...], repeat: int
) -> Iterator[tuple[np.ndarray, Detections]]:
    """Yield the rows (n,) of each fold, and its boxes with the error model of the other folds."""
    numbers = np.unique(records.frame, return_inverse=True)[1]
    order = np.random.default_rng(repeat).permutation(numbers.max() + 1)
    fold = order[numbers] % FOLDS
    for k in range(FOLDS):
        mine = fold == k
        train = found[torch.as_tensor(~mine)]
        # frames in the new order, so that the inner folds differ between the repeats
        train = replace(train, frame=torch.as_tensor(order[numbers[~mine]]))
        rows = torch.argsort(train.frame, stable=True)
        model = fit_error_model(
            *(train[rows], records[~mine][rows.numpy()]),
            estimator="study",
            fingerprint="",
            options=TrainingOptions(exclude=exclude),
        )
        yield mine, model.apply(found[torch.as_tensor(mine)])


def compare(records: Records, results: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    paired = records.paired
    large = records.l2 > records.l2[paired].mean()
    everything = np.ones(len(paired), bool)
    questions = {
        "IoU < 0.7": (paired, records.iou < 0.7, "misplaced"),
        "l2 above mean": (paired, large, "distance"),
        "risk": (everything, records.iou < 0.7, "risk"),
    }
    report: dict[str, Any] = {
        "images": len(np.unique(records.frame)),
        "boxes": len(records),
        "paired": int(paired.sum()),
    }
    ours = results["ours: + covariances"]
    for question, (mask, bad, key) in questions.items():
        rows: dict[str, Any] = {"1 - score": auroc(bad[mask], 1 - records.scores[mask])}
        for name, values in results.items():
            rows[name] = auroc(bad[mask], values[key][mask])

            rows[f"ours against {name}"] = gain_interval(
                *(v[mask] for v in (bad, ours[key], values[key], records.frame))
            )
        report[question] = rows
    return report


def gain_interval(
    bad: np.ndarray, ours: np.ndarray, other: np.ndarray, frame: np.ndarray
) -> list[float]:
    """Return the 95 % interval over frames of the difference of two AUROCs."""

    def gain(rows: Any) -> float:
        return auroc(bad[rows], ours[rows]) - auroc(bad[rows], other[rows])

    interval = bootstrap(gain, frame)
    return [float(interval.low), float(interval.high)]


if __name__ == "__main__":
    main()
