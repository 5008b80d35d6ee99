"""Make detectors of torchvision: from a model, or by name with weights of torchvision or a file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from boxcov._files.input_file import hash_file, reading
from boxcov.detectors.torchvision.dense import FCOS, SSD, RetinaNet
from boxcov.detectors.torchvision.detector import Images, TorchvisionDetector
from boxcov.detectors.torchvision.rcnn import FasterRCNN
from boxcov.detectors.weight_file import State, load_weights, read_weights
from boxcov.errors import BoxcovError, BoxcovWarning, did_you_mean, import_package

_FAMILIES: dict[str, type[TorchvisionDetector]] = {
    kind.__name__: kind for kind in (RetinaNet, FCOS, SSD, FasterRCNN)
}
# torchvision sets eps of the frozen norms to 0 for the first published weights of these networks
_EPS_ZERO = ("fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn")
_COCO_NUMBERS = 91  # of torchvision's COCO models: the background and gaps included


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


def load(
    which: str, classes: Sequence[str] | Mapping[str, int] | None = None, threshold: float = 0.3
) -> TorchvisionDetector:
    """Load ``NAME`` with torchvision's published weights, or ``NAME:PATH`` with those of a file.

    NAME is that of torchvision, such as ``retinanet_resnet50_fpn``. Published weights are
    downloaded by torchvision, once. PATH: a state dict (.pth) or safetensors; no code in it is run.
    The number of classes follows from the weights; the names of 91 are those of COCO, with a
    warning unless torchvision published the file or ``classes`` is given.
    Images are those of ``boxcov.data.coco``.
    classes, threshold: as in ``wrap``.
    """
    name, _, path = which.partition(":")
    models = import_package("torchvision.models")
    every = models.list_models(module=models.detection)
    known = [n for n in every if "mask" not in n and "keypoint" not in n]
    if name not in known:
        hint = did_you_mean(name, known)
        raise BoxcovError(f"torchvision has no detector {name!r}{hint}: give {', '.join(known)}")
    build, published = models.get_model_builder(name), models.get_model_weights(name)
    names = published.DEFAULT.meta["categories"]
    if path:
        model, is_frozen = _from_file(build, name, Path(path))
        owner = _published_name(Path(path), {n: models.get_model_weights(n) for n in known})
        if owner not in (None, name):  # networks for other image sizes have the same weights
            raise BoxcovError(
                f"{path}: these are torchvision's weights of {owner}: give torchvision:{owner}:PATH"
            )
        if is_frozen and name in _EPS_ZERO:
            _set_eps(model, Path(path), owner == name)
    else:
        model, owner = _download(build, name, published.DEFAULT), name
    count = wrap(model).count()
    if owner is None and classes is None and count == len(names):
        warnings.warn(
            f"{path}: the file does not name the classes of its {count} outputs: COCO's names are "
            "used. If it was trained on others, give load(..., classes={name: output, ...}), for "
            "a command in a function of yours: python:FILE.py:FUNCTION",
            BoxcovWarning,
            stacklevel=2,
        )
    known_names = names if count == len(names) else None
    return wrap(model.eval(), known_names, classes, threshold, images="coco")


def _download(build: Any, name: str, weights: Any) -> nn.Module:
    try:
        model: nn.Module = build(weights=weights, progress=False)
    except OSError as error:  # no network
        raise BoxcovError(
            f"torchvision could not download the weights of {name} ({error}): bring the file "
            f"{weights.url} here and give torchvision:{name}:PATH"
        ) from None
    return model


def _from_file(build: Any, name: str, path: Path) -> tuple[nn.Module, bool]:
    """Return the network and whether its norms were frozen: those count no batches."""
    if not path.is_file():
        raise BoxcovError(f"{path}: no such file; give the weights of a {name}, or no path")
    state = read_weights(path)[0]
    with reading(path, f"weights of a {name}"):
        count, misfit = _class_count(build, state), f"{path}: the weights do not fit a {name}"
        model = load_weights(lambda: _build(build, count), state, misfit)
    return model, not any(key.endswith("num_batches_tracked") for key in state)


def _build(build: Any, count: int) -> nn.Module:
    return build(weights=None, weights_backbone=None, num_classes=count)


def _class_count(build: Any, state: State) -> int:
    """Return the number of classes of the weights: the rows of the head grow with it."""
    with torch.device("meta"):
        usual = _build(build, _COCO_NUMBERS).state_dict()
    rows = {
        (len(state[key]), len(tensor))
        for key, tensor in usual.items()
        if key in state and state[key].dim() and len(state[key]) != len(tensor)
    }
    counts = {found * _COCO_NUMBERS // own for found, own in rows}
    # with different answers the weights are those of another network, which the misfit says
    return counts.pop() if len(counts) == 1 else _COCO_NUMBERS


def _published_name(path: Path, published: Mapping[str, Any]) -> str | None:
    """Return the network that torchvision published the file for; None if it is not one of these.

    The names of its files end in the first digits of their SHA-256.
    """
    digest = hash_file(path)
    files = {Path(w.url).stem: name for name, weights in published.items() for w in weights}
    owners = (name for file, name in files.items() if digest.startswith(file.rpartition("-")[2]))
    return next(owners, None)


def _set_eps(model: nn.Module, path: Path, is_published: bool) -> None:
    """Set eps of the frozen norms to 0 for published weights; warn if these are others."""
    if not is_published:
        warnings.warn(
            f"{path}: the file does not say eps of its frozen norms: 1e-5 is used, but models that "
            "were fine-tuned from torchvision's COCO weights have 0. If yours was, build it in a "
            "function and give python:FILE.py:FUNCTION",
            BoxcovWarning,
            stacklevel=2,
        )
        return
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 0.0
