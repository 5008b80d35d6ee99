"""``boxcov bench``: the time of every method on this machine."""

from __future__ import annotations

import sys

from boxcov.cli.command import Output
from boxcov.pipeline.options import BenchCommand
from boxcov.pipeline.terminal import say


def bench(options: BenchCommand) -> Output:
    """Time every method on the same frames, relative to the plain detector.

    Methods: the exact covariance, MC-GLM and GLM as in the paper, and MC dropout; on a GPU also
    what boxcov.compile makes of the detector and of the exact covariance. With --stages: where the
    time of a frame goes.
    """
    import torch

    from boxcov.pipeline.bench import format_table, run
    from boxcov.pipeline.progress import ProgressBar

    if options.device == "cpu" and not torch.cuda.is_available():
        say("no GPU on this machine: measuring on the CPU", file=sys.stderr)
    with ProgressBar("measuring", "settings") as progress:
        rows = run(options, progress)
    return Output(rows, [format_table(rows)])
