"""Progress of long work: one line that changes in a terminal, one every few seconds in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TextIO

from boxcov.pipeline.terminal import replace_line, say

SILENT_SECONDS = 2.0  # shorter work shows nothing
LOG_SECONDS = 5.0  # between two lines of a log
BAR = 12  # characters


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A context manager to be called with the number of items done, and the total if known.

    It prints the rate and the remaining time to stderr. Under torchrun only rank 0 prints.
    """

    def __init__(
        self,
        what: str,
        unit: str = "frames",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.unit, self.clock = what, unit, clock
        self.stream = sys.stderr if stream is None else stream
        self.began = clock()
        self._last_line = self.began - LOG_SECONDS
        self._first: tuple[float, int] | None = None  # time and count of the first call
        self._is_shown = False  # a line in the terminal, which is replaced by the next

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        """Show that ``done`` items are done; a resumed run starts above 0."""
        if os.environ.get("RANK", "0") != "0":
            return
        now = self.clock()
        if self._first is None:
            self._first = now, done
        seconds, number = now - self._first[0], done - self._first[1]
        rate = number / seconds if seconds > 0 and number > 0 else None
        if now - self.began >= SILENT_SECONDS:
            line = self._line(done, total, note, rate)
            if self.stream.isatty():
                replace_line(_bar(done, total) + line, self.stream)
                self._is_shown = True
            elif now - self._last_line >= LOG_SECONDS:
                self._last_line = now
                say(line, self.stream)
        if total is not None and done >= total:
            self.close()

    def _line(self, done: int, total: int | None, note: str, rate: float | None) -> str:
        count = f"{done}" if total is None else f"{done} of {total}"
        parts = [f"{self.what}: {count} {self.unit}", note, _format_rate(rate)]
        if rate is not None and total is not None:
            parts.append(f"{timedelta(seconds=round((total - done) / rate))} left")
        return ", ".join(part for part in parts if part)

    def close(self) -> None:
        """Remove the line from a terminal."""
        if self._is_shown:
            replace_line("", self.stream)
            self._is_shown = False


def _bar(done: int, total: int | None) -> str:
    """Return the share that is done as a bar; nothing if the total is unknown.

    >>> _bar(1, 4)
    '[###.........] '
    """
    filled = min(BAR * done // total, BAR) if total else 0
    return f"[{'#' * filled}{'.' * (BAR - filled)}] " if total else ""


def _format_rate(rate: float | None) -> str:
    if rate is None:
        return ""
    number, words = (rate, "per second") if rate >= 1 else (1 / rate, "s each")
    return f"{number:.2g} {words}" if number < 99.5 else f"{number:.0f} {words}"  # not 1.5e+02


class Steps(AbstractContextManager["Steps"]):
    """The progress of several steps: ``step("fit")`` ends the current step and starts the next."""

    def __init__(self) -> None:
        self.current: ProgressBar | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, what: str, unit: str = "frames") -> ProgressBar:
        self.close()
        self.current = ProgressBar(what, unit)
        return self.current

    def close(self) -> None:
        """End the current step."""
        if self.current is not None:
            self.current.close()
