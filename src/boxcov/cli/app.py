"""The command line: one function a verb in ``boxcov.cli``. Needs the packages of ``pip install boxcov[cli]``."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TextIO

try:
    import typer
except ImportError:
    sys.exit("the boxcov command needs typer, rich and matplotlib: pip install 'boxcov[cli]'")

from boxcov.cli.bench import bench
from boxcov.cli.calibrate import calibrate
from boxcov.cli.check import check
from boxcov.cli.convert import convert
from boxcov.cli.demo import demo
from boxcov.cli.evaluate import evaluate
from boxcov.cli.export import export
from boxcov.cli.fit import fit
from boxcov.cli.predict import predict
from boxcov.cli.reproduce import reproduce
from boxcov.cli.stream import stream
from boxcov.cli.train import train
from boxcov.errors import BoxcovError, BoxcovWarning

EXAMPLES: dict[Callable[..., None], str] = {
    fit: "boxcov fit --detector centerpoint:small --data simulated:clear --count 64 --depth head --out posterior.safetensors",
    predict: "boxcov predict --detector centerpoint:small --posterior posterior.safetensors --data simulated:rain --count 20 --out rain.safetensors",
    convert: "boxcov convert rain.safetensors --format csv --out rain.csv",
    evaluate: "boxcov evaluate exact.safetensors nms.safetensors --out report.html",
    calibrate: "boxcov calibrate --posterior posterior.safetensors --data simulated:clear --count 40 --out calibrated.safetensors",
    check: "boxcov check --detector centerpoint:small --data simulated:clear",
    train: "boxcov train --config small --data simulated:clear --device cuda --out small.safetensors",
    bench: "boxcov bench --boxes 10 --boxes 100 --samples 10",
    export: "boxcov export --detector centerpoint:small --posterior posterior.safetensors --out centerpoint.onnx",
    stream: "boxcov stream sweeps/LIDAR_TOP --posterior posterior.safetensors > boxes.jsonl",
    reproduce: "boxcov reproduce --quick --out reproduction",
    demo: "boxcov demo --out demo",
}


def main() -> None:
    """Run the command line: 0 where all went well, 1 with one line on stderr for an error of the user's, 2 for a wrong option.

    130 after SIGINT, 143 after SIGTERM: as shells have it, with all that a ``finally`` cleans up.
    """
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Covariances for the boxes of a detector.",
    )
    app.callback()(_callback)
    for verb, example in EXAMPLES.items():
        app.command(epilog=f"Example: {example}")(verb)
    before = signal.signal(signal.SIGTERM, _terminate)
    with warnings.catch_warnings():
        warnings.showwarning = _show
        try:
            app()
        except BoxcovError as error:
            sys.exit(f"boxcov: {error}")
        finally:
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _callback() -> None:
    """For every box of a frozen object detector, the covariance of that box under what the detector does not know."""


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as a user reads it; those of other packages with their place."""
    where = (
        "boxcov: "
        if issubclass(category, BoxcovWarning)
        else f"{filename}:{lineno}: {category.__name__}: "
    )
    print(f"{where}{message}", file=sys.stderr if file is None else file)


if __name__ == "__main__":
    main()
