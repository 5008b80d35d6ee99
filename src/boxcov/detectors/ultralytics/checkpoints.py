"""Load a YOLO from a file of Ultralytics without running code in it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from inspect import isclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from boxcov._files.input_file import reading
from boxcov.detectors.ultralytics.detector import Yolo, wrap
from boxcov.errors import BoxcovError, import_package, join_names

_PACKAGES = ("torch.nn.modules.", "ultralytics.nn.")  # of the modules in a file


def load(path: str | Path, classes: Sequence[str] | None = None, threshold: float = 0.25) -> Yolo:
    """Load the network of a ``.pt`` file in eval mode; its images are BGR, 0 to 255.

    The file holds a pickled network. Only modules of torch and Ultralytics are made from it, by
    torch's reader of weights, and without their constructors, which evaluate texts and download
    files. A file with anything else is refused.
    classes, threshold: as in ``wrap``.

    >>> load("nowhere.pt")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere.pt: no such file; give a .pt file of Ultralytics
    """
    path = Path(path)
    if not path.is_file():
        raise BoxcovError(f"{path}: no such file; give a .pt file of Ultralytics")
    import_package("ultralytics.nn.tasks")
    with reading(path, "a .pt file of Ultralytics"):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        with torch.serialization.safe_globals(_modules(names, path)):
            content = torch.load(path, map_location="cpu", weights_only=True)
    network = content.get("ema") or content.get("model") if isinstance(content, dict) else None
    if not isinstance(network, nn.Module):
        raise BoxcovError(f"{path}: holds no network under ema or model, as YOLO(...).save writes")
    for module in network.modules():
        module.__class__ = type(module).__mro__[1]
    return wrap(network.float().eval(), classes, threshold, coco=True)


class _NotCallable(type):
    """A class whose objects are made from their stored state only."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise BoxcovError(f"calls {cls.__module__}.{cls.__qualname__}, as no saved network does")


def _modules(names: Sequence[str], path: Path) -> list[Any]:
    """Return stand-ins for these classes; raise if any is not a module of torch or Ultralytics."""
    found, foreign = [], []
    for name in names:
        home, _, own = name.rpartition(".")
        kind = getattr(import_module(home), own, None) if name.startswith(_PACKAGES) else None
        if isclass(kind) and issubclass(kind, nn.Module):
            own_name = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            found.append(_NotCallable(kind.__name__, (kind,), own_name))
        else:
            foreign.append(name)
    if foreign:
        raise BoxcovError(
            f"{path}: holds more than a network ({join_names(foreign)}), and boxcov runs no code "
            "from a file. If you trust it, write a function that returns boxcov.wrap(YOLO(PATH)), "
            "and give python:FILE.py:FUNCTION"
        )
    return found
