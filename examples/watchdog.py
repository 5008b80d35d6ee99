"""A watchdog for a stream of results: it raises an alarm if no result arrives in time.

    boxcov stream --source FOLDER --watch | python examples/watchdog.py --budget-ms 200

It is a separate process, so it also notices a detector that hangs or has died. Lines pass through
unchanged. An alarm is a line on stderr: replace it by what your vehicle must do. The exit code is 1
after any alarm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from queue import Empty, Queue
from threading import Thread
from typing import TextIO


def watch(
    lines: Iterable[str], budget: float, grace: float, alarm: Callable[[str], None]
) -> Iterable[str]:
    """Yield the lines; call ``alarm`` once for every wait of more than ``budget`` seconds.

    The wait for the first line may take ``grace`` seconds.
    """
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
            line = queue.get()  # one alarm per wait
        if line is None:
            return
        number, limit = number + 1, budget
        yield line


def main(source: TextIO = sys.stdin) -> int:
    parser = argparse.ArgumentParser(description="Raise an alarm if no result arrives in time.")
    parser.add_argument(
        "--budget-ms", type=float, required=True, help="longest wait between two results"
    )
    parser.add_argument(
        "--grace-ms",
        type=float,
        default=60_000.0,
        help="longest wait for the first result, while the model loads",
    )
    given = parser.parse_args()
    alarms = 0

    def alarm(message: str) -> None:
        nonlocal alarms
        alarms += 1
        print(f"ALARM: {message}", file=sys.stderr, flush=True)

    for line in watch(
        iter(source.readline, ""), given.budget_ms / 1e3, given.grace_ms / 1e3, alarm
    ):
        print(line, end="", flush=True)
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
