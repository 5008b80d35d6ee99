"""``boxcov monitor``: do the frames look like the usual ones?"""

from __future__ import annotations

import sys

from boxcov.errors import counted
from boxcov.pipeline.options import MonitorCommand
from boxcov.pipeline.terminal import say


def monitor(options: MonitorCommand) -> None:
    """Compare each frame with usual ones and raise an alarm at a chosen false-alarm rate.

    Each line holds the p-value of the frame, whether that is an alarm, the accumulated evidence of
    a change, and the reasons in words. The totals are printed on stderr.
    """
    from boxcov.pipeline.monitor import run

    try:
        totals = run(options, sys.stdout)
    except KeyboardInterrupt:
        sys.exit(130)
    say(
        f"boxcov: {counted(totals['frames'], 'frame')}, {counted(totals['alarms'], 'alarm')}, "
        f"{counted(totals['changes'], 'change')}, {totals['unreadable']} unreadable",
        file=sys.stderr,
    )
