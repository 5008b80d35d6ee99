"""What YOLOX's covariances add to score and size, and their coverage, on COCO.

Results: docs/results/quality.md. After ``coco.py fit``:

python studies/coco.py predict --root ROOT --weights WEIGHTS --out OUT \\
    --threshold 0.1 --samples 48 --methods head backbone
python studies/coco_worth.py --root ROOT --weights WEIGHTS --out OUT --threshold 0.1
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from coco import detector_of, images_of
from coco_report import records_of
from measures import heading, nats, products, show_coverage, show_nats, show_ranking

from boxcov import Detections
from boxcov.evaluate.quality import accurate_iou, clipped_mean
from boxcov.evaluate.records import Records

PARTS = ("head", "backbone")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="COCO: annotations, val2017")
    parser.add_argument("--weights", type=Path, required=True, help="YOLOX checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of the predictions")
    parser.add_argument("--threshold", type=float, default=0.1, help="score threshold")
    args = parser.parse_args()
    images = images_of(args, detector_of(args), "val2017")
    found = {name: Detections.load(args.out / f"{name}.safetensors") for name in PARTS}
    made = records_of(found, images, args.threshold)
    rows = {name: with_logit(made, name) for name in PARTS}
    ranking(rows)
    merged = {name: merge_rare_classes(one) for name, one in rows.items()}
    head = merged["head"]
    show_nats(nats(merged), head.frame[head.paired], head.fields)
    show_coverage(head)
    print("\nbackbone")
    show_coverage(merged["backbone"], ("product",))


def with_logit(made: dict[str, Records], name: str) -> Records:
    """Return the records of a part, with the variance of the score logit."""
    return replace(made[name], score_variance=made[f"{name}, logit"].uncertainty)


def merge_rare_classes(rows: Records, least: int = 20) -> Records:
    """Return the records with one class "other" for all with less than ``least`` paired boxes.

    80 classes are too many for a thousand boxes.
    """
    count = np.bincount(rows.labels[rows.paired], minlength=len(rows.classes))
    frequent = np.flatnonzero(count >= least)
    number = np.full(len(rows.classes), len(frequent))
    number[frequent] = np.arange(len(frequent))
    names = (*(rows.classes[i] for i in frequent), "other")
    return replace(rows, classes=names, labels=number[rows.labels])


def columns(rows: Records) -> tuple[np.ndarray, np.ndarray]:
    """Return score logit, log width and log height (n, 3), and the log variances (n, 5)."""
    p = np.clip(rows.scores.astype(float), 1e-6, 1 - 1e-6)
    sides = np.log(np.maximum(rows.boxes[:, 2:] - rows.boxes[:, :2], 1.0))
    variances = np.diagonal(rows.covariance, axis1=1, axis2=2)
    known = np.concatenate([np.log(p / (1 - p))[:, None], sides], 1)
    return known, np.log(
        np.maximum(np.concatenate([variances, rows.score_variance[:, None]], 1), 1e-30)
    )


def ranking(rows: dict[str, Records]) -> None:
    one = rows["head"]
    known, _ = columns(one)
    bases = {"score + size": known, "with squares and products": products(known)}
    more = {name: columns(r)[1] for name, r in rows.items()}
    heading(bases, more)
    for least in (0.1, 0.3):
        above = one.scores > least
        paired = above & one.paired
        selections = {
            f"above {least}, IoU < 0.4": (above, ~accurate_iou(one.iou)),
            f"above {least}, with an object, IoU < 0.7": (paired, one.iou < 0.7),
            f"above {least}, with an object, l2": (
                paired,
                ~(one.l2 < clipped_mean(one.l2[paired])),
            ),
        }
        for what, (mask, bad) in selections.items():
            some = ({n: c[mask] for n, c in columns.items()} for columns in (bases, more))
            show_ranking(what, bad[mask], one.frame[mask], one.scores[mask], *some)


if __name__ == "__main__":
    main()
