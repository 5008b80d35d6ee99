"""Write files: regular, complete or not at all, and by one process at a time.

Everything that boxcov writes goes through this module.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boxcov.errors import BoxcovError

if TYPE_CHECKING:
    from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` at the end.

    A crash or a full disk leaves the previous file. Only a regular file is replaced.
    """
    path = Path(path)
    check_replaceable(path)
    with _writing(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.chmod(0o644)
            os.replace(temporary, path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an error of the system into one that names the file."""
    try:
        yield
    except OSError as error:
        raise BoxcovError(f"{path}: cannot be written ({error.strerror or error})") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, which replaces ``path`` as a whole."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def to_json(value: Any, indent: int | None = None, compact: bool = False) -> str:
    """Return a value as JSON, ``compact`` without spaces; raise if it holds a NaN or infinity.

    Numbers of numpy and tensors of one number are written as numbers.

    >>> import numpy as np
    >>> to_json({"samples": np.int64(10)})
    '{"samples": 10}'
    """
    form: dict[str, Any] = {"indent": indent, "separators": (",", ":") if compact else None}
    try:
        return json.dumps(value, **form, allow_nan=False, default=_number)
    except ValueError:
        raise BoxcovError(
            f"NaN or infinite numbers, which JSON cannot express, in {str(value)[:200]}"
        ) from None


def _number(value: Any) -> Any:
    """Return the Python number that an argument of numpy or torch holds."""
    if getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def without_nan(value: Any) -> Any:
    """Return a JSON value with None for numbers that are not finite, as an undefined AUROC.

    >>> without_nan({"AUROC": float("nan"), "share": [0.0, float("inf")]})
    {'AUROC': None, 'share': [0.0, None]}
    """
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as JSON, with null for numbers that are not finite."""
    write_text(path, to_json(without_nan(value), indent=1) + "\n")


def check_replaceable(path: Path) -> None:
    """Raise if ``path`` exists and is not a regular file: a link, pipe or device stays."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # absent, or an error that the writing reports
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder"}
    kinds |= {stat.S_IFSOCK: "a socket"}
    raise BoxcovError(
        f"{path}: cannot be written ({kinds.get(stat.S_IFMT(mode), 'a device')}, not a regular "
        "file): give the name of a regular or a new file"
    )


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold ``path`` for this process; raise and name the holder if another process has it.

    The lock ends with the process, also after a kill: forked workers that outlive it have no part
    in it. Without locks in the file system, or on Windows, nothing is held.
    """
    if fcntl is None:
        yield
        return
    lock = path.with_name(f".{path.name}.lock")
    try:
        handle = _acquire(lock)
    except BlockingIOError:
        holder = lock.read_text() if lock.exists() else ""
        raise BoxcovError(
            f"{path}: {holder or 'another process'} is writing it: wait until it ends, or give "
            "another name"
        ) from None
    except OSError as error:
        raise BoxcovError(f"{path}: cannot be locked ({error.strerror or error})") from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _acquire(lock: Path) -> int:
    """Open and lock the file ``lock``, and write into it who holds it."""
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by a fork
            if lock.exists() and os.fstat(handle).st_ino == lock.stat().st_ino:
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        except OSError as error:
            if error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                return handle
            os.close(handle)
            raise
        os.close(handle)  # its holder has just ended and removed it


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
    """Raise if no file can be created at ``path``: before the work, not after it."""
    check_replaceable(path)
    with _writing(path), tempfile.TemporaryFile(dir=path.parent):
        pass


def make_folder(path: Path) -> Path:
    """Create a folder if needed and return it; raise if no file can be created in it."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that a killed ``atomic_write`` of ``path`` left."""
    start = f".{path.name}."
    for found in path.parent.iterdir():
        # tempfile appends 8 random characters
        if found.name.startswith(start) and len(found.name) == len(start) + 8:
            found.unlink(missing_ok=True)


def write_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors by name and one metadata entry: the order of several would be random."""
    from safetensors.torch import save  # here: ``boxcov --help`` does not need torch

    assert len(metadata) == 1
    # clones, because safetensors refuses tensors that share memory
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with atomic_write(path) as temporary:
        # save_file would write to another temporary file, which a kill would leave behind
        temporary.write_bytes(save(plain, metadata=dict(metadata)))
