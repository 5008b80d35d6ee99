"""Writing files so that they are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from boxcov.errors import BoxcovError


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
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as handle:
            temporary = Path(handle.name)
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise BoxcovError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_safetensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Tensors by name and text by key, in one file.

    >>> import torch, tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(f"{folder}/x.safetensors", {"x": torch.zeros(2)}, {"made": "by hand"})
    ...     os.listdir(folder)
    ['x.safetensors']
    """
    # a clone of each: safetensors refuses tensors that share memory
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(plain, temporary, metadata=dict(metadata))
