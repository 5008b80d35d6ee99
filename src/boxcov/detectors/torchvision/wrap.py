"""``wrap``: make a Detector from a torchvision model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from boxcov.detectors.torchvision.dense import FCOS, SSD, RetinaNet
from boxcov.detectors.torchvision.detector import Images, TorchvisionDetector
from boxcov.detectors.torchvision.rcnn import FasterRCNN
from boxcov.errors import BoxcovError

_FAMILIES: dict[str, type[TorchvisionDetector]] = {
    kind.__name__: kind for kind in (RetinaNet, FCOS, SSD, FasterRCNN)
}


def wrap(
    model: nn.Module,
    names: Sequence[str] | None = None,
    classes: Sequence[str] | Mapping[str, int] | None = None,
    threshold: float | None = None,
    images: Images = "rgb",
) -> TorchvisionDetector:
    """Make a Detector from a torchvision model. It reports what ``model(images)`` reports.

    names: of all classes including the background, as in ``weights.meta["categories"]``.
    classes: the classes to report, by name, or a dict from new names to the model's numbers; by
    default COCO's 80 if the model knows them, else all.
    threshold: score threshold on top of the model's own.
    images: "rgb" (0 to 1, torchvision's format) or "coco" (BGR, 0 to 255: ``boxcov.data.coco``).

    >>> wrap(nn.Linear(1, 1))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: a Linear is not supported: use RetinaNet, FCOS, SSD, FasterRCNN
    """
    modules = [c for c in type(model).__mro__ if c.__module__.startswith("torchvision.")]
    kind = next((_FAMILIES[c.__name__] for c in modules if c.__name__ in _FAMILIES), None)
    if kind is None:
        raise BoxcovError(f"a {type(model).__name__} is not supported: use {', '.join(_FAMILIES)}")
    return kind(model, names, classes, threshold, images)
