"""Threads, forks, copies and inference mode: right, or refused in words."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Barrier, Event, Thread

import numpy as np
import pytest
import torch

from boxcov import MCI, BoxcovError, ExactGLM, fit
from boxcov._torch.modules import fingerprint
from boxcov._torch.process_state import ProcessLock, seeded
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.evaluate.matching import match


def test_one_seed_gives_one_detector_in_every_thread() -> None:
    state, start = torch.get_rng_state(), Barrier(6)

    def build(_: int) -> list[str]:
        start.wait()
        return [fingerprint(TinyCenter(seed=3)) for _ in range(5)]

    with ThreadPoolExecutor(6) as pool:
        found = {one for many in pool.map(build, range(6)) for one in many}
    assert found == {fingerprint(TinyCenter(seed=3))}
    assert torch.equal(torch.get_rng_state(), state)


def _enter(make: Callable[[], AbstractContextManager[None]]) -> None:
    with make():
        pass


_LOCK = ProcessLock()


@pytest.mark.parametrize("make", [lambda: _LOCK, lambda: seeded(0)], ids=["lock", "seed"])
def test_a_forked_child_does_not_wait_for_its_parent(make) -> None:
    inside, done = Event(), Event()

    def hold() -> None:
        with make():
            inside.set()
            done.wait()

    thread = Thread(target=hold)
    thread.start()
    inside.wait()
    child = multiprocessing.get_context("fork").Process(target=_enter, args=(make,))
    child.start()
    child.join(30)
    done.set()
    thread.join()
    code = child.exitcode
    child.kill()
    assert code == 0


def test_predictors_use_the_lock_of_their_process(tiny) -> None:
    assert isinstance(MCI(tiny)._lock, ProcessLock)


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_predictors_are_copied_in_words_only(tiny, posterior, take) -> None:
    with pytest.raises(BoxcovError, match="ExactGLM cannot be copied or pickled: "):
        take(ExactGLM(tiny, posterior))


def test_fit_and_predict_in_inference_mode() -> None:
    detector, frames = TinyCenter(threshold=0.05, most=3), shapes.frames(count=2)
    outside = fit(detector, frames)
    with torch.inference_mode():
        inside = fit(detector, shapes.frames(count=2))
        boxes = ExactGLM(detector, inside)(shapes.frames(count=1)[0][0])
    expected = ExactGLM(detector, outside)(frames[0][0])
    torch.testing.assert_close(boxes.covariance, expected.covariance)


def test_weights_of_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        detector = TinyCenter()
    with pytest.raises(BoxcovError, match=r"were made in torch\.inference_mode\(\)"):
        fit(detector, shapes.frames(count=1))
    with pytest.raises(BoxcovError, match="load the detector outside of it"):
        MCI(detector)


def test_buffers_of_inference_mode_are_refused() -> None:
    detector = TinyCenter()
    with torch.inference_mode():  # as a buffer that is made by the first call
        detector.register_buffer("grid", torch.ones(2))
    with pytest.raises(BoxcovError, match=r"grid of the detector were made in torch\.inference"):
        fit(detector, shapes.frames(count=1))
    with pytest.raises(BoxcovError, match="grid of the detector"):
        MCI(detector)


@pytest.mark.parametrize("label", [-1, 99])
def test_a_label_is_never_that_of_another_class(label) -> None:
    detector, (inputs, targets) = TinyCenter(), shapes.frames(count=1)[0]
    wrong = [{**targets[0], "labels": torch.full_like(targets[0]["labels"], label)}]
    with pytest.raises(BoxcovError, match="classes"):
        detector.loss(detector(inputs), wrong)
    box, zero = np.ones((1, 5)), np.zeros(1, dtype=int)
    with pytest.raises(BoxcovError, match=f"of the predictions are {label} to {label}, exp"):
        match(
            *(box, np.ones(1), zero + label, zero, box, zero, zero),
            fields=("x", "y", "w", "l", "yaw"),
            classes=("car",),
            uncertainty=np.ones(1),
        )


def test_seeded_numbers_repeat_and_leave_the_others() -> None:
    before, drawn = torch.get_rng_state(), []
    for _ in range(2):
        with seeded(3):
            drawn.append(torch.rand(2))
    assert torch.equal(*drawn)
    assert torch.equal(before, torch.get_rng_state())
