"""KITTI's result files, one per frame, and one more file with the covariances."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from boxcov._files.input_file import read_bytes, read_json, reading
from boxcov._files.output_file import make_folder, to_json, write_text
from boxcov.box_layout import find_layout
from boxcov.data.covariance_json import (
    covariance_meta,
    covariance_rows,
    pair_with_frames,
    read_detections,
)
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
from boxcov.errors import BoxcovError, BoxcovWarning, counted

COVARIANCES = "covariance.json"
# the centre is rotated, and that of the bottom face also depends on the height
_SIZES = {"h": "h", "w": "w", "l": "l"}
_CAMERA_SOURCES = {**dict.fromkeys(CAMERA_FIELDS), **_SIZES, "rotation_y": "yaw"}
_LIDAR_SOURCES = {**dict.fromkeys(LIDAR_FIELDS), **_SIZES, "yaw": "rotation_y"}
_IMAGE_SIZE = (1242, 375)  # if the image itself is missing


def write_results(folder: str | Path, frames: Kitti, detections: Iterable[Detections]) -> None:
    """Write ``folder/000000.txt`` ... and ``covariance.json``, one ``Detections`` per frame.

    The detections are ``x y z w l h yaw`` in the LiDAR's coordinates, with or without ``vx vy``,
    which KITTI does not store. The text files are official result files: truncation and occlusion
    are -1 (unknown), and the 2D box is the projection of the 3D box, clipped at the border of the
    image ``image_2/000000.png``, or at 1242 x 375 pixels without one. No box is left out.

    ``covariance.json`` has ``meta`` and ``frames``: per frame one row per line of its text file,
    with the ``covariance`` (7 x 7, row by row, in camera coordinates and the order of columns 9 to
    15), its trace ``uncertainty`` and, if calibrated, ``predictive``.
    """
    folder = make_folder(Path(folder))
    (folder / COVARIANCES).unlink(missing_ok=True)  # of the files that are replaced below
    meta: dict[str, Any] = {}
    by_frame: dict[str, Any] = {}
    missing = 0
    pairs = pair_with_frames(frames.tokens, detections, frames.classes)
    for item, (token, found) in enumerate(pairs):
        calibration = frames.calibration(item)
        find_layout(found.fields, (LIDAR_FIELDS, BOX_FIELDS), f"frame {token}: KITTI", exact=True)
        boxes, J = to_camera(found.boxes[:, :7].detach().cpu().double(), calibration.pose)
        in_camera = propagate(found.to("cpu"), boxes, J, _CAMERA_SOURCES)
        size = _image_size(frames.folder / "image_2" / f"{token}.png")
        missing += size is None
        lines = _lines(in_camera, image_boxes(boxes, calibration.P2, *(size or _IMAGE_SIZE)))
        write_text(folder / f"{token}.txt", "".join(lines))
        if in_camera.covariance is not None:
            meta = covariance_meta(in_camera, CAMERA_FIELDS, "rectified camera")
            by_frame[token] = covariance_rows(in_camera)
    if by_frame:
        write_text(folder / COVARIANCES, to_json({"meta": meta, "frames": by_frame}))
    if missing:
        warn(
            f"{missing} of {len(frames)} frames have no image in {frames.folder / 'image_2'}: "
            "their 2D boxes are clipped at 1242 x 375 pixels: unpack the images there, whose sizes "
            "differ by some pixels",
            BoxcovWarning,
            stacklevel=2,
        )


def read_results(folder: str | Path, frames: Kitti) -> list[Detections]:
    """Return the detections of each frame, ``x y z w l h yaw`` of the LiDAR, in float64."""
    folder = Path(folder)
    path = folder / COVARIANCES
    meta, rows = {}, [None] * len(frames)
    with reading(path, "a file of covariances of KITTI results"):
        if path.exists():
            content = read_json(path)
            meta, rows = content["meta"], [content["frames"][token] for token in frames.tokens]
    return [_read_frame(folder, frames, item, meta, rows[item]) for item in range(len(frames))]


def _lines(found: Detections, image_boxes: Tensor) -> list[str]:
    """Return one line per box: type, truncation, occlusion, 12 numbers and the score."""
    rotation = wrap_angle(found.field("rotation_y"))
    alpha = wrap_angle(rotation - torch.atan2(found.field("x"), found.field("z")))
    numbers = torch.cat([alpha[:, None], image_boxes, found.boxes[:, :6], rotation[:, None]], 1)
    names = [found.classes[label] for label in found.labels.tolist()]
    return [
        f"{name} -1 -1 {' '.join(f'{value:.4f}' for value in row)} {score:.6f}\n"
        for name, row, score in zip(names, numbers.tolist(), found.scores.tolist())
    ]


def _read_frame(
    folder: Path, frames: Kitti, item: int, meta: dict[str, Any], rows: list[Any] | None
) -> Detections:
    path = folder / f"{frames.tokens[item]}.txt"
    entries = read_labels(path)
    for line, (kind, values) in enumerate(entries):
        if kind not in frames.classes or len(values) != 15:
            raise BoxcovError(
                f"{path}: object {line} ({kind}, {len(values) + 1} columns): expected 16 columns "
                f"and one of {', '.join(frames.classes)}"
            )
    with reading(folder / COVARIANCES, "a file of covariances of KITTI results"):
        if rows is not None and len(rows) != len(entries):
            raise BoxcovError(
                f"{path}: {counted(len(entries), 'object')}, but {len(rows)} in "
                f"{folder / COVARIANCES}: they were not written together"
            )
        numbers = torch.tensor([values for _, values in entries], dtype=torch.float64)
        numbers = numbers.reshape(-1, 15)
        in_camera = read_detections(
            numbers[:, 7:14],
            numbers[:, 14],
            [kind for kind, _ in entries],
            fields=CAMERA_FIELDS,
            classes=frames.classes,
            covariances=(meta, rows or []),
        )
    boxes, J = from_camera(in_camera.boxes, frames.calibration(item).pose)
    return propagate(in_camera, boxes, J, _LIDAR_SOURCES)


def _image_size(path: Path) -> tuple[int, int] | None:
    """Return width and height of a PNG image from its header; None if there is no such image."""
    try:
        head = read_bytes(path)[:24]
    except OSError:
        return None
    is_image = len(head) == 24 and head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:]) if is_image else None
