"""Studies run to their end by one command, and resume after a kill with the same result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    import frame_results

    yield frame_results
    sys.modules.pop("frame_results", None)


def test_frames_before_a_stop_are_not_computed_again(results: Any, tmp_path: Path) -> None:
    seen: list[int] = []

    def square(number: int) -> int:
        seen.append(number)
        if seen == [0, 1, 2]:
            raise KeyboardInterrupt
        return number**2

    path = tmp_path / "set.npz"
    with pytest.raises(KeyboardInterrupt):
        list(results.each_frame(path, 4, square))
    assert list(results.each_frame(path, 4, square)) == [0, 1, 4, 9]
    assert seen == [0, 1, 2, 2, 3]
    results.forget(path)
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_frame_is_computed_again(results: Any, tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    (tmp_path / "set.frames").mkdir()
    (tmp_path / "set.frames" / "0.part").write_bytes(b"half")
    assert list(results.each_frame(path, 1, str)) == ["0"]


def command(name: str, out: Path) -> list[str]:
    return [sys.executable, str(ROOT / "studies" / f"{name}.py"), *STUDIES[name], str(out)]


STUDIES = {
    "margin": ["--quick", "--root"],
    "label_errors": ["--quick", "--set", "develop", "--out"],
    "tracking": ["--quick", "--root"],
    "tracking_default": ["--quick", "--root"],
    "monitor": ["--quick", "--root"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_killed_study_ends_with_the_same_result(name: str, tmp_path: Path) -> None:
    """Killed after a few frames; a quick run writes no table."""
    before = {path: path.read_bytes() for path in (ROOT / "docs/results/data").iterdir()}
    whole = subprocess.run(command(name, tmp_path / "a"), capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(command(name, tmp_path / "b"), stdout=subprocess.DEVNULL)
    while process.poll() is None and len(list(tmp_path.glob("b/**/*.pickle"))) < 3:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    again = subprocess.run(command(name, tmp_path / "b"), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert results_of(again.stdout) == results_of(whole.stdout)
    assert before == {path: path.read_bytes() for path in before}


def results_of(text: str) -> list[str]:
    """The printed lines with results; sets and frames that were collected are left out."""
    return [line for line in text.splitlines() if "[" in line or "{" in line]
