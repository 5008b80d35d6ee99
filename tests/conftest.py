from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

# Waiting threads should sleep: spinning makes torch many times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from boxcov import Posterior, fit
from boxcov.data import batched, shapes
from boxcov.detectors.tiny import TinyCenter, train

# One thread per process where several test workers share the cores. OMP_NUM_THREADS goes first; MKL
# would cap it at the number of cores, and tests must hold with more threads than cores too.
DEFAULT_THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", DEFAULT_THREADS)))


def pytest_collection_finish() -> None:
    """Leave the million objects of the imported modules out of every garbage collection."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, even if it was ignored at the start (``nohup``)."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def train_frames() -> list:
    return list(shapes.frames(count=200, seed=0))


@pytest.fixture(scope="session")
def tiny(train_frames: list) -> TinyCenter:
    """The reference detector, trained for a few seconds. Tests must leave it as it is."""
    return train(TinyCenter(seed=0), train_frames, epochs=6)


@pytest.fixture(scope="session")
def posterior(tiny: TinyCenter, train_frames: list) -> Posterior:
    """The posterior of the reference detector's head."""
    return fit(tiny, batched(train_frames, 8), n_data=2000, prior_precision=1.0)


@pytest.fixture(scope="session")
def image() -> torch.Tensor:
    return shapes.frames(count=1, seed=7)[0][0]
