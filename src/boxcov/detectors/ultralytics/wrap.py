"""``wrap``: make a Detector from a YOLO of Ultralytics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from boxcov.detectors.labels import Labels
from boxcov.detectors.ultralytics.detector import Yolo
from boxcov.errors import BoxcovError


def wrap(
    model: nn.Module,
    classes: Sequence[str] | Mapping[str, int] | None = None,
    threshold: float = 0.25,
    overlap: float = 0.7,
    max_boxes: int = 300,
    coco: bool = False,
) -> Yolo:
    """Make a Detector from ``YOLO(...)`` of Ultralytics, or from the ``DetectionModel`` inside.

    classes: the classes to report, by name, or a dict from new names to the model's numbers; by
    default COCO's 80 if the model knows them, else all.
    threshold, overlap, max_boxes: score threshold, IoU threshold of NMS, boxes per image; the
    defaults are Ultralytics'.
    coco: images are BGR, 0 to 255 (``boxcov.data.coco``); otherwise RGB, 0 to 1.

    >>> wrap(nn.Linear(1, 1))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: a Linear is not a detection model of Ultralytics: give YOLO(...)
    """
    network: Any = model
    if _is_of_ultralytics(model, "Model"):  # YOLO(...); its network is loaded already
        network = model.model
    if not _is_of_ultralytics(network, "DetectionModel"):
        kind = type(model).__name__
        task = f" for {model.task}" if network is not model else ""
        raise BoxcovError(f"a {kind}{task} is not a detection model of Ultralytics: give YOLO(...)")
    head = network.model[-1]
    if type(head).__name__ != "Detect":
        raise BoxcovError(
            f"the model ends in a {type(head).__name__}; only Detect is supported "
            "(no masks, keypoints or rotated boxes)"
        )
    if getattr(head, "end2end", False):
        raise BoxcovError(
            "the model reports its one-to-one head, without NMS: "
            "set model.end2end = False to use the one-to-many head"
        )
    if not 0 <= threshold <= 1 or not 0 < overlap <= 1 or max_boxes < 1:
        raise BoxcovError(
            "threshold must lie in [0, 1], overlap in (0, 1] and max_boxes be at least 1, "
            f"got {threshold}, {overlap} and {max_boxes}"
        )
    return Yolo(network, Labels.of(network.names, classes), threshold, overlap, max_boxes, coco)


def _is_of_ultralytics(model: Any, name: str) -> bool:
    """Whether the model is of a class of that name in Ultralytics, which need not be installed."""
    return any(
        c.__name__ == name and c.__module__.startswith("ultralytics.") for c in type(model).__mro__
    )
