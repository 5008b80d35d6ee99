"""Tensors of the pretend GPU: their storages are marked, and operations check the marks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers import pretend_streams as streams
from helpers.pretend_streams import Block

CPU = torch.device("cpu")
_TAGS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
_MAY_WAIT = {"index.Tensor", "index_put.default", "index_put_.default", "_index_put_impl_.default"}
_WAITS = {"_linalg_check_errors.default", "_linalg_eigh.default", "_linalg_svd.default"}
waits: Counter[str] = Counter()  # operations that waited for a device

real_device = Tensor.device


def _is_meta(tensor: Tensor) -> bool:
    return real_device.__get__(tensor).type == "meta"


def _storage(tensor: Tensor) -> Any:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return None if tensor.is_sparse or _is_meta(tensor) else tensor.untyped_storage()


def _block(tensor: Tensor) -> Block | None:
    """The memory of a tensor; None if it is the CPU's."""
    return getattr(_storage(tensor), "block", None)


def gpu_of(tensor: Tensor) -> torch.device | None:
    """The GPU that a tensor is on, if it is on one."""
    block = _block(tensor)
    return None if block is None or block.place == CPU else block.place


def put(tensor: Tensor, place: torch.device | None) -> Tensor:
    """Say where a new tensor is."""
    storage = _storage(tensor)
    if storage is not None and hasattr(storage, "block"):
        storage.block.place = place
    elif storage is not None:
        storage.block = Block(place)
    return tensor


class Mode(TorchDispatchMode):
    """Marks what operations make, and checks what they read."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, str(func).removeprefix("aten.")
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        gpu = next(filter(None, map(gpu_of, read)), None)
        if gpu is not None:
            _check_devices(name, func, read, gpu)
            if _is_waiting(name, func, args, kwargs):
                wait(name, gpu)
        out = func(*args, **kwargs)
        storages = {tensor.untyped_storage()._cdata for tensor in read}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in made if leaf.untyped_storage()._cdata not in storages]
        is_open = any(block is not None and block.place is None for block in map(_block, read))
        if gpu is not None or is_open or not read:
            for tensor in made:
                put(tensor, gpu)
            _launch(func, (args, kwargs), read, made, gpu)
        return out


def _launch(func: Any, given: Any, read: Any, made: Any, gpu: torch.device | None) -> None:
    stream = streams.current_stream(gpu)
    written = [*made, *_mutated(func, *given)]
    if not written:
        return  # a view
    if stream.tape is not None:
        stream.tape.record(func, *given, made)
    if gpu is not None:
        use(str(func), stream, read, written)


def use(name: str, stream: streams.Stream, read: Any, written: Any) -> None:
    """Add a piece of work to a stream; raise if it does not wait for what it depends on."""
    number = stream.next()
    for tensors, writes in ((read, False), (written, True)):
        for tensor in tensors:
            block = _block(tensor)
            if block is not None and block.place != CPU:
                block.use(stream, number, name, writes)


def _mutated(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    schema = func._schema.arguments
    given = {**dict(zip((argument.name for argument in schema), args)), **kwargs}
    names = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    found = tree_leaves([given.get(name) for name in names])
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _check_devices(name: str, func: Any, read: list[Tensor], gpu: torch.device) -> None:
    for tensor in read:
        block = _block(tensor)
        if block is not None and block.place is None:
            block.place = gpu
    others = [tensor for tensor in read if gpu_of(tensor) != gpu]
    takes_numbers = torch.Tag.pointwise in func.tags or "fill" in name or name in _MAY_WAIT
    wrong = [t for t in others if t.dim() or not takes_numbers]
    if name == "copy_.default":
        if any(tensor.dim() for tensor in others):
            wait(name, gpu)
    elif name in _MAY_WAIT and gpu_of(read[0]) and not any(map(gpu_of, others)):
        if any(tensor.dim() for tensor in others):
            wait(name, gpu)  # indices of the CPU are copied
    elif wrong:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in wrong)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{gpu} and {wrong[0].device}! ({name}: {shapes})"
        )


def _is_waiting(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if name in _MAY_WAIT:
        indices = [t for t in args[1] if t is not None]
        if name != "index.Tensor" and args[2].numel() == 1:
            return False  # torch.masked_fill
        return any(t.dtype in (torch.bool, torch.uint8) for t in indices)
    if name == "repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return name in _WAITS or any(tag in func.tags for tag in _TAGS)


def wait(name: str, gpu: torch.device) -> None:
    """The process waits for a device."""
    stream = streams.current_stream(gpu)
    streams.check_not_capturing(name, stream)
    waits[name] += 1
    streams.learn(streams.HOST, stream.seen)
