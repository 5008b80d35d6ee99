"""COCO's result file with covariances; the official evaluation ignores the additional keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov._files.input_file import read_json, reading
from boxcov._files.output_file import to_json, write_text
from boxcov.box_layout import IMAGE, find_layout
from boxcov.data.coco.sequence import Coco
from boxcov.data.covariance_json import (
    covariance_meta,
    covariance_rows,
    nine_digits,
    pair_with_frames,
    read_column,
    read_detections,
)
from boxcov.data.poses import propagate
from boxcov.detections import Detections
from boxcov.errors import BoxcovError

_LAYOUTS = (IMAGE, (*IMAGE, "logit"))
RESULT_FIELDS = ("x", "y", "w", "h")
_RESULT_SOURCES = {"x": "x1", "y": "y1", "w": None, "h": None}
_IMAGE_SOURCES = {"x1": "x", "y1": "y", "x2": None, "y2": None}
_TO_SIZE = torch.tensor(
    [[1.0, 0, 0, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, -1, 0, 1]], dtype=torch.float64
)  # x1 y1 x2 y2 to x y w h


def write_results(path: str | Path, frames: Coco, detections: Iterable[Detections]) -> None:
    """Write detections to COCO's result file, one ``Detections`` per frame of ``frames``.

    The detections are ``x1 y1 x2 y2``, with or without ``logit``, in the pixels of the detector's
    input. The file is COCO's list of ``image_id``, ``category_id``, ``bbox`` (x y w h in pixels of
    the image) and ``score``. Each entry also has a ``covariance`` (4 x 4, row by row, of x y w h in
    the same pixels), its trace ``uncertainty`` and, if calibrated, ``predictive``. ``clipped``
    names the sides without a variance, because the detector clipped them at the image border. How
    the covariances were computed is written to ``NAME.meta.json`` in the same folder.

    The covariance also has names that other tools read: ``bbox_covar`` (4 rows, of x y w h) and
    ``covars`` (2 x 2, of each of the two corners). These tools use it as the covariance of the
    error: it is the predictive one if there is one; ``also`` in the meta file says which.
    """
    path = Path(path)
    entries: list[dict[str, Any]] = []
    meta: dict[str, Any] = {}
    names = [str(number) for number in frames.image_ids]
    for item, (name, found) in enumerate(pair_with_frames(names, detections, frames.classes)):
        find_layout(found.fields, _LAYOUTS, f"image {name}: COCO", exact=True)
        boxes, J = to_image(found.boxes[:, :4], frames.scale(item))
        in_image = propagate(found.to("cpu"), boxes, J, _RESULT_SOURCES)
        meta = covariance_meta(in_image, RESULT_FIELDS, "image")
        if meta:
            source = "covariance" if in_image.predictive is None else "predictive"
            meta["also"] = dict.fromkeys(("bbox_covar", "covars"), source)
        for entry, sides in zip(_entries(name, in_image, frames), found.clipped.tolist()):
            if clipped := [side for side, is_clipped in zip(found.fields, sides) if is_clipped]:
                entry["clipped"] = clipped
            entries.append(entry)
    write_text(path, to_json(entries))
    meta_path = path.with_suffix(".meta.json")
    meta_path.unlink(missing_ok=True)
    if meta:
        write_text(meta_path, to_json(meta))


def read_results(path: str | Path, frames: Coco) -> list[Detections]:
    """Return the detections of each frame as ``write_results`` received them, in float64."""
    path = Path(path)
    with reading(path, "a file of COCO results"):
        rows: dict[int, list[dict[str, Any]]] = {number: [] for number in frames.image_ids}
        for entry in read_json(path):
            if entry["image_id"] not in rows:
                raise BoxcovError(
                    f"{path}: a box in image {entry['image_id']}, which is not among the frames"
                )
            rows[entry["image_id"]].append(entry)
        meta_path = path.with_suffix(".meta.json")
        meta = read_json(meta_path) if meta_path.exists() else {}
        return [
            _read_frame(entries, frames, frames.scale(item), meta)
            for item, entries in enumerate(rows.values())
        ]


def to_image(boxes: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return boxes (m, 4) of the input as x y w h in the image, and the Jacobian (m, 4, 4)."""
    J = _TO_SIZE / scale
    return boxes.detach().cpu().double() @ J.T, J.expand(len(boxes), 4, 4)


def _entries(name: str, found: Detections, frames: Coco) -> list[dict[str, Any]]:
    category_ids = dict(zip(frames.classes, frames.category_ids))
    numbers = (found.labels.tolist(), nine_digits(found.boxes), found.scores.tolist())
    entries = []
    for label, box, score, covariance in zip(*numbers, covariance_rows(found)):
        category = category_ids[found.classes[label]]
        entry = {"image_id": int(name), "category_id": category, "bbox": box, "score": score}
        entry |= covariance
        error = covariance.get("predictive", covariance.get("covariance"))
        if error is not None:
            entry["bbox_covar"] = [error[4 * row : 4 * row + 4] for row in range(4)]
            entry["covars"] = _corner_covariances(error)
        entries.append(entry)
    return entries


def _corner_covariances(row: list[float]) -> list[list[list[float]]]:
    """Return the covariances (2, 2, 2) of the upper left and the lower right corner."""
    to_corners = torch.linalg.inv(_TO_SIZE)
    C = to_corners @ torch.tensor(row, dtype=torch.float64).reshape(4, 4) @ to_corners.T
    return [C[i : i + 2, i : i + 2].tolist() for i in (0, 2)]


def _read_frame(
    entries: list[dict[str, Any]], frames: Coco, scale: float, meta: dict[str, Any]
) -> Detections:
    names = dict(zip(frames.category_ids, frames.classes))
    in_image = read_detections(
        read_column(entries, "bbox", 4),
        read_column(entries, "score", 1)[:, 0],
        [names[entry["category_id"]] for entry in entries],
        fields=RESULT_FIELDS,
        classes=frames.classes,
        covariances=(meta, entries),
    )
    J = torch.linalg.inv(_TO_SIZE) * scale
    boxes = in_image.boxes @ J.T
    found = propagate(in_image, boxes, J.expand(len(entries), 4, 4), _IMAGE_SOURCES)
    if found.covariance is None:
        return found
    clipped = [[side in entry.get("clipped", ()) for side in IMAGE] for entry in entries]
    fixed = torch.tensor(clipped, dtype=torch.bool).reshape(-1, 4)
    # exactly 0 again: the conversion from x y w h has rounded
    covariance = found.covariance.masked_fill(fixed[:, :, None] | fixed[:, None, :], 0.0)
    return replace(found, covariance=covariance)
