"""Tracking on two real drives, with each box's own noise R and with a constant one.

python studies/tracking_real.py --nuscenes ROOT --kitti ROOT --out OUT

Boxes and ego poses are kept in OUT, so that a stopped run resumes.

The protocol, fixed before a track of these drives was computed:

- The shipped detector, which was trained on simulated frames only, with its shipped posterior, on
  nuScenes scene-0006 (40 key frames at 2 Hz, 3 sweeps) and KITTI drive 0005 (77 frames at 5 Hz, one
  sweep, the camera's view). Classes of KITTI in terms of nuScenes: Van is a car, Cyclist a bicycle.
  KITTI has no files of the inertial system here: its ego poses come from registering each cloud
  with the one before (registration.py). Objects need a LiDAR point and lie in the detector's range.
  Velocities that labels lack are those of the labels' places in the frames before and after.
- Error models: the shipped one, of simulated frames; and one of the first 28 frames of nuScenes.
  Constant R is the mean square error of the boxes of three simulated drives (set ``tune`` of
  tracking_boxes.py), and of the same 28 frames. P(object) and everything else are equal: a row
  ``constant`` differs from the row ``boxcov`` after it in R and in gates only.
- Nothing is tuned or chosen: the default settings of ``Tracker``, tracks with P(object) of at least
  0.5. A track belongs to the object of its class within 2 m.
- Models of simulated frames are judged on both whole drives, all on the last 12 of nuScenes. KITTI
  has too few boxes with an object to fit a model on (real_error_model.py).
- ANEES, RMSE and NLL are over the objects that all methods on the same frames follow. Intervals
  resample objects, those of MOTA, IDF1 and switches objects and tracks: one street each is an
  illustration only, and how streets differ is not in the intervals.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from registration import ego_poses
from torch import Tensor
from tracking_boxes import TUNE, Drive, collect, load, save
from tracking_metrics import accumulate, cell, count_cell, idf1, mota, pairs, run, unit_counts
from tracking_noise import Noise, collect_pairs, with_variances

from boxcov import ExactGLM, Posterior
from boxcov.concatenation import concatenate
from boxcov.data import kitti, nuscenes
from boxcov.data.poses import Pose
from boxcov.detectors import centerpoint
from boxcov.error_model.calibrate import fit_error_model
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.export.tracker import TrackerSettings
from boxcov.pipeline.kitti_axes import TO_KITTI, frame_to_nuscenes

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data"
FIRST, THRESHOLD, RANGE = 28, 0.5, 51.2


class RealDrive(Sequence[Any]):
    """A drive in the form of simulated ones: axes of nuScenes, velocities, times from 0."""

    def __init__(self, frames: Any, poses: list[Pose]) -> None:
        self.frames, self.poses = frames, poses
        self.is_kitti = isinstance(frames, kitti.KittiDrive)
        self.targets = [self._target(number) for number in range(len(frames))]
        self._add_velocities()

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, item: Any) -> Any:
        return self._frame(item)[0], [self.targets[item]]

    def pose(self, item: int) -> Pose:
        return self.poses[item]

    def timestamp(self, item: int) -> int:
        return int(self.frames.timestamp(item) - self.frames.timestamp(0))

    def _frame(self, number: int) -> Any:
        frame = self.frames[number]
        return to_nuscenes(frame) if self.is_kitti else frame

    def _target(self, number: int) -> dict[str, Tensor]:
        target = self._frame(number)[1][0]
        boxes = target["boxes"]
        keep = boxes[:, :2].abs().amax(1) < RANGE
        if "points" in target:
            keep &= target["points"] > 0
        return {name: target[name][keep] for name in ("boxes", "labels", "ids")}

    def _add_velocities(self) -> None:
        """Fill in velocities that the labels lack."""
        place: dict[tuple[int, int], Tensor] = {}  # by frame and identity, in the world
        for number, (target, pose) in enumerate(zip(self.targets, self.poses)):
            there = pose(target["boxes"][:, :3].double())
            place |= {(number, int(i)): p for i, p in zip(target["ids"], there)}
        for number, (target, pose) in enumerate(zip(self.targets, self.poses)):
            for row, identity in enumerate(target["ids"].tolist()):
                near = [n for n in (number - 1, number, number + 1) if (n, identity) in place]
                if len(near) < 2 or not target["boxes"][row, 7:].isnan().any():
                    continue
                first, last = near[0], near[-1]
                seconds = 1e-6 * (self.timestamp(last) - self.timestamp(first))
                velocity = (place[last, identity] - place[first, identity]) / seconds
                target["boxes"][row, 7:] = (pose.R.T @ velocity)[:2].float()


def to_nuscenes(frame: Any) -> Any:
    """Return a frame of KITTI with the axes and classes of nuScenes."""
    target = frame[1][0]
    types = [kitti.TYPES[label] for label in target["labels"]]
    names = ["Car" if name == "Van" else name for name in types]
    keep = torch.tensor([name in kitti.CLASSES for name in names], dtype=torch.bool)
    labels = [kitti.CLASSES.index(name) for name in names if name in kitti.CLASSES]
    some = {name: target[name][keep] for name in ("boxes", "ids", "points") if name in target}
    return frame_to_nuscenes((frame[0], [{**some, "labels": torch.tensor(labels).long()}]))


def real_drives(args: argparse.Namespace) -> dict[str, Drive]:
    """Return the boxes of both drives; those that exist are kept."""
    detector = centerpoint.load("small")
    model = ExactGLM(detector, Posterior.load("small", detector))
    for name in ("nuscenes", "kitti"):
        path = args.out / f"{name}.npz"
        if not path.exists():
            save(path, model, open_nuscenes(args) if name == "nuscenes" else open_kitti(args))
            print(name, flush=True)
    return {name: load(args.out, name) for name in ("nuscenes", "kitti")}


def open_nuscenes(args: argparse.Namespace) -> RealDrive:
    (scene,) = nuscenes.sequences(args.nuscenes, sweeps=3)
    return RealDrive(scene, [scene.pose(item) for item in range(len(scene))])


def open_kitti(args: argparse.Namespace) -> RealDrive:
    (drive,) = kitti.sequences(args.kitti, classes=kitti.TYPES, rate=5)
    turn = Pose(TO_KITTI.R.double(), TO_KITTI.t.double())
    poses = ego_poses(drive[item][0][0] for item in range(len(drive)))
    return RealDrive(drive, [pose @ turn for pose in poses])


def part(drive: Drive, rows: slice) -> Drive:
    columns = {name: getattr(drive, name)[rows] for name in ("found", "targets", "poses", "times")}
    return replace(drive, **columns)


def methods(first: Drive, root: Path) -> dict[tuple[str, str], Noise]:
    """Return what each method says about boxes, by R and by the frames that it was fitted on."""
    shipped = Posterior.load("small", centerpoint.load("small")).error_model
    assert shipped is not None
    frames = [replace(f, frame=torch.full_like(f.frame, i)) for i, f in enumerate(first.found)]
    found, truth = (
        concatenate(frames),
        GroundTruth.from_frames([(None, [target]) for target in first.targets]),
    )
    records = match_detections(found, truth, threshold=-1.0)
    own = fit_error_model(found, records, estimator="exact", fingerprint="")
    simulated = [load(root, name) for name in TUNE[:3]]
    rows: dict[tuple[str, str], Noise] = {}
    for name, model, drives in (("simulated", shipped, simulated), ("nuScenes", own, [first])):
        errors = collect_pairs(drives, model.apply).errors
        spread = errors.square().nanmean(0)  # (5,)

        def constant(found: Any, model: Any = model, spread: Tensor = spread) -> Any:
            return with_variances(model.apply(found), spread.expand(len(found), -1))

        rows["constant", name], rows["boxcov", name] = constant, model.apply
    return rows


def judge(
    name: str, drive: Drive, noises: dict[tuple[str, str], Noise]
) -> tuple[list[list[Any]], str]:
    """Return a row for each method on the frames of a drive, and how many objects there are."""
    tracks = {key: run(drive, noise, TrackerSettings()) for key, noise in noises.items()}
    states = {key: pairs(drive, rows, THRESHOLD) for key, rows in tracks.items()}
    common = sorted(set.intersection(*map(set, states.values())))
    identity = np.array([number for _, number in common])
    rows = []
    for (R, fitted), state in states.items():
        units = unit_counts(accumulate(drive, tracks[R, fitted], THRESHOLD))
        names = {"nees": ".2f", "position square": ".2f", "velocity square": ".2f", "nll": ".1f"}
        cells = [
            cell([state[k][number] for k in common], identity, number, form)
            for number, form in names.items()
        ]
        last = [
            count_cell(mota, units, ".2f"),
            count_cell(idf1, units, ".2f"),
            count_cell(lambda count: count["num_switches"], units, ".0f"),
        ]
        rows.append([name, R, fitted, *cells, *last])
        print(rows[-1], flush=True)
    return rows, f"{name}: {len(common)} states of {len(set(identity))} objects"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nuscenes", required=True, help="root of nuScenes")
    parser.add_argument("--kitti", required=True, help="root of KITTI")
    parser.add_argument("--out", type=Path, required=True, help="folder of the boxes")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    collect(args.out, TUNE[:3])
    drives = real_drives(args)
    noises = methods(part(drives["nuscenes"], slice(0, FIRST)), args.out)
    simulated = {key: noise for key, noise in noises.items() if key[1] == "simulated"}
    parts = [
        judge("scene-0006", drives["nuscenes"], simulated),
        judge("its last 12", part(drives["nuscenes"], slice(FIRST, None)), noises),
        judge("drive 0005", drives["kitti"], simulated),
    ]
    write([row for rows, _ in parts for row in rows], [counted for _, counted in parts])


def write(rows: list[list[Any]], counted: list[str]) -> None:
    """Write two tables: the tracked states, and which objects are followed."""
    same = "Objects that all methods of the drive follow; 95 % intervals over objects."
    tables = {
        "tracking-real": (
            "Two real drives, with a detector trained on simulated frames: ANEES and RMSE",
            ("ANEES", "position, m", "velocity, m/s"),
            [row[:6] for row in rows],
            f"{same} {'; '.join(counted)}.",
        ),
        "tracking-real-follow": (
            "The same drives: NLL of the state, and which objects are followed",
            ("NLL", "MOTA", "IDF1", "switches"),
            [[*row[:3], *row[6:]] for row in rows],
            "Tracks with P(object) of at least 0.5. 95 % intervals over objects (NLL), and over "
            "objects and tracks.",
        ),
    }
    for name, (title, columns, cells, note) in tables.items():
        content = {
            "title": title,
            "command": "python studies/tracking_real.py --nuscenes ROOT --kitti ROOT --out OUT",
            "date": date.today().isoformat(),
            "machine": "one CPU thread",
            "columns": ["drive", "R", "fitted on", *columns],
            "digits": [None] * (3 + len(columns)),
            "rows": cells,
            "notes": [note],
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
