"""Progress of long work: a bar in a terminal, a line every few seconds in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, TextIO

from boxcov.pipeline.terminal import rich_console, say
from boxcov.plain_text import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

SILENT_SECONDS = 2.0  # shorter work shows nothing
LOG_SECONDS = 5.0  # between two lines of a log


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
        self._bar: tuple[Bars, TaskID] | None = None

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
            if self.stream.isatty():
                self._draw_bar(done, total, note, rate)
            elif now - self._last_line >= LOG_SECONDS:
                self._last_line = now
                self._print_line(done, total, note, rate)
        if total is not None and done >= total:
            self.close()

    def _print_line(self, done: int, total: int | None, note: str, rate: float | None) -> None:
        count = f"{done}" if total is None else f"{done} of {total}"
        parts = [f"{self.what}: {count} {self.unit}", note, _format_rate(rate)]
        if rate is not None and total is not None:
            parts.append(f"{timedelta(seconds=round((total - done) / rate))} left")
        say(", ".join(part for part in parts if part), self.stream)

    def _draw_bar(self, done: int, total: int | None, note: str, rate: float | None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        if self._bar is None:
            bars = Bars(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}", markup=False),
                TimeRemainingColumn(),
                console=rich_console(self.stream),
                transient=True,
            )
            bars.start()
            self._bar = bars, bars.add_task(printable(self.what), total=total, rate="")
        bars, task = self._bar
        text = printable(f"{self.what}, {note}" if note else self.what, one_line=True)
        rate_text = _format_rate(rate)
        bars.update(
            task, completed=done, total=total, description=text, rate=rate_text, refresh=True
        )

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


def _format_rate(rate: float | None) -> str:
    if rate is None:
        return ""
    return f"{rate:.2g} per second" if rate >= 1 else f"{1 / rate:.2g} s each"


class Steps(AbstractContextManager["Steps"]):
    """The progress of several steps: ``step("fit")`` ends the current step and starts the next."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream
        self.current: ProgressBar | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, what: str, unit: str = "frames") -> ProgressBar:
        self.close()
        self.current = ProgressBar(what, unit, self.stream)
        return self.current

    def named(self, what: str, done: int, total: int) -> None:
        """Show the progress of the step ``what``; another name starts the next step."""
        if self.current is None or self.current.what != what:
            self(what)
        assert self.current is not None
        self.current(done, total)

    def close(self) -> None:
        """End the current step."""
        if self.current is not None:
            self.current.close()
