"""The objects of a sequence of frames, and the matching of detections with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from boxcov._files.input_file import MAX_FRAMES, open_tensors, shorten
from boxcov._files.output_file import to_json, write_safetensors
from boxcov.box_layout import SPACE
from boxcov.data.poses import BOX_FIELDS
from boxcov.detections import PART_BELOW, Detections, to_array
from boxcov.errors import BoxcovError, counted
from boxcov.evaluate.covariance_metrics import LEVELS
from boxcov.evaluate.matching import match
from boxcov.evaluate.records import Records

Array = NDArray[Any]
_ARRAYS = ("boxes", "labels", "frame")
_KEY = "boxcov.truth"
_MATCHED = (  # arrays of detections that match() takes
    *("boxes", "scores", "labels", "frame"),
    *("uncertainty", "covariance", "predictive", "score_variance"),
)


def check_targets(targets: Any, number: int) -> None:
    """Raise unless the targets of item ``number`` are one dict per frame, with boxes and labels."""
    names = ("boxes", "labels")
    if not isinstance(targets, (list, tuple)) or not all(
        isinstance(target, Mapping)
        and all(hasattr(target.get(name), "__len__") for name in names)
        and len(target["boxes"]) == len(target["labels"])
        and len(target.get("points", target["labels"])) == len(target["labels"])
        for target in targets
    ):
        raise BoxcovError(
            f"the targets of item {number} are no list of one dict per frame with boxes (n, D), "
            "labels (n,) and maybe points (n,): boxes can be compared with such objects only"
        )


def _objects(target: Mapping[str, Any], number: int) -> tuple[Array, Array]:
    """Return boxes (n, E) and class numbers (n,) of one frame of item ``number``."""
    boxes = torch.as_tensor(target["boxes"]).detach().cpu().double().numpy()
    if not len(boxes):
        boxes = boxes.reshape(0, boxes.shape[-1])  # an empty list, for example
    elif boxes.ndim != 2:
        raise BoxcovError(f"the boxes of item {number} have shape {boxes.shape}, expected (n, D)")
    given = target["labels"]
    with suppress(TypeError, ValueError):  # of torch, for names
        labels = torch.as_tensor(given).cpu().numpy()
        if labels.ndim == 1 and not (labels % 1).any():
            return boxes, labels.astype(int)
    shown = given.tolist() if hasattr(given, "tolist") else list(given)
    raise BoxcovError(
        f"the labels of item {number} are {shorten(shown, 80)}: give the number of each object's "
        "class, from 0"
    )


@dataclass(frozen=True)
class GroundTruth:
    """The k objects of all frames."""

    boxes: Array  # (k, E), the fields of the data set
    labels: Array  # (k,)
    frame: Array  # (k,) index of the frame
    frames: int  # number of frames, including those without objects

    def __repr__(self) -> str:
        objects, frames = counted(len(self.labels), "object"), counted(self.frames, "frame")
        return f"GroundTruth({objects} in {frames})"

    @staticmethod
    def from_frames(frames: Iterable[Any]) -> GroundTruth:
        """Collect the targets of ``frames``.

        Objects without a LiDAR point are left out, as in the nuScenes evaluation.

        >>> labels, points = torch.tensor([0, 3]), torch.tensor([0, 7])
        >>> target = {"boxes": torch.zeros(2, 9), "labels": labels, "points": points}
        >>> GroundTruth.from_frames([([], [target])]).labels
        array([3])
        """
        parts: list[GroundTruth] = []
        for number, (_, targets) in enumerate(frames):
            check_targets(targets, number)
            for target in targets:
                boxes, labels = _objects(target, number)
                if "points" in target:
                    seen = torch.as_tensor(target["points"]).cpu().numpy() > 0
                    boxes, labels = boxes[seen], labels[seen]
                parts.append(GroundTruth(boxes, labels, np.zeros(len(labels), int), 1))
        return GroundTruth.concatenate(parts)

    @staticmethod
    def concatenate(parts: Sequence[GroundTruth]) -> GroundTruth:
        """Join the objects of consecutive blocks of frames.

        >>> one = GroundTruth(np.zeros((1, 9)), np.array([3]), np.array([1]), 2)
        >>> GroundTruth.concatenate([one, one]).frame
        array([1, 3])
        """
        if not parts:
            raise BoxcovError("there are no frames to compare the detections with")
        some = [part.boxes for part in parts if len(part.boxes)] or [parts[0].boxes]
        widths = sorted({boxes.shape[1] for boxes in some})
        if len(widths) > 1:
            raise BoxcovError(f"objects have {widths[0]} to {widths[-1]} fields: give all the same")
        starts = np.cumsum([0, *(part.frames for part in parts)])
        return GroundTruth(
            np.concatenate(some),
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.frame + start for part, start in zip(parts, starts)]),
            int(starts[-1]),
        )

    def save(self, path: Path, meta: Mapping[str, Any]) -> None:
        """Write the objects and ``meta`` to a safetensors file."""
        tensors = {name: torch.from_numpy(getattr(self, name)) for name in _ARRAYS}
        write_safetensors(path, tensors, {_KEY: to_json({**meta, "count": self.frames})})

    @staticmethod
    def load(path: Path) -> tuple[GroundTruth, dict[str, Any]]:
        """Return the objects and the metadata that ``save`` wrote."""
        with open_tensors(path, "objects of frames", _KEY) as (meta, file):
            boxes, labels, frame = arrays = [file.get_tensor(name).numpy() for name in _ARRAYS]
            shapes = {boxes.shape[:1], labels.shape, frame.shape}
            kinds = "".join(array.dtype.kind for array in arrays)
            if boxes.ndim != 2 or len(shapes) != 1 or kinds != "fii":
                raise ValueError(f"arrays of shapes {shapes} and kinds {kinds}")
            count = meta.pop("count")
            if type(count) is not int or not 0 < count <= MAX_FRAMES:
                raise ValueError(f"number of frames {count}, expected 1 to {MAX_FRAMES}")
            if len(frame) and not 0 <= frame.min() <= frame.max() < count:
                raise ValueError(f"objects of frames that are not among {count}")
            return GroundTruth(boxes, labels, frame, count), meta

    def columns(self, fields: tuple[str, ...]) -> Array:
        """Return the boxes (k, D) in the fields of a detector, which may have fewer fields."""
        E = self.boxes.shape[1]
        if len(fields) == E:
            return self.boxes
        if not len(self.boxes):
            return np.zeros((0, len(fields)))
        if len(SPACE) > E or not set(fields) <= set(BOX_FIELDS[:E]):
            raise BoxcovError(
                f"the detections have the box fields {', '.join(fields)}, "
                f"the objects of the data have {E} fields: they do not belong together"
            )
        return self.boxes[:, [BOX_FIELDS.index(name) for name in fields]]


def _check_objects(boxes: Array, frame: Array, fields: tuple[str, ...]) -> None:
    """Raise if an object has no place or a negative side: no box could ever be paired with it."""
    values = dict(zip(fields, boxes.T))
    if "x1" in values:
        values |= {"x2 - x1": values["x2"] - values["x1"], "y2 - y1": values["y2"] - values["y1"]}
    for name in ("x", "y", "w", "l", "x2 - x1", "y2 - y1"):
        column = values.get(name, np.zeros(0))
        wrong = ~np.isfinite(column) | ((column < 0) & (name not in ("x", "y")))
        if wrong.any():
            first = int(wrong.argmax())
            raise BoxcovError(
                f"{int(wrong.sum())} of {len(column)} objects have no place or a negative side, in "
                f"frame {frame[first]}: {name} is {column[first]:g}: give the fields "
                f"{' '.join(fields)}, or leave these objects out"
            )


def match_detections(
    detections: Detections, truth: GroundTruth, threshold: float = 0.1, pair: Array | None = None
) -> Records:
    """Return the detections with a score above ``threshold``, each matched with its object.

    ``detections.frame`` is the index of a frame of ``truth``. pair: the number of each detection's
    object (m,), -1 for none, where they are paired already.
    """
    arrays = detections.numpy()
    last = int(detections.frame.max()) if len(detections) else -1
    if last >= truth.frames:
        raise BoxcovError(
            f"the last frame of the detections is {last}, but the data has "
            f"{counted(truth.frames, 'frame')}"
        )
    objects = truth.columns(detections.fields)
    _check_objects(objects, truth.frame, detections.fields)
    if "uncertainty" not in arrays:
        raise BoxcovError("these detections have no covariance: write them with boxcov predict")
    given: dict[str, Any] = {name: arrays.get(name) for name in _MATCHED}
    records = match(
        **given,
        truth_boxes=objects,
        truth_labels=truth.labels,
        truth_frame=truth.frame,
        fields=detections.fields,
        classes=detections.classes,
        threshold=threshold,
        pair=pair,
    )
    keep = arrays["scores"] > threshold
    own = [not name.startswith(PART_BELOW) for name in detections.meta.get("signals", ())]
    if "signals" in arrays and any(own):
        records = replace(records, signals=arrays["signals"][keep][:, own])
    if "risk" not in arrays:
        return records
    regions = [to_array(detections.region(level)) for level in LEVELS]
    return replace(
        records,
        risk=arrays["risk"][keep],
        regions=np.stack(regions, 1)[keep],
        dof=tuple(detections.dof.tolist()),  # raises if there is no scale
        scale=arrays["scale"][keep],
        bad_below=detections.meta["error_model"]["threshold"],
    )
