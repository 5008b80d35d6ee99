"""``boxcov monitor``: do the frames look like the usual ones?"""

from __future__ import annotations

import sys
from typing import Any

from boxcov.errors import counted
from boxcov.pipeline.options import MonitorCommand
from boxcov.pipeline.terminal import say


def monitor(options: MonitorCommand) -> None:
    """Compare each frame with usual ones and raise an alarm at a chosen false-alarm rate.

    Each line holds the p-value of the frame, whether that is an alarm, the accumulated evidence of
    a change, and the reasons in words. The totals are printed on stderr.
    """
    from boxcov.pipeline.monitor import run

    totals: dict[str, Any] = {}
    try:
        run(options, sys.stdout, totals)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if totals:
            numbers = (counted(totals[f"{noun}s"], noun) for noun in ("frame", "alarm", "change"))
            say(f"boxcov: {', '.join(numbers)}, {totals['unreadable']} unreadable", sys.stderr)
