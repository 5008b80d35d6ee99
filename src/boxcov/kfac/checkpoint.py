"""What a fit has counted so far, in one file: a run that was cut off goes on from there and ends in the same posterior.

The file is replaced as a whole, at an interval, and between two items only: it never holds part of an item. Interrupts (SIGINT, SIGTERM) wait
for the end of the item under way, and leave a checkpoint.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

from safetensors import safe_open

from boxcov.errors import BoxcovError
from boxcov.files import DAMAGE, check_writable, remove_leftovers, write_safetensors
from boxcov.kfac.counts import Counts, whole
from boxcov.kfac.items import Items, digest
from boxcov.version import __version__

FORMAT = 1
_KEY = "boxcov.checkpoint"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Keeper:
    """Keeps ``counts`` in the file ``path``, at most every ``every`` seconds; without a path it only counts.

    settings: what decides the sums, by name; a file made with others is refused.

    >>> import tempfile, boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/fit.checkpoint"
    ...     whole = boxcov.fit(TinyCenter(), shapes.frames(count=3), checkpoint=path, every=0)
    ...     again = boxcov.fit(TinyCenter(), shapes.frames(count=3), checkpoint=path, resume=True)  # reads one frame, to compare it
    >>> again.loss == whole.loss
    True
    """

    def __init__(
        self,
        path: str | Path | None,
        every: float,
        resume: bool,
        settings: Mapping[str, Any],
        counts: Counts,
    ) -> None:
        check(path, every, resume)
        self.path = None if path is None else Path(path)
        self.every, self.settings, self.counts = every, dict(settings), counts
        self.next = 0  # number of the item to go on with
        self.skipped: list[int] = []  # numbers of the items left out
        self._known_digest = ""  # of the last item that a run before this one counted
        self._last: Any = None  # the last item counted
        self._saved = monotonic()
        self._kept = 0  # what the file goes on with
        self._waiting: int | None = None  # a signal that came
        self._before: dict[int, Any] = {}
        if self.path is not None:
            check_writable(self.path)
            remove_leftovers(self.path)
            if resume and self.path.exists():
                self._resume(self.path)

    # around the work

    def __enter__(self) -> Keeper:
        if self.path is not None and threading.current_thread() is threading.main_thread():
            heard = [
                number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
            ]  # nohup means what it says
            self._before = {number: signal.signal(number, self._wait) for number in heard}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, _CannotSave) and not self.counts.torn:
            with suppress(BoxcovError):  # the error under way says more
                self.save()
        self._release()
        if kind is None and self._waiting is not None:
            self._interrupt()

    def items(self, items: Items) -> Iterator[tuple[int, Any]]:
        """The items still to be counted. The last one of a run that was cut off is read again, to see that the data are the same."""
        found = items.after(max(self.next - 1, 0))
        if self.next:
            item = next(found, (None, None))[1]
            if digest(item) != self._known_digest:
                raise BoxcovError(
                    f"{self.path}: of other data: item {self.next - 1} is not the one that was counted. Give the same frames in the same order, "
                    "or remove that file to start anew"
                )
            self._last = item
        return found

    def counted(self, number: int, item: Any) -> None:
        """``number`` is done, into the sums or among the skipped; this is where the file is written, and where interrupts come through."""
        self.next, self._last = number + 1, item
        if self.path is None:
            return
        if self._waiting is not None:
            self.save()
            self._release()
            self._interrupt()
        if monotonic() - self._saved >= self.every:
            self.save()

    # signals

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is not None:  # asked twice: at once
            self._release()
            self._interrupt()
        self._waiting = number

    def _release(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _interrupt(self) -> None:
        assert self._waiting is not None
        number, self._waiting = self._waiting, None
        signal.raise_signal(number)  # to whoever handled it before

    # the file

    def save(self) -> None:
        """Write the file, unless it holds all that was counted."""
        if self.path is None or self.next == self._kept:
            return
        tensors, more = self.counts.packed()
        about = {
            "format": FORMAT,
            "version": __version__,
            "settings": self.settings,
            "next": self.next,
            "skipped": self.skipped,
            "item_sha256": digest(self._last),
            **more,
        }
        try:
            write_safetensors(self.path, tensors, {_KEY: json.dumps(about)})
        except BoxcovError as error:
            kept = (
                f"the {self._kept} items before are kept there" if self._kept else "nothing is kept"
            )
            raise _CannotSave(
                f"{error}: {kept}; make room or give another place, and go on with resume=True (--resume)"
            ) from error
        self._kept, self._saved = self.next, monotonic()

    def _resume(self, path: Path) -> None:
        """The sums of a run that was cut off, into the accumulator."""
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[_KEY])
                if about["format"] != FORMAT:
                    raise BoxcovError(
                        f"written by boxcov {about['version']} in format {about['format']}, this one reads {FORMAT}"
                    )
                _compare(about["settings"], self.settings)
                known, skipped, number = (
                    str(about["item_sha256"]),
                    [whole(each) for each in about["skipped"]],
                    whole(about["next"]),
                )
                self.counts.unpack(file, about)
        except BoxcovError as error:
            raise BoxcovError(f"{path}: {error}") from None
        except DAMAGE as error:
            raise BoxcovError(
                f"{path}: not a checkpoint of a fit, or a damaged one ({type(error).__name__}: {error}): remove it to start anew"
            ) from None
        self.next = self._kept = number
        self.skipped, self._known_digest = skipped, known


class _CannotSave(BoxcovError):
    """The checkpoint could not be written."""


def check(path: str | Path | None, every: float, resume: bool) -> None:
    """Refuse what cannot be kept or gone on with, before any work.

    >>> check(None, 60.0, True)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: resume=True goes on from a file: give it as checkpoint=PATH
    """
    if not every >= 0:  # nor a NaN
        raise BoxcovError(f"every must be a number of seconds, at least 0, got {every}")
    if path is None and resume:
        raise BoxcovError("resume=True goes on from a file: give it as checkpoint=PATH")
    if path is not None and not resume and Path(path).exists():
        raise BoxcovError(
            f"{path}: of a fit that was cut off: go on with it by resume=True (--resume), or remove that file to start anew"
        )


def _compare(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    differs = [name for name in here if there.get(name) != here[name]]
    if differs:
        changes = "; ".join(
            f"{name} was {there.get(name)!r}, is {here[name]!r}" for name in differs
        )
        raise BoxcovError(
            f"of another fit ({changes}): give the same again, or remove that file to start anew"
        )
