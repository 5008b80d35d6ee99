"""The command line of boxcov; it needs the packages of the extra ``cli``."""

from __future__ import annotations

import errno
import signal
import sys
import warnings
from types import FrameType
from typing import TextIO

try:
    import click
except ImportError:
    sys.exit(
        "the boxcov command needs more packages: pip install click rich matplotlib scipy pyyaml"
    )

from boxcov.cli.bench import bench
from boxcov.cli.calibrate import calibrate
from boxcov.cli.check import check
from boxcov.cli.command import Function, PanelGroup, build_command
from boxcov.cli.convert import convert
from boxcov.cli.demo import demo
from boxcov.cli.evaluate import evaluate
from boxcov.cli.export import export
from boxcov.cli.fit import fit
from boxcov.cli.monitor import monitor
from boxcov.cli.predict import predict
from boxcov.cli.rank import rank
from boxcov.cli.reproduce import reproduce
from boxcov.cli.stream import stream
from boxcov.cli.train import train
from boxcov.errors import BoxcovError, BoxcovWarning, UserCodeError
from boxcov.pipeline.terminal import output_error, replace_line, say
from boxcov.version import __version__

# by the panels of the help: every command, with the arguments of examples
COMMANDS: dict[str, dict[Function, tuple[str, ...]]] = {
    "Use": {
        demo: ("--out demo",),
        predict: (
            "--data simulated:rain --count 20 --out rain.safetensors",
            "--data simulated:clear --count 10 --out clear.safetensors --show clear.gif",
            "--source photos --detector yolox:s.pth --posterior s.safetensors --out b.safetensors",
        ),
        evaluate: ("rain.safetensors --out report.html", "exact.safetensors nms.safetensors"),
        rank: (
            "--by risk --data simulated:crowd --count 20 --out frames.csv",
            "--by disagreement --data nuscenes:ROOT --out frames.csv --boxes labels.csv",
        ),
        convert: ("rain.safetensors --format csv --out rain.csv",),
    },
    "Prepare a detector of your own": {
        check: ("--detector centerpoint:small --data simulated:clear",),
        fit: (
            "--detector centerpoint:small --data simulated:clear --count 64 --out p.safetensors",
        ),
        calibrate: (
            "--posterior p.safetensors --data simulated:clear --count 40 --out c.safetensors",
        ),
    },
    "Deploy": {
        stream: (
            "--source sweeps/LIDAR_TOP > boxes.jsonl",
            "--source drive.mp4 --detector yolox:s.pth --posterior s.safetensors --show boxes.mp4",
        ),
        monitor: ("boxes.jsonl --usual usual.jsonl --false-alarm-rate 0.01",),
        export: ("--detector centerpoint:small --posterior c.safetensors --out centerpoint.onnx",),
    },
    "Research": {
        train: ("--config small --data simulated:clear --device cuda --out small.safetensors",),
        bench: ("--boxes 10 --boxes 100 --samples 10",),
        reproduce: ("--quick --out reproduction",),
    },
}


def build_app() -> PanelGroup:
    """Return the command line with all commands."""
    app = PanelGroup(
        help="How wrong may each box be? Covariances, risks and regions for a detector's boxes.",
        epilog="Start with: boxcov demo",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    for panel, commands in COMMANDS.items():
        for command, examples in commands.items():
            app.add_command(build_command(command, panel, examples))
    about = "Print the version and exit."
    return click.version_option(__version__, message="boxcov %(version)s", help=about)(app)


def main() -> None:
    """Run the command line.

    Exit codes: 0 for success, 1 with one line on stderr for an error of the user (below a
    traceback if the user's own code raised it), 2 for a wrong option, 130 after SIGINT, 141 if
    nobody reads the output, 143 after SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            build_app()(prog_name="boxcov", standalone_mode=False)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(130)
        except BoxcovError as error:
            if isinstance(error, UserCodeError):
                say(error.user_traceback(), sys.stderr)
            say(f"boxcov: {error}", sys.stderr, one_line=True)
            sys.exit(1)
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            say(f"boxcov: {output_error(error, sys.stdout)}", sys.stderr)  # the help, by click
            sys.exit(1)
        finally:
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


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
    out = sys.stderr if file is None else file
    if out.isatty():
        replace_line("", out)  # of the progress
    say(f"{prefix}: {message}", out, one_line=True)


if __name__ == "__main__":
    main()
