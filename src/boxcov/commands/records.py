"""From a file of detections and the frames that they were made from to the records that every metric reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.data.poses import BOX_FIELDS
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.evaluate.matching import match
from boxcov.evaluate.records import Records

Array = NDArray[Any]


@dataclass(frozen=True)
class Truth:
    """The objects of all frames: k rows."""

    boxes: Array  # (k, E) as the data set has them
    labels: Array  # (k,)
    frame: Array  # (k,) number of the frame
    frames: int  # how many there are, those without an object too

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
            seen = target["points"].cpu().numpy() > 0 if "points" in target else np.ones(len(target["labels"]), dtype=bool)
            boxes.append(target["boxes"].cpu().numpy().astype(float)[seen])
            labels.append(target["labels"].cpu().numpy()[seen])
            numbers.append(np.full(int(seen.sum()), count))
            count += 1
    if not count:
        raise BoxcovError("there are no frames to compare the detections with")
    return Truth(np.concatenate(boxes), np.concatenate(labels), np.concatenate(numbers), count)


def records_of(detections: Detections, frames: Iterable[Any] | Truth, threshold: float = 0.1) -> Records:
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
        raise BoxcovError("these are plain detections without a covariance: make them with boxcov predict")
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
