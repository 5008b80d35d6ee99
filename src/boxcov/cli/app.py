"""The command line of boxcov; it needs the packages of the extra ``cli``."""

from __future__ import annotations

import errno
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TextIO

try:
    import typer
except ImportError:
    sys.exit(
        "the boxcov command needs more packages: pip install typer rich matplotlib scipy pyyaml"
    )

from boxcov.cli.bench import bench
from boxcov.cli.calibrate import calibrate
from boxcov.cli.check import check
from boxcov.cli.command import typer_command
from boxcov.cli.convert import convert
from boxcov.cli.demo import demo
from boxcov.cli.evaluate import evaluate
from boxcov.cli.export import export
from boxcov.cli.fit import fit
from boxcov.cli.monitor import monitor
from boxcov.cli.predict import predict
from boxcov.cli.reproduce import reproduce
from boxcov.cli.stream import stream
from boxcov.cli.train import train
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.pipeline.terminal import output_error, say

EXAMPLES: dict[Callable[..., None], str] = {
    fit: "--detector centerpoint:small --data simulated:clear --count 64 --out p.safetensors",
    predict: "--posterior p.safetensors --data simulated:rain --count 20 --out rain.safetensors",
    convert: "rain.safetensors --format csv --out rain.csv",
    evaluate: "exact.safetensors nms.safetensors --out report.html",
    calibrate: "--posterior p.safetensors --data simulated:clear --count 40 --out c.safetensors",
    check: "--detector centerpoint:small --data simulated:clear",
    train: "--config small --data simulated:clear --device cuda --out small.safetensors",
    bench: "--boxes 10 --boxes 100 --samples 10",
    export: "--detector centerpoint:small --posterior p.safetensors --out centerpoint.onnx",
    stream: "sweeps/LIDAR_TOP --posterior p.safetensors > boxes.jsonl",
    monitor: "boxes.jsonl --usual usual.jsonl --false-alarm-rate 0.01",
    reproduce: "--quick --out reproduction",
    demo: "--out demo",
}  # every command, with the arguments of an example


def build_app() -> typer.Typer:
    """Return the typer application with all commands."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Covariances for the boxes of a detector.",
    )
    app.callback()(_callback)
    for command, arguments in EXAMPLES.items():
        example = f"Example: boxcov {command.__name__} {arguments}"
        app.command(epilog=example)(typer_command(command))
    return app


def main() -> None:
    """Run the command line.

    Exit codes: 0 for success, 1 with one line on stderr for an error of the user, 2 for a wrong
    option, 130 after SIGINT, 141 if nobody reads the output, 143 after SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            build_app()()
        except BoxcovError as error:
            say(f"boxcov: {error}", sys.stderr, one_line=True)
            sys.exit(1)
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            say(f"boxcov: {output_error(error, sys.stdout)}", sys.stderr)  # the help, by typer
            sys.exit(1)
        finally:
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _callback() -> None:
    """Covariances for the boxes of a frozen object detector: how uncertain is each box?"""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning in one line; warnings of other packages with their place."""
    ours = issubclass(category, BoxcovWarning)
    prefix = "boxcov" if ours else f"{filename}:{lineno}: {category.__name__}"
    say(f"{prefix}: {message}", sys.stderr if file is None else file, one_line=True)


if __name__ == "__main__":
    main()
