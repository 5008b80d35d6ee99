from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Checkpoint, FitOptions, fit
from boxcov.data import batched, loaded, shapes
from boxcov.data.loader import load_items
from boxcov.detectors.tiny import TinyCenter
from boxcov.kfac.checkpoint import hash_item


class Drawn:
    """Frames that draw from every global generator."""

    def __init__(self, count: int = 7) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int):
        image = torch.rand(1, 1, 64, 64) + random.random() + np.random.rand()  # noqa: NPY002
        return image, shapes.frames(count=self.count)[number][1]


class Deadly(Drawn):
    def __getitem__(self, number: int):
        if number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


class Odd(Drawn):
    def __getitem__(self, number: int):
        if number == 4:
            raise BoxcovError("frames/4.bin: no such file")
        return {
            "half": torch.ones(2, dtype=torch.bfloat16),
            "turned": torch.rand(2, 3).T,
            "array": np.ones(2),
            "name": "a",
            "none": None,
        }


@pytest.mark.parametrize("workers", [1, 2, 5, 9])
def test_items_do_not_depend_on_workers(workers) -> None:
    here = loaded(Drawn(), 0, seed=3)
    there = loaded(Drawn(), workers, seed=3)
    expected = [hash_item(item) for item in here]
    assert [hash_item(item) for item in there] == expected
    assert [hash_item(item) for item in load_items(there, [5, 0, 5])] == [
        expected[5],
        expected[0],
        expected[5],
    ]
    assert hash_item(there[2]) == hash_item(there[2]) == expected[2]
    assert hash_item(there[-1]) == expected[6]
    assert [hash_item(item) for item in there[1:3]] == expected[1:3]
    assert len({*expected}) == 7
    assert hash_item(loaded(Drawn(), 0, seed=4)[2]) != expected[2]
    assert list(load_items(there, [])) == []


def test_loading_leaves_global_random_states_unchanged() -> None:
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    assert len(list(loaded(Drawn(), 0))) == len(list(loaded(Drawn(), 2))) == 7
    assert (torch.rand(1), random.random()) == expected


def test_items_of_any_type_are_unchanged() -> None:
    found = next(load_items(loaded(Odd(), 1), [0]))
    assert found["half"].dtype == torch.bfloat16
    assert found["turned"].stride() == (1, 3)
    assert isinstance(found["array"], np.ndarray)
    assert (found["name"], found["none"]) == ("a", None)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"options": FitOptions(fraction=0.5, seed=2)},
        {"options": FitOptions(ekfac=True), "fisher": "mc"},
    ],
)
def test_posterior_does_not_depend_on_workers(settings, tmp_path) -> None:
    written = []
    for workers in (0, 1, 3):
        fit(TinyCenter(width=4), loaded(batched(Drawn(), 2), workers), **settings).save(
            tmp_path / "p"
        )
        written.append((tmp_path / "p").read_bytes())
    assert written[0] == written[1] == written[2]
    assert (
        fit(TinyCenter(width=4), loaded(batched(Drawn(), 2), 0)).n_data == 7
    )  # frames, not batches


def test_killed_worker_raises_and_keeps_the_checkpoint(tmp_path) -> None:
    kept = Checkpoint(tmp_path / "c", every_seconds=1e9)
    with pytest.raises(
        BoxcovError,
        match=r"a worker process ended before it loaded item 4: it was killed, or memory ran out",
    ):
        fit(TinyCenter(width=4), loaded(Deadly(), 1), checkpoint=kept)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    resumed = fit(TinyCenter(width=4), loaded(Drawn(), 1), checkpoint=replace(kept, resume=True))
    assert resumed.loss == fit(TinyCenter(width=4), loaded(Drawn(), 0)).loss


def test_items_pass_through_a_private_folder(tmp_path, monkeypatch) -> None:
    """The items are pickles, so nobody else may be able to write there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reading = load_items(loaded(Drawn(), 1), range(7))
    next(reading)
    [folder] = tmp_path.glob("boxcov-*")
    assert folder.stat().st_mode & 0o077 == 0
    reading.close()
    assert not folder.exists()


def test_errors_of_workers_keep_type_and_message() -> None:
    with pytest.raises(BoxcovError, match=r"^frames/4\.bin: no such file$"):
        list(loaded(Odd(), 2))
    with pytest.raises(BoxcovError, match="workers must be a whole number of at least 0, got -1"):
        loaded(Odd(), -1)


def test_an_interrupt_ends_the_workers_before_their_folder(tmp_path, monkeypatch) -> None:
    """Their files hid it behind an error of the folder, which was not empty."""

    class Slow(Drawn):
        def __getitem__(self, number: int):
            time.sleep(0.05)
            return number

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    others = children(os.getpid())
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            list(loaded(Slow(1000), 2))
        assert not children(os.getpid()) - others
        assert not list(tmp_path.iterdir())
        assert raised.value.__traceback__ is not None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Twofold(Exception):
    """Pickled, it is called with its text alone."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}, line {line}")


class Locked(Exception):
    def __init__(self, text: str, _: int) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [Twofold, Locked])
def test_errors_that_cannot_be_pickled_keep_their_text(kind: type) -> None:
    class Failing(Drawn):
        def __getitem__(self, number: int):
            raise kind("frames.txt", 3)

    with pytest.raises(RuntimeError, match=f"{kind.__name__}: frames.txt") as raised:
        list(loaded(Failing(), 2))
    assert "in a worker process" in str(raised.value.__cause__)


SCRIPT = """
import os, time
from data.test_loader import Drawn, children, load_items, loaded
reading = load_items(loaded(Drawn(1000), 2), range(1000))
next(reading)
print(*children(os.getpid()), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to look for processes")
def test_no_worker_survives_the_main_process() -> None:
    """Neither when the reader stops early, nor when it is killed."""
    others = children(os.getpid())  # of the tests before
    reading = load_items(loaded(Drawn(100), 2), range(100))
    next(reading)
    pids = children(os.getpid()) - others
    assert pids
    reading.close()
    assert not pids & children(os.getpid())
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    reader = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=env
    )
    assert reader.stdout is not None
    left = {int(pid) for pid in reader.stdout.readline().split()}
    assert len(left) == 2
    reader.kill()
    reader.wait()
    until = time.monotonic() + 20
    while any(map(running, left)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(running, left))


def children(parent: int) -> set[int]:
    return {
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdecimal() and _stat(path)[1:2] == [str(parent)]
    }


def running(pid: int) -> bool:
    state = _stat(Path("/proc") / str(pid))
    return bool(state) and state[0] != "Z"


def _stat(path: Path) -> list[str]:
    """State, parent and so on."""
    try:
        return (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
