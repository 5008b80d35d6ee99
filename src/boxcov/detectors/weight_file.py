"""Read checkpoints without running code in them, and compare their tensors with a network's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from boxcov.errors import BoxcovError, join_names

State = Mapping[str, Tensor]
_KEYS = ("state_dict", "model_state", "model")  # under which frameworks store the weights


def read_weights(path: Path) -> tuple[State, Mapping[str, Any]]:
    """Return the tensors of a file and its metadata.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"model": {"module.x": torch.zeros(2)}, "start_epoch": 3}, f"{folder}/x.pth")
    ...     read_weights(Path(f"{folder}/x.pth"))
    ({'x': tensor([0., 0.])}, {})
    """
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return tensors, file.metadata() or {}
        with torch.serialization.safe_globals(_numpy_scalars()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            raise BoxcovError(
                f"{path}: not a checkpoint that torch.save wrote, or a damaged one"
            ) from None
        raise BoxcovError(
            f"{path}: holds more than weights ({code[1]}), and boxcov runs no code from a "
            "checkpoint. If you trust the file and have its framework, save the tensors alone: "
            "torch.save({'state_dict': checkpoint['state_dict']}, ...)"
        ) from None
    except Exception as error:  # a damaged file can raise anything
        raise BoxcovError(
            f"{path}: not a checkpoint, or a damaged one ({type(error).__name__}: {error})"
        ) from None
    return _state(content, path)


def _numpy_scalars() -> list[Any]:
    """Return numpy's scalar types: checkpoints often contain one, which torch refuses as code."""
    scalar = np.float64(0).__reduce__()[0]
    return [
        (scalar, "numpy.core.multiarray.scalar"),
        (scalar, "numpy._core.multiarray.scalar"),
        np.dtype,
        type(np.dtype(np.float64)),
    ]


def _state(content: Any, path: Path) -> tuple[State, Mapping[str, Any]]:
    """Return the tensors and the metadata in the content of a pickled checkpoint."""
    inside = content if isinstance(content, dict) else {}
    state = next((inside[key] for key in _KEYS if key in inside), inside)
    if (
        not isinstance(state, dict)
        or not state
        or not all(isinstance(k, str) and isinstance(t, Tensor) for k, t in state.items())
    ):
        found = join_names(map(str, inside)) if inside else type(content).__name__
        raise BoxcovError(
            f"{path}: no weights found; looked for a dict of tensors, alone or under "
            f"{', '.join(_KEYS[:-1])} or {_KEYS[-1]}, and found {found}"
        )
    if all(name.startswith("module.") for name in state):  # saved from DataParallel
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    meta = inside.get("meta")
    return state, meta if isinstance(meta, dict) else {}


def describe_misfit(
    shapes: Mapping[str, tuple[int, ...]], tensors: State, stored: State | None = None
) -> str:
    """Describe missing names, surplus names and wrong shapes; return "" if everything fits.

    shapes: the shapes that the network needs, by the name in the file.
    stored: the tensors before conversion, for the message.

    >>> describe_misfit({"a": (2,), "b": (3,)}, {"a": torch.zeros(4), "c": torch.zeros(1)})
    '1 missing: b; 1 surplus: c; 1 of another shape: a (4,) for (2,)'
    """
    stored = tensors if stored is None else stored
    # a frozen network does not need the number of batches that a norm has seen; old files lack it
    needed = [name for name in shapes if not name.endswith("num_batches_tracked")]
    wrong = [
        f"{name} {tuple(stored[name].shape)} for {shape}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    lists = {
        "missing": [name for name in needed if name not in tensors],
        "surplus": sorted(set(tensors) - set(shapes)),
        "of another shape": wrong,
    }
    return "; ".join(
        f"{len(names)} {kind}: {join_names(names, 20)}" for kind, names in lists.items() if names
    )
