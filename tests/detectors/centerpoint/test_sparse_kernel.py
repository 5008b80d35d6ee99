"""Whether Triton can be used is tried once per device, and plain torch takes its place."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boxcov import BoxcovWarning
from boxcov.detectors.centerpoint import sparse_kernel
from boxcov.detectors.centerpoint.sparse_kernel import can_gather, gather_linear

MODERN, OLD = (8, 6), (7, 5)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(
    sparse_kernel.triton is None or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs a GPU, or Triton and TRITON_INTERPRET=1",
)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Devices on which a kernel was launched."""
    devices: list[torch.device] = []
    monkeypatch.setattr(sparse_kernel, "triton", object())
    monkeypatch.setattr(sparse_kernel, "_try_launch", devices.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: MODERN)
    sparse_kernel._can_launch.cache_clear()
    yield devices
    sparse_kernel._can_launch.cache_clear()


def features(index: int = 0) -> Any:
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", index), dtype=torch.float32)


def test_each_device_is_tried_once(tried: list[torch.device]) -> None:
    assert all(can_gather(features(index)) for index in (0, 1, 0))
    assert tried == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(
    "error", [RuntimeError("Failed to find C compiler.\nSet CC"), PermissionError(), OSError()]
)
def test_a_failure_gives_one_warning(
    tried: list[torch.device], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(sparse_kernel, "_try_launch", fail)
    name = type(error).__name__
    with pytest.warns(
        BoxcovWarning, match=rf"do not run on cuda:0 \({name}: .*C compiler"
    ) as found:
        assert not any(can_gather(features()) for _ in range(3))
    assert len(found) == 1
    assert "Set CC" not in str(found[0].message)


def test_old_devices_are_left_to_torch(
    tried: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: OLD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not can_gather(features())
    assert not tried


def test_tensors_on_a_cpu_try_nothing(tried: list[torch.device]) -> None:
    assert not can_gather(torch.ones(2))
    assert not tried


# the kernel against plain torch


@runs
def test_the_trial_is_a_product() -> None:
    assert sparse_kernel._try_launch(torch.device(DEVICE)).tolist() == [[1.0], [0.0]]


@runs
@pytest.mark.parametrize("channels", [4, 40])
def test_rows_are_gathered_by_the_kernel(channels: int) -> None:
    x, weight = torch.randn(30, channels, device=DEVICE), torch.randn(20, 5 * channels).to(DEVICE)
    table = torch.randint(31, (70, 5)).to(DEVICE)  # 30 is no site
    patches = torch.cat([x, torch.zeros_like(x[:1])])[table].flatten(1)
    assert torch.allclose(gather_linear(x, table, weight), patches @ weight.T, atol=1e-4)
