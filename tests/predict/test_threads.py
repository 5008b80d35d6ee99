"""Threads that share a model or a process get the results of a single thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Thread
from typing import Any

import pytest
import torch

import boxcov
from boxcov import MCGLM, ExactGLM
from boxcov._torch.process_state import allows_tf32, matrix_precision
from boxcov.detectors import centerpoint
from helpers.centerpoint_cases import cloud, detector_of, frames, pillar_config

METHODS = {
    "mcglm": lambda detector, posterior: MCGLM(detector, posterior, 4),
    "exact": lambda detector, posterior: ExactGLM(detector, posterior),
}


def check(model: Any, alone: Any, inputs: list[Any], threads: int = 5) -> None:
    """Compare a model shared by all threads with one that a single thread uses."""
    with ThreadPoolExecutor(threads) as pool:
        together = list(pool.map(model, inputs * 2))
    for found, one in zip(together, inputs * 2):
        expected = alone(one)
        assert torch.equal(found.boxes, expected.boxes)
        assert torch.equal(found.covariance, expected.covariance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", ["head", pytest.param("neck", marks=pytest.mark.slow)])
def test_one_model_on_the_tiny_detector(tiny, train_frames, method: str, depth: str) -> None:
    posterior = boxcov.fit(tiny, train_frames[:4], depth=depth, prior_precision=1.0)
    check(
        METHODS[method](tiny, posterior),
        METHODS[method](tiny, posterior),
        [inputs for inputs, _ in train_frames[:5]],
    )


@pytest.mark.parametrize("method", METHODS)
def test_one_model_on_a_centerpoint(method: str) -> None:
    config = pillar_config()
    detector = detector_of(config)
    posterior = boxcov.fit(detector, frames(config), prior_precision=1.0)
    check(
        METHODS[method](detector, posterior),
        METHODS[method](detector, posterior),
        [[cloud(config, seed)] for seed in range(4)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_one_model_on_the_shipped_centerpoint(method: str) -> None:
    from boxcov.data import simulated

    detector = centerpoint.load("small")
    data = simulated.frames(count=3, sweeps=1)
    posterior = boxcov.fit(detector, [data[0]], prior_precision=100.0, fisher="mc")
    check(
        METHODS[method](detector, posterior),
        METHODS[method](detector, posterior),
        [inputs for inputs, _ in data],
    )


def test_two_models_of_one_detector(tiny, posterior, train_frames) -> None:
    inputs = [inputs for inputs, _ in train_frames[:8]]
    models = [MCGLM(tiny, posterior, 4), ExactGLM(tiny, posterior)]
    expected = [
        [kind(tiny, posterior)(x).covariance for x in inputs]
        for kind in (METHODS["mcglm"], METHODS["exact"])
    ]
    with ThreadPoolExecutor(4) as pool:
        found = [
            list(pool.map(lambda x, model=model: model(x).covariance, inputs)) for model in models
        ]
    for own, theirs in zip(found, expected):
        for a, b in zip(own, theirs):
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=1e-9
            )  # the first frames of each are compared in another order


def test_first_frames_of_models_in_several_threads(tiny, posterior, image) -> None:
    """The levels of torch's forward mode belong to the process, not to a thread."""
    start = Barrier(4)

    def first(_: int) -> list[torch.Tensor]:
        start.wait()
        return [MCGLM(tiny, posterior, 3)(image).covariance for _ in range(4)]

    expected = MCGLM(tiny, posterior, 3)(image).covariance
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(first, range(4)):
            assert all(torch.equal(one, expected) for one in found)


# the flags of the whole process


@pytest.fixture
def flags():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_threads_that_overlap_leave_the_flags_as_they_were(flags) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = True, False
    inside, leave = Event(), Event()

    def first() -> None:
        with matrix_precision("float32"):
            inside.set()
            leave.wait(10)

    thread = Thread(target=first)
    thread.start()
    assert inside.wait(10)
    with matrix_precision("float32"):  # comes in second, goes out last
        leave.set()
        thread.join(10)
        assert flags() == (False, False)
    assert flags() == (True, False)


def test_a_thread_that_wants_another_precision_waits(flags) -> None:
    order: list[str] = []
    inside, started = Event(), Event()

    def other() -> None:
        inside.wait(10)
        started.set()
        with matrix_precision("tf32"):
            order.append(f"second {flags()[0]}")

    thread = Thread(target=other)
    thread.start()
    with matrix_precision("float32"):
        inside.set()
        started.wait(10)
        thread.join(0.2)
        order.append(f"first {flags()[0]}")
    thread.join(10)
    assert order == ["first False", "second True"]


def test_nested_precisions_restore_the_flags(flags) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with matrix_precision("tf32"):
        with matrix_precision("float32"):
            assert flags() == (False, False)
        assert flags() == (True, True)
    assert flags() == (False, False)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9"
)
def test_the_newer_flags_of_torch_are_kept(flags, tiny, posterior, image) -> None:
    """Once they are set, torch raises an error where the older ones are read."""
    expected = ExactGLM(tiny, posterior)(image).covariance
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    products.fp32_precision, convolutions.fp32_precision = "tf32", "ieee"
    with matrix_precision("tf32"), matrix_precision("float32"):
        assert (products.fp32_precision, convolutions.fp32_precision) == ("ieee", "ieee")
    with matrix_precision("tf32"):
        assert allows_tf32() == (True, True)
    assert (products.fp32_precision, convolutions.fp32_precision) == ("tf32", "ieee")
    assert allows_tf32() == (True, False)
    assert torch.equal(ExactGLM(tiny, posterior)(image).covariance, expected)


def test_nested_blocks_of_two_threads_do_not_deadlock(flags) -> None:
    both_inside = Barrier(2, timeout=10)
    seen: list[tuple[bool, bool, bool]] = []

    def nested() -> None:
        with matrix_precision("tf32"):
            both_inside.wait()
            with matrix_precision("float32"):
                inner = flags()[0]
            seen.append((inner, flags()[0], flags()[1]))

    threads = [Thread(target=nested, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [(False, True, True)] * 2
