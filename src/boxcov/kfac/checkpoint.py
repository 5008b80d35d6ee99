"""Checkpoints of a fit: an interrupted run that is resumed gives the same posterior.

The file is replaced as a whole and never holds part of an item. An error or an interrupt leaves a
checkpoint of the items before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from boxcov._torch.modules import hash_tensor
from boxcov.errors import BoxcovError
from boxcov.files import check_writable, remove_leftovers, to_json, write_safetensors
from boxcov.input_file import open_tensors
from boxcov.kfac.accumulate import Accumulator
from boxcov.kfac.ekfac import GradientMoments
from boxcov.kfac.factors import check_count
from boxcov.kfac.items import Items
from boxcov.version import __version__

PassSums = Accumulator | GradientMoments  # of the first pass over the items, and of the second
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

    def check_path(self, settings: Mapping[str, Any]) -> None:
        """Raise if the file exists although the run does not resume from it, or is another's."""
        if self.resume or not Path(self.path).exists():
            return
        with open_tensors(self.path, *_KIND) as (header, _):
            _check_settings(header["settings"], settings)
        raise BoxcovError(
            f"{self.path}: checkpoint of an interrupted fit: continue it with resume=True "
            "(--resume), or remove the file to start again"
        )


def second_pass_path(path: str | Path) -> Path:
    """Return the checkpoint file of the second pass."""
    return Path(path).with_name(f"{Path(path).name}.second")


class ResumablePass:
    """One pass over the items: saves its sums at an interval and on errors, and resumes from them.

    Without a checkpoint it only counts.

    settings: everything that decides the sums, by name; a file with other settings is refused.
    """

    def __init__(
        self, checkpoint: Checkpoint | None, settings: Mapping[str, Any], sums: PassSums
    ) -> None:
        self.path = None if checkpoint is None else Path(checkpoint.path)
        self.settings, self.sums = dict(settings), sums
        self.next_item = 0
        self.skipped: list[int] = []  # numbers of the items left out
        self._item_hash = ""  # of the last item of the run that is resumed
        self._last_item: Any = None
        self._saved_at = monotonic()
        self._saved_items = 0
        if checkpoint is None or self.path is None:
            return
        self._every_seconds = checkpoint.every_seconds
        checkpoint.check_path(self.settings)
        check_writable(self.path)
        remove_leftovers(self.path)
        if checkpoint.resume and self.path.exists():
            self._load(self.path)

    def __enter__(self) -> ResumablePass:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, _SaveError) and not self.sums.is_partial:
            with suppress(BoxcovError):  # the original error is more useful
                self.save()

    def remaining(self, items: Items) -> Iterator[tuple[int, Any]]:
        """Yield the items still to be processed.

        The last item of a resumed run is read again, to check that the data are the same.
        """
        remaining = items.starting_at(max(self.next_item - 1, 0))
        if self.next_item:
            item = next(remaining, (None, None))[1]
            if hash_item(item) != self._item_hash:
                raise BoxcovError(
                    f"{self.path}: made from other data: item {self.next_item - 1} has changed. "
                    "Give the same frames in the same order, or remove the file to start again"
                )
            self._last_item = item
        return remaining

    def item_done(self, number: int, item: Any, is_left_out: bool = False) -> None:
        """Record that an item was added, or left out; save if it is time."""
        self.sums.is_partial = True  # an interrupt between these lines must not be saved
        self.skipped += [number] if is_left_out else []
        self.next_item, self._last_item = number + 1, item
        self.sums.is_partial = False
        if self.path is not None and monotonic() - self._saved_at >= self._every_seconds:
            self.save()

    def save(self) -> None:
        """Write the file, unless it is up to date."""
        if self.path is None or self.next_item == self._saved_items:
            return
        tensors, state = self.sums.state()
        header = {
            "format": FORMAT,
            "version": __version__,
            "settings": self.settings,
            "next": self.next_item,
            "skipped": self.skipped,
            "item_sha256": hash_item(self._last_item),
            **state,
        }
        try:
            write_safetensors(self.path, tensors, {_KEY: to_json(header)})
        except BoxcovError as error:
            raise _SaveError(
                f"{error}: the file holds {self._saved_items} earlier items; free some space or "
                "choose another path, and continue with resume=True (--resume)"
            ) from error
        self._saved_items, self._saved_at = self.next_item, monotonic()

    def _load(self, path: Path) -> None:
        with open_tensors(path, *_KIND) as (header, file):
            if header["format"] != FORMAT:
                raise BoxcovError(
                    f"written by boxcov {header['version']} in format {header['format']}, "
                    f"this version reads {FORMAT}"
                )
            _check_settings(header["settings"], self.settings)
            item_hash = str(header["item_sha256"])
            skipped = [check_count(number) for number in header["skipped"]]
            next_item = check_count(header["next"])
            self.sums.load_state(file, header)
        self.next_item = self._saved_items = next_item
        self.skipped, self._item_hash = skipped, item_hash


class _SaveError(BoxcovError):
    """The checkpoint could not be written."""


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
