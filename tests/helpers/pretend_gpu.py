"""Two pretend GPUs, "cuda:0" and "cuda:1", on a machine whose torch has no CUDA.

Their tensors are tensors in the CPU's memory whose storage is marked. The pretence shows
where tensors are, shapes, padding, what CUDA graphs and streams allow and overwrite, and the
numbers of the branches for GPUs. It shows no kernels (all are the CPU's), no TF32, no timing, and
nothing of what Triton compiles.

Raises what CUDA would: where tensors of two devices meet, and where work that is captured as a
graph waits for the device or copies from the host. What CUDA would not notice raises
``AssertionError``: work that does not wait for another stream's, and memory freed too early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._decomp.decompositions_for_jvp
from torch import Tensor
from torch.utils._device import _device_constructors

from helpers import pretend_graphs as graphs
from helpers import pretend_streams as streams
from helpers.pretend_streams import Block
from helpers.pretend_tensors import CPU, Mode, gpu_of, put, real_device, use, wait, waits

# torch compiles them at the first use of forward mode, which could not read the patched functions
assert torch._decomp.decompositions_for_jvp

__all__ = ["pretend_gpu", "waits"]

_COPIES = "as_tensor", "asarray", "tensor", "new_tensor"


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls)
        made.place = _known(device)
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    device = property(lambda self: self.place)


def _known(device: Any) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return device
    index = streams.current_device() if device.index is None else device.index
    if index > 1:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return torch.device("cuda", index)


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes tensors, with ``device``."""

    def made_on(*args: Any, **kwargs: Any) -> Tensor:
        given, name = kwargs.pop("device", None), make.__name__
        device = None if given is None else _known(given)
        if device is not None and device.type == "meta":
            return make(*args, **kwargs, device=device)
        like = [arg for arg in args[:1] if isinstance(arg, Tensor)]
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != (device or CPU).type and not like:
            raise RuntimeError(f"Expected a {device} generator but found {generator.device}")
        with streams.device(device if device is not None and device.type == "cuda" else None):
            out = make(*args, **kwargs)
        if name in _COPIES[:3] and like:
            return out if device is None else out.to(device)
        if device is None and like:
            if name != "new_tensor":
                return out
            device = like[0].device
        if device is not None and device.type == "cuda" and name in _COPIES:
            wait(name, device)
        put(out, device or CPU)
        if out.is_cuda:
            use(name, streams.current_stream(device), [], [out])
        return out

    return made_on


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device, rest = kwargs.pop("device", None), dict(kwargs)
    for value in args:
        if isinstance(value, Tensor):
            device, rest["dtype"] = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            rest["dtype"] = value
        elif isinstance(value, (str, torch.device)) or type(value) is int:
            device = value
    rest.pop("other", None)
    here = self.device
    device = here if device is None else _known(device)
    if device == here or "meta" in (device.type, here.type):
        return _real["to"](self, **rest, **({"device": device} if device.type == "meta" else {}))
    wait("a copy between devices", device if device.type == "cuda" else here)
    rest.pop("non_blocking", None)
    return put(_real["to"](self, **{**rest, "copy": True}), device)


def _reader(name: str) -> Callable[..., Any]:
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if gpu_of(self) is not None:
            wait(name, gpu_of(self))
            if name == "numpy":
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return _real[name](self, *args, **kwargs)

    return read


_real = {name: getattr(Tensor, name) for name in ("to", "numpy", "tolist")}


def _device(self: Tensor) -> torch.device:
    return gpu_of(self) or real_device.__get__(self)


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """Let this process have two GPUs."""
    streams.synchronize()
    waits.clear()
    with pytest.MonkeyPatch.context() as patch, Mode():
        for make in _device_constructors():
            if getattr(torch, make.__name__, None) is make:
                patch.setattr(torch, make.__name__, _factory(make))
        for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
            patch.setattr(Tensor, name, _factory(getattr(Tensor, name)), raising=False)
        _patch_tensors(patch)
        _patch_cuda(patch)
        yield


def _patch_tensors(patch: pytest.MonkeyPatch) -> None:
    own: dict[str, Any] = {
        "device": property(_device),
        "is_cuda": property(lambda self: gpu_of(self) is not None),
        "is_cpu": property(lambda self: self.device.type == "cpu"),
        "get_device": lambda self: -1 if self.device.index is None else self.device.index,
        "to": _to,
        "cpu": lambda self: self.to("cpu"),
        "cuda": lambda self, device="cuda": self.to(device),
        "numpy": _reader("numpy"),
        "tolist": _reader("tolist"),
    }
    for name, value in own.items():
        patch.setattr(Tensor, name, value, raising=False)
    clone, run = torch.UntypedStorage.clone, threading.Thread.run

    def cloned(self: Any) -> Any:
        twin, block = clone(self), getattr(self, "block", None)
        if block is not None:
            twin.block = Block(block.place)
        return twin

    def run_in_mode(self: threading.Thread) -> None:
        with Mode():
            run(self)

    patch.setattr(torch.UntypedStorage, "clone", cloned)
    patch.setattr(threading.Thread, "run", run_in_mode)
    patch.setattr(torch, "Generator", _Generator)


def _patch_cuda(patch: pytest.MonkeyPatch) -> None:
    own: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda *_: "a pretend GPU",
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda *_: 0),
        **dict.fromkeys(("reset_peak_memory_stats", "empty_cache"), lambda *_: None),
        **dict.fromkeys(("_lazy_init", "init"), lambda: None),
    }
    names = "Stream stream current_stream default_stream is_current_stream_capturing synchronize"
    names = f"{names} device current_device set_device"
    own |= {name: getattr(streams, name) for name in names.split()}
    for name, value in {**own, "CUDAGraph": graphs.CUDAGraph, "graph": graphs.graph}.items():
        patch.setattr(torch.cuda, name, value)
