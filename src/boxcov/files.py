"""Writing files so that they are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from boxcov.errors import BoxcovError


def write_safetensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write beside the target, then rename: a crash or a full disk leaves what was there before.

    >>> import torch, tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(f"{folder}/x.safetensors", {"x": torch.zeros(2)}, {"made": "by hand"})
    ...     os.listdir(folder)
    ['x.safetensors']
    """
    path = Path(path)
    # a clone of each: safetensors refuses tensors that share memory
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as handle:
            temporary = Path(handle.name)
        save_file(plain, temporary, metadata=dict(metadata))
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise BoxcovError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
