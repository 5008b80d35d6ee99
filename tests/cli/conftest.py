from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from boxcov.error_model import network


@pytest.fixture(scope="module", autouse=True)
def few_epochs() -> Iterator[None]:
    """Error models of two epochs: their quality is tested in tests/error_model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "EPOCHS", 2)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread, also in new processes, for files that are compared bit for bit and for forks.

    Threads change the order of sums. A fork waits forever for the OpenMP threads of its parent.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is added to a dataset of FiftyOne, which is not among the test packages.

    A dataset "there" exists. FiftyOne deletes datasets that are not persistent when it ends.
    """
    samples: list[dict[str, Any]] = []
    module = ModuleType("fiftyone")
    module.Detection = module.Detections = SimpleNamespace  # type: ignore[attr-defined]
    module.Sample = lambda filepath: {"filepath": filepath}  # type: ignore[attr-defined]

    def make(name: str, persistent: bool = False, overwrite: bool = False) -> Any:
        assert persistent
        assert overwrite or name != "there"
        return SimpleNamespace(add_sample=samples.append)

    module.Dataset = make  # type: ignore[attr-defined]
    module.dataset_exists = lambda name: name == "there"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fiftyone", module)
    return samples
