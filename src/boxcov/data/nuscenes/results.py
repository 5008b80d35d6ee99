"""nuScenes' result file, with a covariance beside each box: the official evaluation reads it and passes over what it does not know."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import cos, hypot, sin
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov.data.covariance_json import about, check_finite, covariances, one_a_frame
from boxcov.data.nuscenes.classes import CLASSES, attribute
from boxcov.data.nuscenes.sequence import NuScenes
from boxcov.data.poses import BOX_FIELDS, rotation_matrix, transform_detections
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.files import DAMAGE, replacing

MOST = 500  # boxes a sample; the official evaluation refuses more
_SENSORS = {
    "use_camera": False,
    "use_lidar": True,
    "use_radar": False,
    "use_map": False,
    "use_external": False,
}


def write_results(path: str | Path, frames: NuScenes, detections: Iterable[Detections]) -> None:
    """Write the detections of all ``frames``, one ``Detections`` each in the same order, as a result file in the global frame.

    The detections are in the LIDAR_TOP frame (``x y z w l h yaw vx vy``). Boxes and covariances go to the global frame; each box has its
    ``covariance`` (9 x 9, row by row, in the order of ``meta.covariance_fields``) and ``uncertainty`` (its trace), and where it is calibrated
    the ``predictive`` one beside it; ``meta.uncertainty`` says how they were made.
    The 500 highest scores of a sample are kept. A velocity may be NaN, nothing else. For the official evaluation
    ``frames`` must be a whole split, at any number of sweeps. Detections may come from a generator: one frame at a time is held.
    """
    meta: dict[str, Any] = {}
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"results": {')
        for number, (token, found) in enumerate(one_a_frame(frames.tokens, detections, CLASSES)):
            there = transform_detections(_best(found), frames.pose(number))
            meta = about(there, BOX_FIELDS, "global")
            file.write(
                f"{',' if number else ''}\n{json.dumps(token)}: {json.dumps(list(_entries(token, there)))}"
            )
        file.write(f'\n}}, "meta": {json.dumps({**_SENSORS, **meta})}}}\n')


def read_results(path: str | Path) -> dict[str, Detections]:
    """The detections of a result file by sample token, in the global frame and float64; ``boxcov.data.poses.transform_detections`` takes them elsewhere.

    Files of others, without covariance, are read too.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        meta, results = content["meta"], content["results"]
        return {
            token: _detections(path, token, entries, meta) for token, entries in results.items()
        }
    except OSError as error:
        raise BoxcovError(f"{path}: cannot be read ({error.strerror})") from None
    except DAMAGE as error:
        if isinstance(error, BoxcovError):
            raise
        raise BoxcovError(
            f"{path}: not a nuScenes result file, or a damaged one ({type(error).__name__}: {error})"
        ) from None


def _best(found: Detections) -> Detections:
    return found[found.scores.argsort(descending=True, stable=True)[:MOST]]


def _entries(token: str, found: Detections) -> Iterator[dict[str, Any]]:
    """The boxes of one sample as the result file has them."""
    check_finite(token, "box", found.boxes[:, :7])
    check_finite(token, "score", found.scores[:, None])
    beside = covariances(token, found)
    for row, (box, score, label) in enumerate(
        zip(found.boxes.tolist(), found.scores.tolist(), found.labels.tolist())
    ):
        name = found.classes[label]
        entry = {
            "sample_token": token,
            "translation": box[:3],
            "size": box[3:6],
            "rotation": [
                cos(box[6] / 2),
                0.0,
                0.0,
                sin(box[6] / 2),
            ],  # upright, as yaw and its variance mean it
            "velocity": box[7:],
            "detection_name": name,
            "detection_score": float(score),
            "attribute_name": attribute(name, hypot(*box[7:])),
        }
        yield {**entry, **beside[row]}


def _detections(
    path: Path, token: str, entries: list[dict[str, Any]], meta: dict[str, Any]
) -> Detections:
    def column(key: str, size: int) -> Tensor:
        return torch.tensor([entry[key] for entry in entries], dtype=torch.float64).reshape(
            len(entries), size
        )

    unknown = {entry["detection_name"] for entry in entries} - set(CLASSES)
    if unknown:
        raise BoxcovError(
            f"{path}: sample {token}: no class {', '.join(sorted(unknown))}: nuScenes has {', '.join(CLASSES)}"
        )
    heading = rotation_matrix(column("rotation", 4))[:, :, 0]
    yaw = torch.atan2(heading[:, 1], heading[:, 0])
    return Detections(
        boxes=torch.cat(
            [column("translation", 3), column("size", 3), yaw[:, None], column("velocity", 2)], 1
        ),
        scores=torch.tensor([entry["detection_score"] for entry in entries], dtype=torch.float64),
        labels=torch.tensor(
            [CLASSES.index(entry["detection_name"]) for entry in entries], dtype=torch.long
        ),
        frame=torch.zeros(len(entries), dtype=torch.long),
        fields=BOX_FIELDS,
        classes=CLASSES,
        covariance=column("covariance", 81).reshape(-1, 9, 9)
        if "covariance_fields" in meta
        else None,
        predictive=column("predictive", 81).reshape(-1, 9, 9) if meta.get("predictive") else None,
        meta=meta.get("uncertainty", {}),
    )
