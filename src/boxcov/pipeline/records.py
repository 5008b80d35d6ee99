"""From a file of detections and the frames that they were made from to the records that every metric reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from boxcov.data.poses import BOX_FIELDS
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.evaluate.matching import match
from boxcov.evaluate.records import Records
from boxcov.files import reading, write_safetensors

Array = NDArray[Any]
_ARRAYS = ("boxes", "labels", "frame")
_KEY = "boxcov.truth"


@dataclass(frozen=True)
class Truth:
    """The objects of all frames: k rows."""

    boxes: Array  # (k, E) as the data set has them
    labels: Array  # (k,)
    frame: Array  # (k,) number of the frame
    frames: int  # how many there are, those without an object too

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        tensors = {name: torch.from_numpy(getattr(self, name)) for name in _ARRAYS}
        write_safetensors(path, tensors, {_KEY: json.dumps({**about, "count": self.frames})})

    @staticmethod
    def load(path: Path) -> tuple[Truth, dict[str, Any]]:
        """What ``save`` wrote, and what was to be known about it."""
        with reading(path, "objects of frames"), safe_open(path, framework="np") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})[_KEY])
            boxes, labels, frame = (file.get_tensor(name) for name in _ARRAYS)
            shapes, kinds = (
                {boxes.shape[:1], labels.shape, frame.shape},
                "".join(a.dtype.kind for a in (boxes, labels, frame)),
            )
            if boxes.ndim != 2 or len(shapes) != 1 or kinds != "fii":
                raise ValueError(f"arrays of shapes {shapes} and kinds {kinds}")
            count = about["count"]
            if (
                type(count) is not int
                or not 0 < count < 1 << 40
                or (len(frame) and not 0 <= frame.min() <= frame.max() < count)
            ):
                raise ValueError(f"objects of frames that are not among {count}")
            return Truth(boxes, labels, frame, about.pop("count")), about

    def columns(self, fields: tuple[str, ...]) -> Array:
        """The boxes (k, D) in the fields of a detector, which may know fewer of them."""
        E = self.boxes.shape[1]
        if len(fields) == E:
            return self.boxes
        if not set(fields) <= set(BOX_FIELDS[:E]):
            raise BoxcovError(
                f"the detections have boxes of {', '.join(fields)}, the data's objects have {E} numbers: they do not belong together"
            )
        return self.boxes[:, [BOX_FIELDS.index(name) for name in fields]]


def truth_of(frames: Iterable[Any]) -> Truth:
    """The objects in the targets of ``frames``; those without a single LiDAR point do not count, as in the evaluation of nuScenes.

    >>> import torch
    >>> target = {"boxes": torch.zeros(2, 9), "labels": torch.tensor([0, 3]), "points": torch.tensor([0, 7])}
    >>> truth_of([([], [target])]).labels
    array([3])
    """
    boxes, labels, numbers = [], [], []
    count = 0
    for _, targets in frames:
        for target in targets:
            seen = (
                target["points"].cpu().numpy() > 0
                if "points" in target
                else np.ones(len(target["labels"]), dtype=bool)
            )
            boxes.append(target["boxes"].cpu().numpy().astype(float)[seen])
            labels.append(target["labels"].cpu().numpy()[seen])
            numbers.append(np.full(int(seen.sum()), count))
            count += 1
    if not count:
        raise BoxcovError("there are no frames to compare the detections with")
    return Truth(np.concatenate(boxes), np.concatenate(labels), np.concatenate(numbers), count)


def joined(parts: Sequence[Truth]) -> Truth:
    """The objects of blocks of frames that follow each other.

    >>> one = Truth(np.zeros((1, 9)), np.array([3]), np.array([1]), 2)
    >>> joined([one, one]).frame
    array([1, 3])
    """
    starts = np.cumsum([0, *(part.frames for part in parts)])
    numbers = [part.frame + start for part, start in zip(parts, starts)]
    boxes, labels = ([getattr(part, name) for part in parts] for name in ("boxes", "labels"))
    return Truth(
        np.concatenate(boxes), np.concatenate(labels), np.concatenate(numbers), int(starts[-1])
    )


def records_of(
    detections: Detections, frames: Iterable[Any] | Truth, threshold: float = 0.1
) -> Records:
    """The detections, scored above ``threshold``, each with its object: ``detections.frame`` is the number of a frame of ``frames``.

    ``frames`` gives (inputs, targets): lists of one dict a frame with ``boxes``, ``labels`` and perhaps ``points``; or its ``truth_of``, made once.

    >>> import torch
    >>> car = torch.tensor([[9.0, 2.0, 0.0, 1.8, 4.2, 1.5, 0.0, 0.0, 0.0]])
    >>> one = torch.zeros(1, dtype=torch.long)
    >>> found = Detections(car + 0.1, torch.ones(1), one, one, BOX_FIELDS, ("car",), torch.eye(9)[None])
    >>> records_of(found, [([], [{"boxes": car, "labels": one}])]).l2.round(2)
    array([0.17])
    """
    truth = frames if isinstance(frames, Truth) else truth_of(frames)
    arrays = detections.numpy()
    if len(detections) and int(detections.frame.max()) >= truth.frames:
        raise BoxcovError(
            f"the detections are of frame {int(detections.frame.max())} and those before it, the data has {truth.frames} frames"
        )
    if "uncertainty" not in arrays:
        raise BoxcovError(
            "these are plain detections without a covariance: make them with boxcov predict"
        )
    return match(
        arrays["boxes"],
        arrays["scores"],
        arrays["labels"],
        arrays["frame"],
        truth.columns(detections.fields),
        truth.labels,
        truth.frame,
        fields=detections.fields,
        classes=detections.classes,
        uncertainty=arrays["uncertainty"],
        covariance=arrays["covariance"],
        predictive=arrays.get("predictive"),
        threshold=threshold,
        score_variance=arrays.get("score_variance"),
    )
