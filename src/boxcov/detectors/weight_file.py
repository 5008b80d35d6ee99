"""Reading checkpoints without running any code that they may hold."""

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
_PLACES = (
    "state_dict",
    "model_state",
    "model",
)  # where frameworks keep the weights among other things


def read_weights(path: Path) -> tuple[State, Mapping[str, Any]]:
    """The tensors of a file, and what it says about itself.

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
        with torch.serialization.safe_globals(_numpy_numbers()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            raise BoxcovError(
                f"{path}: not a checkpoint that torch.save wrote, or a damaged one"
            ) from None
        raise BoxcovError(
            f"{path}: holds more than weights ({code[1]}), and boxcov runs no code from a checkpoint. Keep its tensors alone: "
            "torch.save({'state_dict': checkpoint['state_dict']}, ...), where you trust the file and have its framework"
        ) from None
    except Exception as error:  # the unpickler raises whatever it likes on a damaged file
        raise BoxcovError(
            f"{path}: not a checkpoint, or a damaged one ({type(error).__name__}: {error})"
        ) from None
    return _state(content, path)


def _numpy_numbers() -> list[Any]:
    """A best average precision is often a number of numpy's, which torch takes for code: it is none."""
    scalar = np.float64(0).__reduce__()[0]
    return [
        (scalar, "numpy.core.multiarray.scalar"),
        (scalar, "numpy._core.multiarray.scalar"),
        np.dtype,
        type(np.dtype(np.float64)),
    ]


def _state(content: Any, path: Path) -> tuple[State, Mapping[str, Any]]:
    inside = content if isinstance(content, dict) else {}
    state = next((inside[key] for key in _PLACES if key in inside), inside)
    if (
        not isinstance(state, dict)
        or not state
        or not all(isinstance(k, str) and isinstance(t, Tensor) for k, t in state.items())
    ):
        found = join_names(map(str, inside)) if inside else type(content).__name__
        raise BoxcovError(
            f"{path}: no weights found; looked for a dict of tensors, alone or under {', '.join(_PLACES[:-1])} or {_PLACES[-1]}, and found {found}"
        )
    if all(
        name.startswith("module.") for name in state
    ):  # saved from a network spread over several GPUs
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    meta = inside.get("meta")
    return state, meta if isinstance(meta, dict) else {}
