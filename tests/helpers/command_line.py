"""The command line in this process, and a detector so small that its verbs take a second."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from boxcov.cli import app as cli
from boxcov.detectors import centerpoint
from helpers.centerpoint_cases import detector_of, pillar_config


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def report(self) -> Any:
        """What the command printed with --json, or as one line of a stream."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """The lines of a stream."""
        return [json.loads(line) for line in self.out.splitlines()]


def boxcov(*words: object) -> Done:
    """Run ``boxcov WORDS`` as a shell would; a word may hold several, separated by spaces."""
    arguments = [part for word in words for part in str(word).split(" ")]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["boxcov", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
            code: object = 0
        except SystemExit as stop:
            code = stop.code
    if isinstance(code, str):  # as the interpreter does at its end
        err.write(f"{code}\n")
        code = 1
    return Done(int(code or 0), out.getvalue(), err.getvalue())  # type: ignore[call-overload]


def succeed(*words: object) -> Done:
    """Run a command that must not fail."""
    done = boxcov(*words)
    assert done.code == 0, done.out + done.err
    return done


def refuse(*words: object) -> str:
    """Run a command that must fail with an error of the user; return what it says on stderr."""
    done = boxcov(*words)
    assert done.code == 1, done.out + done.err
    return done.err


def small_network(folder: Path, seed: int = 0) -> str:
    """The word for a CenterPoint of 12.8 m that reports a few boxes of every task."""
    config = pillar_config()
    config = replace(config, reporting=replace(config.reporting, threshold=0.1, max_boxes=3))
    centerpoint.save(detector_of(config, seed), folder / f"net{seed}.safetensors")
    return f"centerpoint:{folder}/net{seed}.safetensors"


def small_posterior(folder: Path) -> tuple[str, Path]:
    """The word for a small network, and a file with its posterior."""
    word, out = small_network(folder), folder / "p.safetensors"
    succeed(
        f"fit --detector {word} --out {out} "
        "--count 4 --sweeps 1 --fisher mc --prior-precision 10000.0"
    )
    return word, out
