"""``boxcov fit``: fit the posterior of a detector's weights."""

from __future__ import annotations

from typing import Any

from boxcov.cli.command import Output
from boxcov.errors import counted
from boxcov.pipeline.options import FitCommand

_AUTO = """
  the frames set it where they determine at least half of a layer's weights; in other layers the
  prior is as wide as the weights are large (their root mean square)"""

# Of the weights. Standard deviations of boxes are then within 8 % of the prior's: measured on
# CenterPoint small, TinyCenter and YOLOX-Nano, where 10 % are reached from 1.4e-3 to 6e-3.
_FEW_DETERMINED = 1e-3


def fit(options: FitCommand) -> Output | None:
    """Fit the posterior of a detector's weights to its training frames.

    Run once, offline: one pass over the frames, or two with --ekfac.
    """
    from time import perf_counter

    from boxcov._torch.distributed import is_main_process
    from boxcov.pipeline.fit import run, summarize
    from boxcov.pipeline.progress import ProgressBar

    began = perf_counter()
    with ProgressBar("fitting", "frames" if options.batch == 1 else "batches") as progress:
        posterior = run(options, progress)
    if not is_main_process():
        return None
    report = {"out": str(options.out), **summarize(posterior, (perf_counter() - began) / 60)}
    return Output(report, [_format(report)])


def _format(report: dict[str, Any]) -> str:
    frames = counted(report["frames"], "frame")
    if report["skipped"]:
        frames += f" ({report['skipped']} skipped)"
    if report["n_data"] != report["frames"]:
        frames += f", standing for {report['n_data']:g}"
    minutes = report["minutes"]
    time = f"{60 * minutes:.3g} s" if minutes < 2 else f"{minutes:.0f} minutes"
    determined, weights, warning = report["determined"], report["weights"], ""
    if determined is not None and determined < _FEW_DETERMINED * weights:
        warning = (
            f"  the frames determine {determined:.3g} of {weights:,} weights: the prior may decide "
            "most of\n  the covariances; compare with those of more frames\n"
        )
    error = f"; no variance more than {100 * report['error']:.2f} % off" if report["error"] else ""
    return (
        f"posterior of {counted(report['layers'], 'layer')} ({report['depth']}) from {frames}, "
        f"in {time}\n"
        f"prior precision: {report['prior']}{_AUTO if 'auto' in str(report['prior']) else ''}\n"
        f"{warning}{report['storage']}{error}\n"
        f"written to {report['out']}"
    )
