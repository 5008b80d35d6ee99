"""Text for the terminal: names and messages from files cannot control it.

Everything that a command prints goes through this module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from shutil import get_terminal_size
from typing import Any, TextIO

from boxcov._files.output_file import to_json, without_nan
from boxcov._files.plain_text import printable
from boxcov.errors import BoxcovError


@contextmanager
def _printing(file: TextIO | None) -> Iterator[TextIO]:
    """Yield stdout, or another file, and flush it."""
    out = sys.stdout if file is None else file
    try:
        if isinstance(out, TextIOWrapper):
            out.reconfigure(errors="backslashreplace")  # a terminal that is not in UTF-8
        yield out
        out.flush()
    except OSError as error:
        raise output_error(error, out) from None


def say(text: object, file: TextIO | None = None, one_line: bool = False) -> None:
    """Print a text to stdout, or to another file, at once."""
    with _printing(file) as out:
        print(printable(text, one_line), file=out)


def replace_line(text: str, terminal: TextIO) -> None:
    """Write a text over the line of a terminal on which the cursor is, cut to its width."""
    shown = printable(text, one_line=True)[: get_terminal_size().columns - 1]
    with suppress(OSError, UnicodeEncodeError):  # progress alone is lost
        print(f"\r\x1b[K{shown}", end="", file=terminal, flush=True)


def output_error(error: OSError, out: TextIO) -> BaseException:
    """Return the error of a stream that cannot be written: exit code 141 if nobody reads it.

    Nothing is written to it any more, or Python would write the buffer once more at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    if isinstance(error, BrokenPipeError):
        return SystemExit(141)
    name = str(getattr(out, "name", "stdout")).strip("<>")
    return BoxcovError(f"{name} cannot be written ({error.strerror or error}): free some space")


def say_json(value: Any, file: TextIO | None = None) -> None:
    """Print a value as JSON in one line; numbers that are not finite are null."""
    say(to_json(without_nan(value)), file)


def new_table(title: str, *columns: str) -> Any:
    """Return an empty ``rich.table.Table`` without lines between its rows and columns."""
    from rich.table import Table

    return Table(*columns, title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)


def say_table(table: Any, file: TextIO | None = None) -> None:
    """Print a table to stdout, or to another file; no name in it is taken as markup."""
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **{**options, "markup": False})

    with _printing(file) as out:
        PlainConsole(file=out, markup=False, highlight=False, emoji=False).print(table)
