"""KITTI's result files, one a frame with the official 16 columns, and beside them one file with the covariances, row for row."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov.data.covariance_json import about, check_finite, covariances, one_a_frame
from boxcov.data.kitti.camera import (
    CAMERA_FIELDS,
    LIDAR_FIELDS,
    from_camera,
    image_boxes,
    to_camera,
)
from boxcov.data.kitti.sequence import Kitti, read_labels
from boxcov.data.poses import BOX_FIELDS, propagate, wrap_angle
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.files import DAMAGE, made_folder, replacing

COVARIANCES = "covariance.json"
_IMAGE = (1242, 375)  # where the images are not there to ask


def write_results(folder: str | Path, frames: Kitti, detections: Iterable[Detections]) -> None:
    """Write the detections of all ``frames``, one ``Detections`` each in the same order, into ``folder``: 000000.txt ... and covariance.json.

    The detections are in the LiDAR's frame, ``x y z w l h yaw`` with or without ``vx vy``, which KITTI has no place for. The text files are
    official result files (truncation and occlusion unknown: -1; a 2D box that is the projection of the 3D one; nothing is left out).
    ``covariance.json`` has ``frames``: by frame, row for row, a covariance (7 x 7, row by row, in the camera frame and the order of
    ``meta.covariance_fields``, which is that of columns 9 to 15) and its trace, ``uncertainty``; where it is calibrated, ``predictive`` too.
    """
    folder = made_folder(Path(folder))
    (folder / COVARIANCES).unlink(missing_ok=True)  # of the files about to be replaced
    meta: dict[str, Any] = {}
    by_frame: dict[str, Any] = {}
    for number, (token, found) in enumerate(one_a_frame(frames.tokens, detections, frames.classes)):
        calibration = frames.calibration(number)
        boxes, J = to_camera(_lidar_boxes(token, found), calibration.pose)
        there = propagate(
            found.to("cpu"),
            boxes,
            torch.cat([J, J.new_zeros(len(J), 7, len(found.fields) - 7)], 2),
            CAMERA_FIELDS,
        )
        check_finite(token, "score", there.scores[:, None])
        covered = image_boxes(
            boxes, calibration.P2, *_image_size(frames.folder / "image_2" / f"{token}.png")
        )
        with replacing(folder / f"{token}.txt") as temporary:
            temporary.write_text("".join(_lines(there, covered)), encoding="ascii")
        if there.covariance is not None:
            meta = about(there, CAMERA_FIELDS, "rectified camera")
            by_frame[token] = covariances(token, there)
    if by_frame:
        with replacing(folder / COVARIANCES) as temporary:
            temporary.write_text(json.dumps({"meta": meta, "frames": by_frame}), encoding="utf-8")


def read_results(folder: str | Path, frames: Kitti) -> list[Detections]:
    """The detections of each frame as ``write_results`` was given them: in the LiDAR's frame, ``x y z w l h yaw``, in float64."""
    folder = Path(folder)
    path = folder / COVARIANCES
    try:
        beside = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        meta = {} if beside is None else beside["meta"]["uncertainty"]
        by_frame = [None if beside is None else beside["frames"][token] for token in frames.tokens]
        calibrated = beside is not None and beside["meta"].get("predictive", False)
        return [
            _read(folder, frames, number, rows, meta, calibrated)
            for number, rows in enumerate(by_frame)
        ]
    except DAMAGE as error:
        if isinstance(error, BoxcovError):
            raise
        raise BoxcovError(
            f"{path}: not a file of covariances of KITTI results, or a damaged one ({type(error).__name__}: {error})"
        ) from None


def _lidar_boxes(token: str, found: Detections) -> Tensor:
    if found.fields not in (LIDAR_FIELDS, BOX_FIELDS):
        raise BoxcovError(
            f"frame {token}: boxes of {' '.join(found.fields)}: KITTI takes {' '.join(LIDAR_FIELDS)}, or with vx vy"
        )
    boxes = found.boxes[:, :7].detach().cpu().double()
    check_finite(token, "box", boxes)
    return boxes


def _lines(there: Detections, covered: Tensor) -> list[str]:
    rotation = wrap_angle(there.field("rotation_y"))
    alpha = wrap_angle(rotation - torch.atan2(there.field("x"), there.field("z")))
    numbers = torch.cat([alpha[:, None], covered, there.boxes[:, :6], rotation[:, None]], 1)
    names = [there.classes[label] for label in there.labels.tolist()]
    return [
        f"{name} -1 -1 {' '.join(f'{value:.4f}' for value in row)} {score:.6f}\n"
        for name, row, score in zip(names, numbers.tolist(), there.scores.tolist())
    ]


def _read(
    folder: Path,
    frames: Kitti,
    number: int,
    beside: list[dict[str, Any]] | None,
    meta: dict[str, Any],
    calibrated: bool,
) -> Detections:
    path = folder / f"{frames.tokens[number]}.txt"
    entries = read_labels(path)
    for row, (kind, values) in enumerate(entries):
        if kind not in frames.classes or len(values) != 15:
            raise BoxcovError(
                f"{path}: object {row} ({kind}, {len(values) + 1} columns): expected 16 columns and one of {frames.classes}"
            )
    covariance = predictive = None
    if beside is not None:
        if len(beside) != len(entries):
            raise BoxcovError(
                f"{path}: {len(entries)} objects, and {len(beside)} in {COVARIANCES}: they were not written together"
            )
        covariance = torch.tensor(
            [entry["covariance"] for entry in beside], dtype=torch.float64
        ).reshape(-1, 7, 7)
        if calibrated:
            predictive = torch.tensor(
                [entry["predictive"] for entry in beside], dtype=torch.float64
            ).reshape(-1, 7, 7)
    numbers = torch.tensor([values for _, values in entries], dtype=torch.float64).reshape(-1, 15)
    boxes, J = from_camera(numbers[:, 7:14], frames.calibration(number).pose)
    there = Detections(
        boxes=numbers[:, 7:14],
        scores=numbers[:, 14],
        labels=torch.tensor([frames.classes.index(kind) for kind, _ in entries], dtype=torch.long),
        frame=torch.zeros(len(entries), dtype=torch.long),
        fields=CAMERA_FIELDS,
        classes=frames.classes,
        covariance=covariance,
        predictive=predictive,
        meta=meta,
    )
    return propagate(there, boxes, J, LIDAR_FIELDS)


def _image_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG image, from its first bytes."""
    try:
        with path.open("rb") as file:
            head = file.read(24)
    except OSError:
        return _IMAGE
    if len(head) < 24 or not head.startswith(b"\x89PNG"):
        return _IMAGE
    width, height = struct.unpack(">II", head[16:])
    return width, height
