"""A watchdog behind a stream of results: an alarm when none came within the budget.

    boxcov stream FOLDER --posterior posterior.safetensors --watch | python examples/watchdog.py --budget-ms 200

It is a process of its own, so that a detector that hangs, is out of memory or has died is noticed as well as one that is slow. Lines go
through as they are. An alarm is a line on stderr; put in its place what your vehicle does then. The exit code is 1 after any alarm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from queue import Empty, Queue
from threading import Thread
from typing import TextIO


def watched(
    lines: Iterable[str], budget: float, grace: float, alarm: Callable[[str], None]
) -> Iterable[str]:
    """The lines as they come. ``alarm`` is called once for every wait of more than ``budget`` seconds, ``grace`` before the first line."""
    queue: Queue[str | None] = Queue()

    def read() -> None:
        for line in lines:
            queue.put(line)
        queue.put(None)

    Thread(target=read, daemon=True).start()
    number, limit = 0, grace
    while True:
        try:
            line = queue.get(timeout=limit)
        except Empty:
            alarm(f"no result within {1e3 * limit:g} ms, after {number} results")
            line = queue.get()  # one alarm a wait
        if line is None:
            return
        number, limit = number + 1, budget
        yield line


def main(source: TextIO = sys.stdin) -> int:
    parser = argparse.ArgumentParser(description="An alarm when no result came within the budget.")
    parser.add_argument(
        "--budget-ms", type=float, required=True, help="longest wait between two results"
    )
    parser.add_argument(
        "--grace-ms",
        type=float,
        default=60_000.0,
        help="longest wait for the first: the model must be loaded",
    )
    given = parser.parse_args()
    alarms = 0

    def alarm(what: str) -> None:
        nonlocal alarms
        alarms += 1
        print(f"ALARM: {what}", file=sys.stderr, flush=True)

    for line in watched(
        iter(source.readline, ""), given.budget_ms / 1e3, given.grace_ms / 1e3, alarm
    ):
        print(line, end="", flush=True)
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
