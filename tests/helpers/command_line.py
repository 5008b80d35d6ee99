"""The command line in this process, and a detector so small that its verbs take a second."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from boxcov.cli import app as cli
from boxcov.detectors import centerpoint
from helpers.centerpoint_cases import detector_of, pillar_config


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


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


def small_network(folder: Path, seed: int = 0) -> str:
    """The word for a CenterPoint of 12.8 m that reports a few boxes of every task."""
    config = pillar_config()
    config = replace(config, reporting=replace(config.reporting, threshold=0.1, max_boxes=3))
    centerpoint.save(detector_of(config, seed), folder / f"net{seed}.safetensors")
    return f"centerpoint:{folder}/net{seed}.safetensors"
