"""Where a command writes: its output, and the files that exist only until the output does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from glob import escape
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from boxcov._files.output_file import check_writable, hold, make_folder, remove_leftovers
from boxcov.errors import BoxcovError

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


def holds_output(run: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Decorate the ``run`` of a command: no other process writes ``options.out`` meanwhile.

    The output can be written, or it is an error before the work. A file that exists is replaced
    only with ``options.force``, or if a run that was interrupted after it wrote is continued.
    What a killed run left of it is removed. Under torchrun rank 0 holds it for all.
    """

    @wraps(run)
    def holding(options: C, /, *args: P.args, **keywords: P.kwargs) -> T:
        out: Path | None = options.out  # type: ignore[attr-defined]
        if out is not None:
            # True: the file of boxcov monitor is replaced after each frame
            may_replace = getattr(options, "force", True) or (
                getattr(options, "resume", False) and is_unfinished(out)
            )
            check_output(out, may_replace, folder=getattr(options, "format", "") == "kitti")
        if out is None or os.environ.get("RANK", "0") != "0":
            return run(options, *args, **keywords)
        with hold(out.absolute()):
            remove_leftovers(out)
            return run(options, *args, **keywords)

    return holding


@contextmanager
def hold_folder(path: Path) -> Iterator[Path]:
    """Create a folder if needed, and hold it: no other process writes into it meanwhile."""
    make_folder(path)
    with hold(path.absolute() / "boxcov"):
        yield path


def check_output(out: Path, may_replace: bool, folder: bool = False) -> None:
    """Raise unless the file (or ``folder``) ``out`` can be written, before the work starts.

    may_replace: whether there may be a file, or a folder with files, of that name.
    """
    if folder and out.is_file():
        raise BoxcovError(f"{out}: is a file; give the name of a folder")
    if not out.name or (out.is_dir() and not folder):
        raise BoxcovError(f"{out}: is a folder; give the name of a file")
    if not out.absolute().parent.is_dir():
        raise BoxcovError(f"{out}: there is no folder {out.parent}: create it")
    if out.is_dir():
        make_folder(out)
    else:
        check_writable(out)
    if output_exists(out) and not may_replace:
        raise BoxcovError(f"{out}: exists: replace it with --force, or give another name")


def output_exists(out: Path) -> bool:
    """Return whether there is a file, or a folder with files, of this name."""
    return out.is_file() or (out.is_dir() and any(out.iterdir()))


def refuse_other_settings(
    path: Path, stored: Mapping[str, Any], given: Mapping[str, Any], advice: str
) -> None:
    """Raise if the file ``path``, which a resumed run would use, was made with other settings."""
    for name, value in given.items():
        before = stored.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):  # name the one that differs
            refuse_other_settings(path, before, value, advice)
        if before != value:
            raise BoxcovError(
                f"{path}: exists, made with other options ({name} was {before!r}, now {value!r}): "
                f"{advice}"
            )


def checkpoint_path(out: Path) -> Path:
    """Return the checkpoint of the fit or training that writes ``out``.

    Other ranks of a fit append their number.
    """
    return out.parent / f"{out.name}.checkpoint"


def blocks_path(out: Path) -> Path:
    """Return the folder of the finished blocks of the run that writes ``out``."""
    return out.parent / f"{out.name}.parts"


def is_unfinished(out: Path) -> bool:
    """Return whether there is something that ``--resume`` continues with."""
    checkpoints = out.parent.glob(f"{escape(checkpoint_path(out).name)}*")  # all ranks and passes
    return any(checkpoints) or blocks_path(out).exists()
