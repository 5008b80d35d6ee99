"""Checkpoints of a fit: an interrupted run that is resumed gives the same posterior.

The file is replaced as a whole and never holds part of an item. An error or an interrupt leaves a
checkpoint of the items before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from boxcov._files.input_file import open_tensors
from boxcov._files.output_file import check_writable, remove_leftovers, to_json, write_safetensors
from boxcov._torch.distributed import World
from boxcov._torch.modules import hash_tensor
from boxcov.errors import BoxcovError
from boxcov.kfac.factors import FactorSums
from boxcov.posterior.kronecker_block import Layer
from boxcov.version import __version__

FORMAT = 1
_KEY = "boxcov.checkpoint"
_KIND = ("a checkpoint of a fit", _KEY, "remove it to start again")


def hash_item(item: Any) -> str:
    """Return the SHA-256 of the tensors, arrays, numbers and strings of an item."""
    digest = sha256()
    for leaf in tree_leaves(item):
        if isinstance(leaf, Tensor):
            hash_tensor(digest, leaf)
        elif isinstance(leaf, (str, int, float, bool, type(None))):
            digest.update(repr(leaf).encode())
        elif isinstance(leaf, (np.ndarray, np.generic)) and not leaf.dtype.hasobject:
            digest.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often ``boxcov.fit`` saves its sums.

    path: file of the first pass; each rank appends its number, a second pass appends ".second".
    every_seconds: interval between two writes. The file is also written when a run is interrupted.
    resume: continue from the file if it exists. Without it, an existing file is an error.

    Remove the file once the posterior is saved.

    >>> import tempfile, boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = Checkpoint(f"{folder}/fit.checkpoint", every_seconds=0)
    ...     one = boxcov.fit(TinyCenter(), shapes.frames(count=3), checkpoint=kept)
    ...     again = Checkpoint(f"{folder}/fit.checkpoint", resume=True)
    ...     two = boxcov.fit(TinyCenter(), shapes.frames(count=3), checkpoint=again)
    >>> one.loss == two.loss
    True
    """

    path: str | Path
    every_seconds: float = 60.0
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.every_seconds >= 0:  # NaN included
            raise BoxcovError(f"every_seconds must be at least 0, got {self.every_seconds}")

    def for_passes(self, count: int, world: World, settings: Mapping[str, Any]) -> list[Checkpoint]:
        """Return the checkpoint of each pass of this rank, whose file was checked.

        settings: what decides the sums of the first pass, and in part those of the second.
        """
        own = world.rank_path(self.path)
        paths = (own, second_pass_path(own))[:count]
        for path in paths:
            if path.exists() and not self.resume:
                with open_tensors(path, *_KIND) as (header, _):
                    _check_settings(header["settings"], settings)
                raise BoxcovError(
                    f"{path}: checkpoint of an interrupted fit: continue it with resume=True "
                    "(--resume), or remove the file to start again"
                )
            check_writable(path)
            remove_leftovers(path)
        return [replace(self, path=path) for path in paths]


def second_pass_path(path: str | Path) -> Path:
    """Return the checkpoint file of the second pass."""
    return Path(path).with_name(f"{Path(path).name}.second")


class SaveError(BoxcovError):
    """The checkpoint could not be written."""


def write_checkpoint(
    path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], saved_items: int
) -> None:
    """Write the sums of a pass; saved_items: those in the file that is replaced, for an error."""
    header = {"format": FORMAT, "version": __version__, **header}
    try:
        write_safetensors(path, tensors, {_KEY: to_json(header)})
    except BoxcovError as error:
        raise SaveError(
            f"{error}: the file holds {saved_items} earlier items; free some space or "
            "choose another path, and continue with resume=True (--resume)"
        ) from error


def pack_sums(sums: Iterable[FactorSums]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the tensors of a file and a header entry per layer; equal Q are stored once."""
    tensors: dict[str, Tensor] = {}
    entries = []
    for number, one in enumerate(sums):
        same = (name for name, Q in tensors.items() if "Q" in name and torch.equal(Q, one.Q))
        names = {"Q": next(same, f"{number}.Q"), "H": f"{number}.H"}
        tensors.setdefault(names["Q"], one.Q)
        tensors[names["H"]] = one.H
        counts = {"locations": one.locations, "reached": one.has_gradient}
        entries.append({**one.layer.to_json(), **names, **counts})
    return tensors, entries


def unpack_sums(
    entry: Mapping[str, Any], file: Any, parameters: Mapping[str, nn.Parameter]
) -> FactorSums:
    """Read the sums of one header entry; raise ValueError if they do not fit ``parameters``."""
    layer = Layer.from_json(entry)
    groups = layer.geometry.groups
    for name, shape in ((layer.weight, tuple(layer.shape)), (layer.bias, (groups * layer.n_out,))):
        if name is not None and (name not in parameters or tuple(parameters[name].shape) != shape):
            raise ValueError(f"the detector has no parameter {name} of shape {shape}")
    device = parameters[layer.weight].device
    Q = read_sum(file, entry["Q"], [groups, layer.n_in, layer.n_in], device)
    H = read_sum(file, entry["H"], [groups, layer.n_out, layer.n_out], device)
    return FactorSums(layer, Q, H, check_count(entry["locations"]), bool(entry["reached"]))


def read_sum(file: Any, name: str, shape: list[int], device: torch.device) -> Tensor:
    """Read a float64 tensor; its header is checked before memory is allocated."""
    header = file.get_slice(name)
    found = header.get_shape(), header.get_dtype()
    if found != (shape, "F64"):
        raise ValueError(f"{name} has shape {found[0]} and type {found[1]}, expected {shape}, F64")
    tensor: Tensor = file.get_tensor(name)
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} holds a NaN or an infinity")
    return tensor.to(device, copy=True)


def check_count(count: Any) -> int:
    """Return ``count`` if it is a valid count; raise ValueError otherwise."""
    if type(count) is not int or not 0 <= count < 1 << 53:
        raise ValueError(f"a count of {count!r}")
    return count


@contextmanager
def read_checkpoint(
    path: str | Path, settings: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Open the sums of a pass: yield the header, checked, and the safetensors file."""
    with open_tensors(path, *_KIND) as (header, file):
        if header["format"] != FORMAT:
            raise BoxcovError(
                f"written by boxcov {header['version']} in format {header['format']}, "
                f"this version reads {FORMAT}"
            )
        _check_settings(header["settings"], settings)
        for number in (header["next"], *header["skipped"]):
            check_count(number)
        yield header, file


def _check_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    if saved.get("locations", "all") != "all" or saved.get("weight") is not None:
        raise BoxcovError(
            "checkpoint of a fit with locations='gradient' or weights of frames, which this "
            "version does not have: remove the file to start again"
        )
    changes = [
        f"{name} was {saved.get(name)!r}, is {value!r}"
        for name, value in current.items()
        if saved.get(name) != value
        # 0.1 did not store the configuration of a detector
        and (name in saved or not name.startswith("configuration "))
    ]
    if changes:
        raise BoxcovError(
            f"checkpoint of another fit ({'; '.join(changes)}): use the same settings, or remove "
            "the file to start again"
        )
