"""Does an error model of one LiDAR hold on another? Two real drives, swapped.

python studies/real_error_model.py --nuscenes ROOT --kitti ROOT

The protocol, fixed before held-out frames were read: the shipped detector, which was trained on
simulated frames only, with its shipped posterior. An error model is fitted on the first 28 of the
40 key frames of nuScenes scene-0006, and one on the first 50 of the 77 frames of KITTI drive 0005;
``small`` is the shipped one, of simulated frames. Each is judged on the last 12 frames of nuScenes
and the last 20 of KITTI. Nothing is chosen. Where a drive has fewer boxes with an object than an
error model needs, that row is missing; this rule was added when a first run stopped at KITTI, with
held-out frames predicted but not judged. One street per data set is an illustration only;
the intervals are over its frames, which are alike.
"""

from __future__ import annotations

import argparse
import json
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import boxcov
from boxcov.detections import Detections
from boxcov.detectors import centerpoint
from boxcov.error_model.calibrate import fit_error_model
from boxcov.error_model.labelled_frames import predict_frames
from boxcov.error_model.model import ErrorModel
from boxcov.evaluate.covariance_metrics import calibration_error
from boxcov.evaluate.ground_truth import match_detections
from boxcov.evaluate.intervals import bootstrap
from boxcov.evaluate.quality import auroc
from boxcov.evaluate.records import Records
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.options import DataOptions

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data"
LEVEL, IOU = 0.9, 0.4
SPLITS = {"nuScenes": (slice(0, 28), slice(28, 40)), "KITTI": (slice(0, 50), slice(57, 77))}
Set = tuple[Detections, Records]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nuscenes", required=True, help="root of nuScenes")
    parser.add_argument("--kitti", required=True, help="root of KITTI")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    drives = {
        "nuScenes": load_frames(DataOptions(f"nuscenes:{args.nuscenes}", "train", sweeps=3)),
        "KITTI": load_frames(DataOptions(f"kitti:{args.kitti}", "training")),
    }
    detector = centerpoint.load("small")
    posterior = boxcov.Posterior.load("small", detector)
    assert posterior.error_model is not None
    model = boxcov.ExactGLM(detector, posterior.with_error_model(None))
    sets = {name: [predict(model, frames[part]) for part in SPLITS[name]]
            for name, frames in drives.items()}  # fmt: skip
    models = {"simulated": posterior.error_model}
    for name, (own, _) in sets.items():
        try:
            models[name] = fit_error_model(*own, estimator="study", fingerprint="")
        except boxcov.BoxcovError as error:  # too few boxes with an object
            print(name, error, flush=True)
    rows = [
        judge(fitted, name, models[fitted], *held_out)
        for name, (_, held_out) in sets.items()
        for fitted in models
    ]
    for row in rows:
        print(row)
    write(rows, sets)


def predict(model: boxcov.ExactGLM, frames: Any) -> Set:
    """Return the boxes of frames, uncalibrated, and their records."""
    found, truth = predict_frames(model, frames)
    print(len(frames), "frames,", len(found), "boxes", flush=True)
    return found, match_detections(found, truth, threshold=-1.0)


def judge(fitted: str, drive: str, model: ErrorModel, found: Detections, records: Records) -> Any:
    """Return a row: how an error model does on the frames of a drive."""
    out = model.apply(found)
    assert out.no_object is not None
    risk, bad = out.risk.numpy(), records.iou < IOU  # without an object the IoU is 0
    paired, frame = records.paired, records.frame
    errors = np.abs(records.as_axes().errors)[paired]
    inside = np.where(np.isnan(errors), np.nan, errors <= out.region(LEVEL).numpy()[paired])
    coverage = bootstrap(lambda rows: 100 * float(np.nanmean(inside[rows])), frame[paired])

    def gain(rows: Any) -> float:
        return auroc(bad[rows], risk[rows]) - auroc(bad[rows], 1 - records.scores[rows])

    more = bootstrap(gain, frame)
    return [
        *(drive, fitted, len(found), int(paired.sum())),
        f"{100 * float(np.nanmean(inside)):.0f} [{coverage.low:.0f}, {coverage.high:.0f}]",
        *(auroc(bad, 1 - records.scores), auroc(bad, risk)),
        f"[{more.low:.3f}, {more.high:.3f}]",
        *(100 * float(bad.mean()), 100 * float(risk.mean()), calibration_error(risk, bad)),
    ]


def write(rows: list[Any], sets: dict[str, list[Set]]) -> None:
    counts = {name: [int(records.paired.sum()) for _, records in parts]
              for name, parts in sets.items()}  # fmt: skip
    fitted = " and ".join(f"{fit} of {name}" for name, (fit, _) in counts.items())
    table = {
        "title": "Two real LiDARs swapped: the error model of one on the other",
        "command": "python studies/real_error_model.py --nuscenes ROOT --kitti ROOT",
        "date": date.today().isoformat(),
        "machine": "one CPU thread",
        "columns": [
            *("frames of", "model of", "boxes", "paired", "in regions"),
            *("1 - score", "risk", "gain, 95 %", "bad", "mean risk", "ECE"),
        ],
        "digits": [None, None, None, None, None, 3, 3, None, 1, 1, 3],
        "rows": rows,
        "notes": [
            "Paired: boxes with an object; in regions: how many of their errors 90 % regions hold, "
            "in percent. 1 - score and risk: AUROC of bad boxes.",
            "The detector was trained on simulated frames alone. One street each, 12 and 20 "
            "held-out frames; 95 % intervals over frames. Bad: no object, or IoU < 0.4, in "
            f"percent. Boxes with an object to fit on: {fitted}.",
        ],
    }
    (RESULTS / "error-model-real.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
