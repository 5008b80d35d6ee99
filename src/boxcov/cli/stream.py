"""``boxcov stream``: frames from a folder or stdin, JSON lines on stdout."""

from __future__ import annotations

import sys

from boxcov.pipeline.options import StreamCommand
from boxcov.pipeline.terminal import say


def stream(options: StreamCommand) -> None:
    """Write the boxes of each frame, with risks and regions, as one JSON line on stdout.

    At the end the latencies are printed on stderr. A frame that cannot be read gives a line with an
    error; the stream continues, and the exit code is 1 at the end.
    """
    from boxcov.pipeline.stream import Latencies, run

    latencies = Latencies()
    for note in options.estimator.shipped_note(options.detector):
        say(f"boxcov: {note}", file=sys.stderr)
    try:
        run(options, sys.stdout, latencies)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        say(f"boxcov: {latencies}", file=sys.stderr)
