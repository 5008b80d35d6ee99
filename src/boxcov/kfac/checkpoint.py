"""Checkpoints of a fit: an interrupted run that is resumed gives the same posterior.

The file is replaced as a whole and never holds part of an item. An error or an interrupt leaves a
checkpoint of the items before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from boxcov._files.input_file import open_tensors
from boxcov._files.output_file import check_writable, remove_leftovers, to_json, write_safetensors
from boxcov._torch.distributed import World
from boxcov._torch.modules import hash_tensor
from boxcov.errors import BoxcovError
from boxcov.kfac.factors import check_count
from boxcov.version import __version__

FORMAT = 1
_KEY = "boxcov.checkpoint"
_KIND = ("a checkpoint of a fit", _KEY, "remove it to start again")


def hash_item(item: Any) -> str:
    """Return the SHA-256 of the tensors, numbers and strings of an item."""
    digest = sha256()
    for leaf in tree_leaves(item):
        if isinstance(leaf, Tensor):
            hash_tensor(digest, leaf)
        elif isinstance(leaf, (str, int, float, bool, type(None))):
            digest.update(repr(leaf).encode())
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
            raise BoxcovError(
                f"every_seconds must be a number of at least 0, got {self.every_seconds}"
            )

    def for_passes(self, count: int, world: World, settings: Mapping[str, Any]) -> list[Checkpoint]:
        """Return the checkpoint of each pass of this rank, whose file was checked.

        settings: what decides the sums of the first pass, and in part those of the second.
        """
        own = world.rank_path(self.path)
        passes = [replace(self, path=path) for path in (own, second_pass_path(own))[:count]]
        for each in passes:
            each._check_path(settings)
        return passes

    def _check_path(self, settings: Mapping[str, Any]) -> None:
        """Raise if the file cannot be written, is another's, or exists and is not resumed from."""
        path = Path(self.path)
        if path.exists() and not self.resume:
            with open_tensors(path, *_KIND) as (header, _):
                _check_settings(header["settings"], settings)
            raise BoxcovError(
                f"{path}: checkpoint of an interrupted fit: continue it with resume=True "
                "(--resume), or remove the file to start again"
            )
        check_writable(path)
        remove_leftovers(path)


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
        counts = {
            "next": check_count(header["next"]),
            "skipped": [check_count(number) for number in header["skipped"]],
        }
        yield {**header, **counts, "item_sha256": str(header["item_sha256"])}, file


def _check_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    if saved.get("locations", "all") != "all" or saved.get("weight") is not None:
        raise BoxcovError(
            "checkpoint of a fit with locations='gradient' or weights of frames, which this "
            "version does not have: remove the file to start again"
        )
    current = {  # 0.1 did not store the configuration of a detector
        name: value
        for name, value in current.items()
        if name in saved or not name.startswith("configuration ")
    }
    changed = [name for name in current if saved.get(name) != current[name]]
    if changed:
        changes = "; ".join(
            f"{name} was {saved.get(name)!r}, is {current[name]!r}" for name in changed
        )
        raise BoxcovError(
            f"checkpoint of another fit ({changes}): use the same settings, or remove the file to "
            "start again"
        )
