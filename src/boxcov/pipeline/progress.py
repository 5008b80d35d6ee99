"""How far a long piece of work is: a bar in a terminal, a plain line every few seconds in a log, nothing for what is done at once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

QUIET = 2.0  # seconds before anything is shown
EVERY = 5.0  # seconds between two plain lines


class Progress:
    """``with Progress("fitting") as progress: ... progress(done, total)``: description, rate and remaining time, on stderr.

    >>> ticks = iter([0.0, 1.0, 9.0, 10.0, 17.0])
    >>> with Progress("fitting", stream=sys.stdout, clock=lambda: next(ticks)) as progress:
    ...     for done in (1, 17, 18, 33):
    ...         progress(done, 65)
    fitting: 17 of 65 frames, 2 a second, 0:24 left
    fitting: 33 of 65 frames, 2 a second, 0:16 left
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
        self.said = self.began - EVERY
        self.first: tuple[float, int] | None = None
        self.bars: tuple[Bars, TaskID] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        """So many are done, of so many if that is known; the first call may start at more than 0, after a resumed run."""
        if os.environ.get("RANK", "0") != "0":  # of the processes of torchrun, one speaks
            return
        now = self.clock()
        if self.first is None:
            self.first = now, done
        seconds, number = now - self.first[0], done - self.first[1]
        rate = number / seconds if seconds > 0 and number > 0 else None
        if now - self.began >= QUIET:
            if self.stream.isatty():
                self._draw(done, total, note, rate)
            elif now - self.said >= EVERY:
                self.said = now
                parts = [
                    f"{self.what}: {done}{'' if total is None else f' of {total}'} {self.unit}",
                    note,
                    pace(rate),
                ]
                if rate is not None and total is not None:
                    parts.append(f"{clock_face((total - done) / rate)} left")
                print(", ".join(part for part in parts if part), file=self.stream, flush=True)
        if total is not None and done >= total:
            self.close()

    def _draw(self, done: int, total: int | None, note: str, rate: float | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        if self.bars is None:
            shown = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[pace]}"),
            )
            bars = Bars(
                *shown, TimeRemainingColumn(), console=Console(file=self.stream), transient=True
            )
            bars.start()
            self.bars = bars, bars.add_task(self.what, total=total, pace="")
        bars, task = self.bars
        text = f"{self.what}, {note}" if note else self.what
        bars.update(
            task, completed=done, total=total, description=text, pace=pace(rate), refresh=True
        )

    def close(self) -> None:
        if self.bars is not None:
            self.bars[0].stop()
            self.bars = None


def pace(rate: float | None) -> str:
    """A rate for people.

    >>> pace(12.34), pace(0.25), pace(None)
    ('12 a second', '4 s each', '')
    """
    if rate is None:
        return ""
    return f"{rate:.2g} a second" if rate >= 1 else f"{1 / rate:.2g} s each"


def clock_face(seconds: float) -> str:
    """
    >>> clock_face(24.4), clock_face(3725)
    ('0:24', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Steps:
    """Several pieces of work one after another, each with its own progress: ``step("fit")`` ends the last one and begins the next.

    >>> with Steps(stream=sys.stdout) as step:
    ...     fitting = step("fit")
    ...     fitting(1, 2)
    ...     step.named("predict", 1, 2)
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream
        self.now: Progress | None = None

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def __call__(self, what: str) -> Progress:
        self._end()
        self.now = Progress(what, stream=self.stream)
        return self.now

    def named(self, what: str, done: int, total: int) -> None:
        """Progress of a piece of work that is named each time."""
        if self.now is None or self.now.what != what:
            self(what)
        assert self.now is not None
        self.now(done, total)

    def _end(self) -> None:
        if self.now is not None:
            self.now.close()
