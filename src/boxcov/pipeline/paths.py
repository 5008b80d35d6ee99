"""Where a command writes: its output, and the files that exist only until the output does."""

from __future__ import annotations

from pathlib import Path

from boxcov.errors import BoxcovError
from boxcov.files import check_writable, make_folder


def check_output(out: Path, folder: bool = False) -> None:
    """Raise unless the file (or ``folder``) ``out`` can be written; called before the work starts.

    >>> check_output(Path("nowhere/posterior.safetensors"))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere/posterior.safetensors: there is no folder nowhere: create it
    """
    if folder and out.is_file():
        raise BoxcovError(f"{out}: is a file; the format kitti writes a folder")
    if not out.name or (out.is_dir() and not folder):
        raise BoxcovError(f"{out}: is a folder; give the name of a file")
    if not out.absolute().parent.is_dir():
        raise BoxcovError(f"{out}: there is no folder {out.parent}: create it")
    if out.is_dir():
        make_folder(out)
    else:
        check_writable(out)


def checkpoint_path(out: Path) -> Path:
    """Return the checkpoint of the fit that writes ``out``.

    >>> str(checkpoint_path(Path("posterior.safetensors")))
    'posterior.safetensors.checkpoint'
    """
    return out.with_name(f"{out.name}.checkpoint")


def blocks_folder(out: Path) -> Path:
    """Return the folder with the finished blocks of the run that writes ``out``.

    >>> str(blocks_folder(Path("d.safetensors")))
    'd.safetensors.parts'
    """
    return out.with_name(f"{out.name}.parts")
