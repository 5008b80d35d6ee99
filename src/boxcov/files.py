"""Atomic writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from boxcov.errors import BoxcovError


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` at the end.

    A crash or a full disk leaves the previous file.

    >>> import tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(f"{folder}/x.txt") as temporary:
    ...         _ = temporary.write_text("whole")
    ...     os.listdir(folder)
    ['x.txt']
    """
    path = Path(path)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as handle:
            temporary = Path(handle.name)
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        raise BoxcovError(
            f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush the renaming to the disk: without it a power cut can bring the old file back."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: Path) -> None:
    """Raise if no file can be created at ``path``: before the work, not after it.

    >>> check_writable(Path("nowhere/fit.checkpoint"))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere/fit.checkpoint: cannot be written (No such file or directory)
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BoxcovError(f"{path}: cannot be written ({error.strerror or error})") from None


def make_folder(path: Path) -> Path:
    """Create a folder if needed and return it; raise if no file can be created in it.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     make_folder(Path(folder) / "a" / "b").is_dir()
    True
    >>> make_folder(Path(__file__) / "tables")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: ...files.py/tables: cannot be written (Not a directory)
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise BoxcovError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that a killed ``atomic_write`` of ``path`` left.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / ".x.txt.abcd_123").write_text("hal")
    ...     remove_leftovers(Path(folder) / "x.txt")
    ...     os.listdir(folder)
    []
    """
    start = f".{path.name}."
    for found in path.parent.iterdir():
        # tempfile appends 8 random characters
        if found.name.startswith(start) and len(found.name) == len(start) + 8:
            found.unlink(missing_ok=True)


def write_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors by name and one metadata entry: the order of several would be random."""
    assert len(metadata) == 1
    # clones, because safetensors refuses tensors that share memory
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with atomic_write(path) as temporary:
        # save_file would write to another temporary file, which a kill would leave behind
        temporary.write_bytes(save(plain, metadata=dict(metadata)))
