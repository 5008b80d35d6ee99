"""Writing files so that they are there whole or not at all, and reading damaged ones so that nothing but a clear error comes out."""

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

# what readers raise on damaged files; deep nesting is a RecursionError, which is a RuntimeError
DAMAGE = (
    SafetensorError,
    LookupError,
    TypeError,
    ValueError,
    OSError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    EOFError,
)


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Whatever a damaged file makes its reader raise, as one error that names the file.

    >>> with reading("x.json", "a list of frames"):
    ...     [1, 2][3]
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: x.json: not a list of frames, or a damaged one (IndexError: list index out of range)
    """
    try:
        yield
    except FileNotFoundError:
        raise BoxcovError(f"{path}: no such file") from None
    except BoxcovError as error:
        if str(path) in str(error):
            raise
        raise BoxcovError(f"{path}: {error}") from None
    except DAMAGE as error:
        raise BoxcovError(
            f"{path}: not {what}, or a damaged one ({type(error).__name__}: {error})"
        ) from None


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A file beside ``path`` to write to, which takes its place at the end: a crash or a full disk leaves what was there before.

    >>> import tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/x.txt") as temporary:
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
    """The new name itself, onto the disk: without it a power cut can bring the old file back."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: Path) -> None:
    """Whether a file can be made there: better before an hour's work than after it.

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


def made_folder(path: Path) -> Path:
    """A folder that files can be made in, made if need be.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made_folder(Path(folder) / "a" / "b").is_dir()
    True
    >>> made_folder(Path(__file__) / "tables")
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
    """What ``replacing`` had begun to write beside ``path`` when it was killed.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / ".x.txt.abcd_123").write_text("hal")
    ...     remove_leftovers(Path(folder) / "x.txt")
    ...     os.listdir(folder)
    []
    """
    start = f".{path.name}."
    for found in path.parent.iterdir():
        if (
            found.name.startswith(start) and len(found.name) == len(start) + 8
        ):  # the letters that tempfile draws
            found.unlink(missing_ok=True)


def write_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Tensors by name and a text by its key, in one file: with more keys than one, their order in the file would be by chance.

    >>> import torch, tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(f"{folder}/x.safetensors", {"x": torch.zeros(2)}, {"made": "by hand"})
    ...     os.listdir(folder)
    ['x.safetensors']
    """
    assert len(metadata) == 1
    # a clone of each: safetensors refuses tensors that share memory
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        # not save_file, which writes to a file of its own making beside: a kill would leave it, under a name that is nobody's
        temporary.write_bytes(save(plain, metadata=dict(metadata)))
