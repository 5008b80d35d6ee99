"""Read checkpoints without running code in them, and copy their tensors into a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from boxcov._files.input_file import open_bytes, open_safetensors, shorten
from boxcov.detectors.torch_file import ForeignCodeError, read_torch_file
from boxcov.errors import BoxcovError, join_names

State = Mapping[str, Tensor]
M = TypeVar("M", bound=nn.Module)
MAX_TENSORS = 20_000  # layers that a file states are compared with its number of tensors
_KEYS = ("state_dict", "model_state", "model")  # under which frameworks store the weights
_ADVICE = (
    "save its tensors alone with safetensors.torch.save_file(checkpoint['state_dict'], "
    "'weights.safetensors')"
)


def read_weights(path: Path) -> tuple[State, Mapping[str, str]]:
    """Return the tensors of a file, none of them empty, and the texts in its metadata."""
    if _is_safetensors(path):
        with open_safetensors(path, "a checkpoint") as file:
            state: State = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            meta = file.metadata() or {}
    else:
        try:
            content = read_torch_file(path)
        except ForeignCodeError as error:
            raise BoxcovError(
                f"{path}: holds more than weights ({shorten(error)}), and boxcov runs no code from "
                f"a checkpoint. If you trust the file and have its framework: {_ADVICE}"
            ) from None
        except Exception as error:  # a damaged file can raise anything
            raise BoxcovError(
                f"{path}: not a checkpoint that torch.save wrote, or a damaged one "
                f"({type(error).__name__}: {shorten(error, 400)}): {_ADVICE}"
            ) from None
        state, meta = _state(content, path)
    if len(state) > MAX_TENSORS:
        raise BoxcovError(f"{path}: {len(state)} tensors, at most {MAX_TENSORS} are read")
    for name, tensor in state.items():
        if not tensor.numel():  # its shape can state any number of classes
            raise BoxcovError(
                f"{path}: {shorten(name)} of shape {tuple(tensor.shape)} holds no numbers"
            )
    return state, meta


def _is_safetensors(path: Path) -> bool:
    """Return whether a file is one of safetensors, by its name or by its first bytes."""
    if path.suffix == ".safetensors":
        return True
    try:
        with open_bytes(path) as file:
            start = file.read(9)  # the length of the header, and the header
    except OSError:
        return False  # the reader of torch's files names the reason
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


def _state(content: Any, path: Path) -> tuple[State, Mapping[str, str]]:
    """Return the tensors and the metadata in the content of a checkpoint."""
    inside = content if isinstance(content, dict) else {}
    state = next((inside[key] for key in _KEYS if key in inside), inside)
    values = list(state.values()) if isinstance(state, dict) else [state]
    if not values or not all(isinstance(tensor, Tensor) for tensor in values):
        found = shown_names(inside) if inside else type(content).__name__
        raise BoxcovError(
            f"{path}: no weights found; looked for a dict of tensors, alone or under "
            f"{', '.join(_KEYS[:-1])} or {_KEYS[-1]}, and found {found}"
        )
    if all(name.startswith("module.") for name in state):  # saved from DataParallel
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    meta = inside.get("meta")
    texts = meta.items() if isinstance(meta, dict) else ()
    return state, {name: value for name, value in texts if isinstance(value, str)}


def load_weights(build: Callable[[], M], state: State, misfit: str) -> M:
    """Return the network that ``build`` makes, with the tensors of a file; see ``check_fit``."""
    # the sizes may come from the file: they are compared before memory is allocated
    with torch.device("meta"):
        own = build().state_dict()
    names = {name: name for name in own}
    check_fit(own, state, misfit, names)
    network = build()
    copy_weights(network.state_dict(), state, names)
    return network


def copy_weights(own: State, tensors: State, names: Mapping[str, str]) -> None:
    """Copy tensors into those of a network. names: as in ``check_fit``."""
    with torch.no_grad():
        for here, there in names.items():
            if there in tensors:
                own[here].copy_(tensors[there])


def check_fit(
    own: State, tensors: State, misfit: str, names: Mapping[str, str], stored: State | None = None
) -> None:
    """Raise one error, ``misfit`` and all that differs, unless the tensors are those of a network.

    own: the tensors of the network. names: its names to those in ``tensors``.
    stored: the tensors before a conversion, for the message.
    """
    shapes = {there: tuple(own[here].shape) for here, there in names.items()}
    stored = tensors if stored is None else stored
    # a frozen network does not need the number of batches that a norm has seen; old files lack it
    needed = [name for name in shapes if not name.endswith("num_batches_tracked")]
    other = [name for name in shapes if name in tensors and tensors[name].shape != shapes[name]]
    wrong = [f"{name} {tuple(stored[name].shape)} for {shapes[name]}" for name in other]
    missing = [name for name in needed if name not in tensors]
    refuse_differences(misfit, missing, sorted(set(tensors) - set(shapes)), wrong)


def refuse_differences(
    misfit: str, missing: Sequence[str], surplus: Sequence[str], wrong: Sequence[str]
) -> None:
    """Raise one error if tensors of a file are missing, surplus or of another shape."""
    lists = {"missing": missing, "surplus": surplus, "of another shape": wrong}
    found = [f"{len(n)} {kind}: {shown_names(n, 20)}" for kind, n in lists.items() if n]
    if found:
        raise BoxcovError(f"{misfit}. {'; '.join(found)}")


def shown_names(names: Iterable[str], most: int = 8) -> str:
    """Return the first few names of a file's tensors, as long as a message can show."""
    return join_names((shorten(name, 200) for name in names), most)
