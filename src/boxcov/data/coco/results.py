"""COCO's result file, with the covariance of each box in place: the official evaluation reads it and ignores what it does not know."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov.data.coco.sequence import Coco
from boxcov.data.covariance_json import about, check_finite, covariances, nine_digits, one_a_frame
from boxcov.data.poses import propagate
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.files import DAMAGE, replacing

IMAGE_FIELDS = ("x1", "y1", "x2", "y2")
RESULT_FIELDS = ("x", "y", "w", "h")
ALIASES = ("bbox_covar", "covars")
_TO_SIZE = torch.tensor(
    [[1.0, 0, 0, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, -1, 0, 1]], dtype=torch.float64
)  # x1 y1 x2 y2 to x y w h


def write_results(
    path: str | Path, frames: Coco, detections: Iterable[Detections], also: Sequence[str] = ()
) -> None:
    """Write the detections of all ``frames``, one ``Detections`` each in the same order, to ``path``.

    The detections are ``x1 y1 x2 y2``, with or without a ``logit``, in the pixels that the detector saw. The file is COCO's list of
    ``image_id``, ``category_id``, ``bbox`` (x y w h in pixels of the image) and ``score``, each with a ``covariance`` (4 x 4, row by row, of x y
    w h in those pixels) and its trace, ``uncertainty``; where it is calibrated, ``predictive`` too. A list has no place for what is
    said once, so that goes beside it, to ``NAME.meta.json``.
    also: other names that readers know: ``bbox_covar`` (4 rows, of x y w h), ``covars`` (2 x 2, of each of the two corners). Their readers
    score it as that of the box's error: it is the predictive one where there is one; ``also`` in the file beside says which.
    """
    path = Path(path)
    unknown = sorted(set(also) - set(ALIASES))
    if unknown:
        raise BoxcovError(
            f"no other name {', '.join(unknown)} for the covariance: there are {', '.join(ALIASES)}"
        )
    entries: list[dict[str, Any]] = []
    meta: dict[str, Any] = {}
    names = [str(number) for number in frames.image_ids]
    for number, (name, found) in enumerate(one_a_frame(names, detections, frames.classes)):
        there = _in_image(name, found, frames.scale(number))
        meta = meta or about(there, RESULT_FIELDS, "image")
        if meta and also:
            meta["also"] = dict.fromkeys(
                also, "covariance" if there.predictive is None else "predictive"
            )
        entries += _entries(name, there, frames, also)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(entries), encoding="utf-8")
    beside = path.with_suffix(".meta.json")
    beside.unlink(missing_ok=True)
    if meta:
        with replacing(beside) as temporary:
            temporary.write_text(json.dumps(meta), encoding="utf-8")


def read_results(path: str | Path, frames: Coco) -> list[Detections]:
    """The detections of each frame as ``write_results`` was given them: x1 y1 x2 y2 in the pixels that the detector saw, in float64."""
    path = Path(path)
    try:
        rows: dict[int, list[dict[str, Any]]] = {number: [] for number in frames.image_ids}
        for entry in json.loads(path.read_text(encoding="utf-8")):
            if entry["image_id"] not in rows:
                raise BoxcovError(
                    f"{path}: a box in image {entry['image_id']}, which is not among the frames"
                )
            rows[entry["image_id"]].append(entry)
        beside = path.with_suffix(".meta.json")
        meta = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
        return [
            _read(entries, frames, frames.scale(number), meta)
            for number, entries in enumerate(rows.values())
        ]
    except DAMAGE as error:
        if isinstance(error, BoxcovError):
            raise
        raise BoxcovError(
            f"{path}: not a file of COCO results, or a damaged one ({type(error).__name__}: {error})"
        ) from None


def to_image(boxes: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Boxes (m, 4) x1 y1 x2 y2 of a letterboxed image as x y w h in pixels of the image, in float64, and the Jacobian (m, 4, 4).

    >>> boxes, J = to_image(torch.tensor([[2.0, 4.0, 6.0, 10.0]]), 0.5)
    >>> boxes.tolist(), J[0, 2].tolist()
    ([[4.0, 8.0, 8.0, 12.0]], [-2.0, 0.0, 2.0, 0.0])
    """
    J = _TO_SIZE / scale
    return boxes.detach().cpu().double() @ J.T, J.expand(len(boxes), 4, 4)


def _in_image(name: str, found: Detections, scale: float) -> Detections:
    if found.fields[:4] != IMAGE_FIELDS or found.fields[4:] not in ((), ("logit",)):
        raise BoxcovError(
            f"image {name}: boxes of {' '.join(found.fields)}: COCO takes {' '.join(IMAGE_FIELDS)}"
        )
    boxes, J = to_image(found.boxes[:, :4], scale)
    check_finite(name, "box", boxes)
    check_finite(name, "score", found.scores[:, None])
    return propagate(
        found.to("cpu"),
        boxes,
        torch.cat([J, J.new_zeros(len(J), 4, len(found.fields) - 4)], 2),
        RESULT_FIELDS,
    )


def _entries(
    name: str, there: Detections, frames: Coco, also: Sequence[str]
) -> list[dict[str, Any]]:
    numbers = dict(zip(frames.classes, frames.category_ids))
    columns = zip(
        there.labels.tolist(),
        nine_digits(there.boxes),
        there.scores.tolist(),
        covariances(name, there),
    )
    entries = []
    for label, box, score, extra in columns:
        entry = {
            "image_id": int(name),
            "category_id": numbers[there.classes[label]],
            "bbox": box,
            "score": score,
            **extra,
        }
        scored = extra.get("predictive", extra.get("covariance"))
        if scored is not None and "bbox_covar" in also:
            entry["bbox_covar"] = [scored[4 * row : 4 * row + 4] for row in range(4)]
        if scored is not None and "covars" in also:
            entry["covars"] = _corner_covariances(scored)
        entries.append(entry)
    return entries


def _corner_covariances(row: list[float]) -> list[list[list[float]]]:
    """(2, 2, 2): of the upper left and the lower right corner, from that of x y w h."""
    back = torch.linalg.inv(_TO_SIZE)
    C = back @ torch.tensor(row, dtype=torch.float64).reshape(4, 4) @ back.T
    blocks: list[list[list[float]]] = [C[i : i + 2, i : i + 2].tolist() for i in (0, 2)]
    return blocks


def _read(
    entries: list[dict[str, Any]], frames: Coco, scale: float, meta: dict[str, Any]
) -> Detections:
    def column(key: str, width: int) -> Tensor:
        return torch.tensor([entry[key] for entry in entries], dtype=torch.float64).reshape(
            -1, width
        )

    there = Detections(
        boxes=column("bbox", 4),
        scores=column("score", 1)[:, 0],
        labels=torch.tensor(
            [frames.category_ids.index(entry["category_id"]) for entry in entries], dtype=torch.long
        ),
        frame=torch.zeros(len(entries), dtype=torch.long),
        fields=RESULT_FIELDS,
        classes=frames.classes,
        covariance=column("covariance", 16).reshape(-1, 4, 4) if meta else None,
        predictive=column("predictive", 16).reshape(-1, 4, 4) if meta.get("predictive") else None,
        meta=meta.get("uncertainty", {}),
    )
    J = torch.linalg.inv(_TO_SIZE) * scale
    return propagate(there, there.boxes @ J.T, J.expand(len(entries), 4, 4), IMAGE_FIELDS)
