"""The error model of YOLOX, calibrated on clean images, on corrupted ones.

python studies/coco_corrupted.py --root ROOT --weights WEIGHTS --out OUT [--device cuda]

The protocol, fixed before corrupted images were read: error models are fitted as in
coco_error_model.py, on the clean images of four folds of val2017, and judged on the fifth fold,
clean and with each corruption at strengths 3 and 5. Nothing is fitted or chosen on a corrupted
image. Regions of 90 %, AUROC of IoU < 0.7 among boxes with an object, and of the risk of all boxes.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from coco_error_model import FOLDS, N_TRAIN, ROWS
from corruptions import KINDS, Corruption

from boxcov import ExactGLM, Posterior, fit
from boxcov.data import coco
from boxcov.detections import Detections
from boxcov.detectors import yolox
from boxcov.error_model.calibrate import fit_error_model
from boxcov.error_model.labelled_frames import predict_frames
from boxcov.error_model.network import TrainingOptions
from boxcov.evaluate.covariance_metrics import calibration_error
from boxcov.evaluate.ground_truth import match_detections
from boxcov.evaluate.intervals import bootstrap
from boxcov.evaluate.quality import auroc
from boxcov.evaluate.records import Records

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data"
CONDITIONS = (("clean", 0), *((kind, strength) for strength in (3, 5) for kind in KINDS))
OURS = "ours: + covariances"
LEVEL, THRESHOLD, SAMPLES = 0.9, 0.1, 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="COCO: annotations, images")
    parser.add_argument("--weights", type=Path, required=True, help="YOLOX checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of the posterior")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sets = predictions(args)
    rows = report(sets)
    write(rows, sets["clean", 0][1])
    for row in rows:
        print(row)


def predictions(args: argparse.Namespace) -> dict[tuple[str, int], tuple[Detections, Records]]:
    """Return boxes and records of val2017 under every condition."""
    detector = yolox.load(args.weights, threshold=THRESHOLD).to(args.device)
    size, classes = detector.config.size, detector.classes
    path = args.out / "posterior.safetensors"
    if not path.exists():
        train = coco.frames(args.root, "train2017", size, classes)
        fit(detector, train, "backbone", N_TRAIN).save(path)
    model = ExactGLM(detector, Posterior.load(path, detector), SAMPLES)
    images, found = coco.frames(args.root, "val2017", size, classes), {}
    for kind, strength in CONDITIONS:
        changed = images.changed(Corruption(kind, strength)) if strength else images  # type: ignore[arg-type]
        boxes, truth = predict_frames(model, changed)
        boxes = boxes.to("cpu")[boxes.scores.cpu() > THRESHOLD]
        found[kind, strength] = boxes, match_detections(boxes, truth, threshold=-1.0)
        print(kind, strength, len(boxes), flush=True)
    return found


def report(sets: dict[tuple[str, int], tuple[Detections, Records]]) -> list[list[Any]]:
    """Return a row per condition, each image judged by models of other, clean images."""
    clean, records = sets["clean", 0]
    images = np.unique(np.concatenate([r.frame for _, r in sets.values()]))
    fold = dict(zip(images, np.random.default_rng(0).permutation(len(images)) % FOLDS))
    of = {key: np.array([fold[f] for f in r.frame]) for key, (_, r) in sets.items()}
    judged: dict[tuple[Any, str], dict[str, np.ndarray]] = {}
    for name in ("score + size", OURS):
        for k in range(FOLDS):
            kept = of["clean", 0] != k
            model = fit_error_model(
                *(clean[torch.as_tensor(kept)], records[kept]),
                estimator="study",
                fingerprint="",
                options=TrainingOptions(exclude=ROWS[name]),
            )
            for key, (boxes, _) in sets.items():
                mine = of[key] == k
                out = model.apply(boxes[torch.as_tensor(mine)])
                values = {"misplaced": out.misplaced, "risk": out.risk, "width": out.region(LEVEL)}
                for what, value in values.items():
                    store = judged.setdefault((key, name), {})
                    store.setdefault(what, np.zeros((len(mine), *value.shape[1:])))
                    store[what][mine] = value.numpy()
    return [condition_row(key, one[1], judged) for key, one in sets.items()]


def condition_row(key: tuple[str, int], records: Records, judged: Any) -> list[Any]:
    ours, size = judged[key, OURS], judged[key, "score + size"]
    paired, bad = records.paired, records.iou < 0.7
    errors = np.abs(records.errors)[paired]
    inside = (errors <= ours["width"][paired])[~np.isnan(errors)]
    frame = records.frame[paired]

    def gain(rows: Any) -> float:
        own, other = (d["misplaced"][paired][rows] for d in (ours, size))
        return auroc(bad[paired][rows], own) - auroc(bad[paired][rows], other)

    interval = bootstrap(gain, frame)
    ranking = [auroc(bad[paired], 1 - records.scores[paired])]
    ranking += [auroc(bad[paired], d["misplaced"][paired]) for d in (size, ours)]
    name = key[0] if not key[1] else f"{key[0]}, strength {key[1]}"
    risk = [auroc(bad, 1 - records.scores), auroc(bad, ours["risk"])]
    ece = calibration_error(ours["risk"], bad)
    gain_text = f"[{interval.low:.3f}, {interval.high:.3f}]"
    return [name, int(paired.sum()), 100 * float(inside.mean()), *ranking, gain_text, *risk, ece]


def write(rows: list[list[Any]], clean: Records) -> None:
    table = {
        "title": "YOLOX-Nano: the error model of clean images on corrupted ones, "
        f"{len(np.unique(clean.frame))} images of val2017 each",
        "command": "python studies/coco_corrupted.py --root COCO --weights WEIGHTS --out OUT",
        "date": date.today().isoformat(),
        "machine": "predicted on one NVIDIA H200",
        "columns": [
            *("images", "boxes", "in 90 % regions", "1 - score", "score + size", "ours"),
            *("gain, 95 %", "risk: 1 - score", "risk: ours", "ECE"),
        ],
        "digits": [None, None, 1, 3, 3, 3, None, 3, 3, 3],
        "rows": rows,
        "notes": [
            "Boxes with an object. AUROC of IoU < 0.7 by misplaced; gain: ours over score + size, "
            "over images. Risk: IoU < 0.7 or no object, among all boxes; ECE of the risk."
        ],
    }
    (RESULTS / "error-model-corrupted.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
