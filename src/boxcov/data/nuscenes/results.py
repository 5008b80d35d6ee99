"""nuScenes' result file with covariances; the official evaluation ignores the additional keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import cos, hypot, sin
from pathlib import Path
from typing import Any

import torch

from boxcov._files.input_file import read_json, reading
from boxcov._files.output_file import atomic_write, to_json
from boxcov.data.covariance_json import (
    covariance_meta,
    covariance_rows,
    pair_with_frames,
    read_column,
    read_detections,
)
from boxcov.data.nuscenes.classes import CLASSES, attribute
from boxcov.data.nuscenes.sequence import NuScenes
from boxcov.data.poses import BOX_FIELDS, rotation_matrix, transform_detections
from boxcov.detections import Detections

MAX_BOXES = 500  # per sample; the official evaluation refuses more
_SENSORS = {f"use_{s}": s == "lidar" for s in ("camera", "lidar", "radar", "map", "external")}


def write_results(path: str | Path, frames: NuScenes, detections: Iterable[Detections]) -> None:
    """Write a result file in the global frame, one ``Detections`` per frame of ``frames``.

    The detections are ``x y z w l h yaw vx vy`` in the LIDAR_TOP frame. Each box of the file has
    its ``covariance`` (9 x 9, row by row, in the order of ``meta.covariance_fields``), its trace
    ``uncertainty`` and, if calibrated, ``predictive``. ``meta.uncertainty`` says how they were
    computed. Only the 500 highest scores of a sample are written. Velocities may be NaN.

    The official evaluation requires a whole split, with any number of sweeps. ``detections`` may
    be a generator: only one frame at a time is held in memory.
    """
    meta: dict[str, Any] = {}
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"results": {')
        pairs = pair_with_frames(frames.tokens, detections, CLASSES)
        for item, (token, found) in enumerate(pairs):
            best = found.scores.argsort(descending=True, stable=True)[:MAX_BOXES]
            in_world = transform_detections(found[best], frames.pose(item))
            meta = covariance_meta(in_world, BOX_FIELDS, "global")
            # the format has NaN for unknown velocities
            entries = json.dumps(list(_entries(token, in_world)))
            file.write(f"{',' if item else ''}\n{to_json(token)}: {entries}")
        file.write(f'\n}}, "meta": {to_json({**_SENSORS, **meta})}}}\n')


def read_results(path: str | Path) -> dict[str, Detections]:
    """Return the detections by sample token, in the global frame and float64.

    Files without covariances, of other programs, are read too. Use
    ``boxcov.data.poses.transform_detections`` for another coordinate frame.
    """
    path = Path(path)
    with reading(path, "a nuScenes result file"):
        content = read_json(path)
        meta, results = content["meta"], content["results"]
        return {token: _read_frame(entries, meta) for token, entries in results.items()}


def _entries(token: str, found: Detections) -> Iterator[dict[str, Any]]:
    """Yield the boxes of one sample as the result file has them."""
    numbers = (found.boxes.tolist(), found.scores.tolist(), found.labels.tolist())
    for box, score, label, covariance in zip(*numbers, covariance_rows(found)):
        name = found.classes[label]
        yield {
            "sample_token": token,
            "translation": box[:3],
            "size": box[3:6],
            "rotation": [cos(box[6] / 2), 0.0, 0.0, sin(box[6] / 2)],  # upright, as yaw implies
            "velocity": box[7:],
            "detection_name": name,
            "detection_score": float(score),
            "attribute_name": attribute(name, hypot(*box[7:])),
            **covariance,
        }


def _read_frame(entries: list[dict[str, Any]], meta: dict[str, Any]) -> Detections:
    heading = rotation_matrix(read_column(entries, "rotation", 4))[:, :, 0]
    yaw = torch.atan2(heading[:, 1], heading[:, 0])
    centre, size = (read_column(entries, key, 3) for key in ("translation", "size"))
    velocity = read_column(entries, "velocity", 2)
    return read_detections(
        torch.cat([centre, size, yaw[:, None], velocity], 1),
        read_column(entries, "detection_score", 1)[:, 0],
        [entry["detection_name"] for entry in entries],
        fields=BOX_FIELDS,
        classes=CLASSES,
        covariances=(meta, entries),
    )
