"""The state of a module's weights: fingerprint, finiteness, and whether they have changed."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from boxcov.errors import BoxcovError, join_names


def hash_tensor(digest: Any, tensor: Tensor) -> None:
    """Add the dtype, shape and bytes of ``tensor`` to a hashlib ``digest``."""
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def fingerprint(module: nn.Module) -> str:
    """Return the SHA-256 of all floating-point parameters and buffers; equal on every device.

    >>> linear = nn.Linear(2, 3)
    >>> before = fingerprint(linear)
    >>> with torch.no_grad():
    ...     _ = linear.bias.add_(1)
    >>> fingerprint(linear) == before
    False
    """
    digest = sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            digest.update(f"{name} ".encode())
            hash_tensor(digest, tensor)
    return digest.hexdigest()


def check_fingerprint(expected: str, detector: nn.Module, context: str) -> None:
    """Raise if the weights of ``detector`` are not those that a posterior was fitted to."""
    actual = fingerprint(detector)
    if actual != expected:
        raise BoxcovError(
            f"{context}: this posterior was made for weights with the fingerprint {expected}, "
            f"the detector's is {actual}: load the matching weights, or fit a new posterior"
        )


class WeightSnapshot:
    """Tells cheaply whether the tensors or submodules of a module were changed or replaced.

    Compares version counters and addresses. A write through ``.data`` is not noticed;
    ``fingerprint`` notices it, but reads every weight.

    >>> linear = nn.Linear(2, 3)
    >>> snapshot = WeightSnapshot(linear)
    >>> before = snapshot.is_unchanged()
    >>> with torch.no_grad():
    ...     _ = linear.bias.add_(1)
    >>> before, snapshot.is_unchanged()
    (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors = []
        self._children = []
        for each in module.modules():
            scripted = isinstance(each, torch.jit.ScriptModule)  # its dicts are new on each access
            for tensors in (each._parameters, each._buffers):
                owner = dict(tensors.items()) if scripted else tensors
                self._tensors += [
                    (owner, name, t, t.data_ptr(), t._version)
                    for name, t in owner.items()
                    if t is not None
                ]
            if not scripted and each._modules:
                self._children.append((each._modules, list(each._modules.values())))

    def is_unchanged(self) -> bool:
        return all(
            owner.get(name) is t and t.data_ptr() == address and t._version == version
            for owner, name, t, address, version in self._tensors
        ) and all(list(now.values()) == before for now, before in self._children)


def check_finite_weights(module: nn.Module) -> None:
    """Raise one error that names every parameter and buffer with NaN or infinite values."""
    bad = [
        f"{name} ({int((~tensor.isfinite()).sum())} of {tensor.numel()} values)"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if bad:
        raise BoxcovError(
            f"the detector has NaN or infinite weights in {join_names(bad)}: "
            "load a sound checkpoint"
        )


def versions(tree: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors of a pytree with their version counters, which grow with each write."""
    return [(t, t._version) for t in tree_leaves(tree) if isinstance(t, Tensor)]


def check_buffers(before: list[tuple[Tensor, int]]) -> None:
    """Raise if a buffer was written to since ``before``, a result of ``versions``.

    A forward pass in eval mode must not write to buffers, but a module that is hidden in a
    closure may still be in train mode.
    """
    if any(t._version != version for t, version in before):
        raise BoxcovError(
            "the detector changes its own buffers in a forward pass although boxcov runs it in "
            "eval mode: call detector.eval() first, and load its weights again"
        )
