"""Memory stays flat over a long stream of frames, at most 100,000."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from pathlib import Path

import pytest
import torch

from boxcov import MCGLM, ExactGLM, fit
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter

FRAMES = int(os.environ.get("BOXCOV_SOAK", 100_000))
SECONDS = float(os.environ.get("BOXCOV_SOAK_SECONDS", 900))
SETTLED = 500  # frames until allocator and caches have what they need
GROWTH = 8 * 2**20  # bytes: less than a tenth of one a frame


def resident() -> int:
    """Resident anonymous memory of this process in bytes.

    Pages of files do not count: the kernel drops those of libraries that were not used for a while,
    and reads them again.
    """
    status = Path("/proc/self/statm")
    if status.exists():
        _, whole, of_files, *_ = map(int, status.read_text().split())
        return (whole - of_files) * resource.getpagesize()
    return resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss  # elsewhere: the most it ever held, in bytes


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mcglm", "exact"])
def test_memory_is_flat(kind: str, record_property) -> None:
    detector = TinyCenter(width=4, threshold=0.3, most=4).eval()
    frames = [inputs[:, :, :32, :32].contiguous() for inputs, _ in shapes.frames(count=16)]
    detector.head.branches["heatmap"][-1].bias.data.fill_(0.0)
    posterior = fit(detector, shapes.frames(count=2), prior_precision=1.0)
    model = ExactGLM(detector, posterior) if kind == "exact" else MCGLM(detector, posterior, 4)
    began, done, boxes = time.monotonic(), 0, 0
    before = tensors = 0
    while done < FRAMES and time.monotonic() - began < SECONDS / 2:
        boxes += len(model(frames[done % len(frames)]))
        done += 1
        if done == SETTLED:
            tensors, before = live_tensors(), resident()  # without the garbage of other tests
    seconds, grown = time.monotonic() - began, resident() - before
    summary = (
        f"{kind}: {done} frames, {boxes} boxes, {seconds:.0f} s, {grown / 2**20:+.2f} MiB after "
        f"the first {SETTLED}"
    )
    print(summary)
    record_property("soak", summary)
    assert done > 2 * SETTLED, "too slow to say anything"
    assert boxes > done
    assert grown < GROWTH, summary
    assert live_tensors() == tensors
    assert threading.active_count() < 20
