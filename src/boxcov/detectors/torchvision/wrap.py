"""Which of torchvision's models boxcov knows."""

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
    """A detector of torchvision as boxcov sees it: what it reports is what ``model(images)`` does.

    names: of all of the model's classes in their order, the background too, as ``weights.meta["categories"]``; their numbers unless given.
    classes: those to report, by name, or own names with the model's numbers; COCO's 80 where they are among the names, else all, unless given.
    threshold: on the score, above that of the model.
    images: "rgb", red first, 0 to 1, as torchvision has them; or "coco", blue first, 0 to 255, as ``boxcov.data.coco`` gives them.

    >>> wrap(nn.Linear(1, 1))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: a Linear is no detector of torchvision that boxcov knows: there are RetinaNet, FCOS, SSD, FasterRCNN
    """
    modules = [c for c in type(model).__mro__ if c.__module__.startswith("torchvision.")]
    kind = next((_FAMILIES[c.__name__] for c in modules if c.__name__ in _FAMILIES), None)
    if kind is None:
        raise BoxcovError(
            f"a {type(model).__name__} is no detector of torchvision that boxcov knows: there are {', '.join(_FAMILIES)}"
        )
    return kind(model, names, classes, threshold, images)
