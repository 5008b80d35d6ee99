"""Whether Triton can be used is tried once per device, and plain torch takes its place."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from boxcov import BoxcovWarning
from boxcov._torch import triton_kernels
from boxcov.detectors.centerpoint.sparse_kernel import can_gather, gather_linear
from boxcov.predict.cuda.head_kernels import has_kernels
from boxcov.predict.forward_mode import sum_kernel
from boxcov.predict.forward_mode.storage import empty_tangents

MODERN, OLD = (8, 6), (7, 5)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(
    triton_kernels.triton is None
    or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs a GPU, or Triton and TRITON_INTERPRET=1",
)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Devices on which a kernel was launched."""
    devices: list[torch.device] = []
    monkeypatch.setattr(triton_kernels, "triton", object())
    monkeypatch.setattr(triton_kernels, "_try_launch", devices.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: MODERN)
    triton_kernels._can_launch.cache_clear()
    yield devices
    triton_kernels._can_launch.cache_clear()


def features(index: int = 0) -> Any:
    return SimpleNamespace(
        is_cuda=True, device=torch.device("cuda", index), dtype=torch.float32, numel=lambda: 1
    )


def test_each_device_is_tried_once(tried: list[torch.device]) -> None:
    assert all(uses(features(index)) for index in (0, 1, 0) for uses in (can_gather, has_kernels))
    assert tried == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(
    "error", [RuntimeError("Failed to find C compiler.\nSet CC"), PermissionError(), OSError()]
)
def test_a_failure_gives_one_warning(
    tried: list[torch.device], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(triton_kernels, "_try_launch", fail)
    name = type(error).__name__
    with pytest.warns(
        BoxcovWarning, match=rf"do not run on cuda:0 \({name}: .*C compiler"
    ) as found:
        assert not any(uses(features()) for uses in (can_gather, has_kernels, has_kernels))
    assert len(found) == 1
    assert "Set CC" not in str(found[0].message)


def test_old_devices_are_left_to_torch(
    tried: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: OLD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not has_kernels(features())
    assert not tried


def test_tensors_on_a_cpu_try_nothing(tried: list[torch.device]) -> None:
    assert not has_kernels(torch.ones(2))
    assert not tried


# kernels against plain torch


@runs
def test_the_trial_is_a_product() -> None:
    assert bool((triton_kernels._try_launch(torch.device(DEVICE)) == 16).all())


@runs
@pytest.mark.parametrize("has_other", [False, True])
@pytest.mark.parametrize("factor", [None, (8, 1, 1), (2, 8, 3, 5), "positive"])
def test_sums_by_the_kernel(monkeypatch: pytest.MonkeyPatch, factor: Any, has_other: bool) -> None:
    def maps(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).contiguous(memory_format=torch.channels_last)

    t = maps(4 * 2, 8, 3, 5).half().unflatten(0, (4, 2))
    other = maps(2, 4 * 8, 3, 5).half().unflatten(1, (4, 8)).movedim(1, 0) if has_other else None
    by = None if factor is None else maps(2, 8, 3, 5) > 0 if factor == "positive" else None
    by = torch.randn(factor, device=DEVICE) if isinstance(factor, tuple) else by
    if by is not None and by.dim() == 4:
        by = by.contiguous(memory_format=torch.channels_last)
    given = (t,) if other is None else (t, other)
    outs = [empty_tangents(t.shape, t, torch.float32) for _ in range(2)]
    assert sum_kernel._run_kernel(given, by, 0.25, outs[0])
    monkeypatch.setattr(sum_kernel, "has_triton", lambda x: False)
    sum_kernel.scaled_sum(t, other, by, 0.25, outs[1])
    assert torch.allclose(*outs)


@runs
@pytest.mark.parametrize("channels", [4, 40])
def test_rows_are_gathered_by_the_kernel(channels: int) -> None:
    x, weight = torch.randn(30, channels, device=DEVICE), torch.randn(20, 5 * channels).to(DEVICE)
    table = torch.randint(31, (70, 5)).to(DEVICE)  # 30 is no site
    patches = torch.cat([x, torch.zeros_like(x[:1])])[table].flatten(1)
    assert torch.allclose(gather_linear(x, table, weight), patches @ weight.T, atol=1e-4)
