"""A long run that is killed and resumed many times."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from safetensors import safe_open

from boxcov import Detections
from boxcov.pipeline.paths import is_unfinished
from helpers.command_line import Done, boxcov


class Killed:
    """Run ``boxcov WORDS --out OUT``, kill it at a random moment by SIGKILL, then resume it.

    The first and the last run are processes of their own, unless ``own_processes`` is False. Those
    that are killed are forks of this one, without the seconds of the imports.

    content: reads what must be equal from ``out``; by default the bytes of the file or files.
    kept: checks the files that a kill left and counts them. resume: the option to continue with.
    """

    own_processes = True

    def __init__(
        self,
        out: Path,
        words: list[object],
        seed: int,
        content: Callable[[Path], Any] = Path.read_bytes,
        kept: Callable[[Path], int] = lambda out: 0,
        resume: Sequence[str] = ("--resume",),
    ) -> None:
        self.out, self.random, self.content, self.kept = out, random.Random(seed), content, kept
        self.words = [sys.executable, "-m", "boxcov", *map(str, words), "--out", str(out)]
        self.again = [*self.words, *resume]
        self.before = {path.name for path in out.parent.iterdir()}
        self.kills = self.finished = 0
        self.counted: Counter[int] = Counter()  # what was kept after each kill
        if self.own_processes:
            self._run_whole(self.words)
            self.whole = content(out)  # of a run without kills
            self._remove()
        began = time.monotonic()
        done = _run(self.words[3:])  # here, so that the forks need no import
        assert done.code == 0, done.err
        self.seconds = time.monotonic() - began
        if not self.own_processes:
            self.whole = content(out)
        self._compare()

    def kill(self) -> None:
        """Kill the run once; compare and restart it if it finished before the kill."""
        self._take_finished()
        run, began = self._start(), time.monotonic()
        run.join(self.random.uniform(0.05, 1.05) * self.seconds)
        if not run.is_alive():  # the machine is less busy than at the start
            self.seconds = time.monotonic() - began
        self._end(run)

    def _start(self) -> BaseProcess:
        run = multiprocessing.get_context("fork").Process(target=_main, args=(self.again[3:],))
        run.start()
        return run

    def _end(self, run: BaseProcess) -> None:
        """Kill the run if it still runs, and look at what it left."""
        run.kill()
        run.join()
        if run.exitcode == -signal.SIGKILL:
            self.kills += 1
            self.counted[self.kept(self.out)] += 1
        else:
            assert run.exitcode == 0
            self._compare()
        assert self._so_far()

    def finish(self) -> None:
        """Resume the run, wait for its end and compare the result."""
        self._take_finished()
        self._run_whole(self.again)
        self._compare()

    def _take_finished(self) -> None:
        """Compare the output of a run that was killed when nothing was left to continue."""
        if self.out.is_file() and "--resume" in self.again and not is_unfinished(self.out):
            self.out.with_name(f".{self.out.name}.lock").unlink(missing_ok=True)
            self._compare()

    def _run_whole(self, words: list[str]) -> None:
        if self.own_processes:
            subprocess.run(words, check=True, capture_output=True)
        else:
            done = _run(words[3:])
            assert done.code == 0, done.err

    def _compare(self) -> None:
        assert self.content(self.out) == self.whole
        self._remove()
        left = {path.name for path in self.out.parent.iterdir()}
        assert left == self.before  # no temporary file
        self.finished += 1

    def _so_far(self) -> bool:
        """Return whether all complete files have the expected content."""
        if not self.out.is_dir():
            return not self.out.exists() or bool(self.content(self.out) == self.whole)
        there = self.content(self.out)
        named = [
            name
            for name in there
            if not Path(name).name.startswith(".") and not name.endswith(".checkpoint")
        ]
        return all(there[name] == self.whole[name] for name in named)

    def _remove(self) -> None:
        if self.out.is_dir():
            shutil.rmtree(self.out)
        else:
            self.out.unlink()
            self.out.with_suffix(".json").unlink(missing_ok=True)  # the report of a training


class LiveKilled(Killed):
    """As ``Killed``, but each kill hits the run while it writes what it keeps.

    It is killed after the first change of the stored files, at a random moment of the next ones.
    """

    pause = 0.2  # seconds, at most, between the first change and the kill

    def kill(self) -> None:
        self._take_finished()
        before = stored(self.out)
        run = self._start()
        while run.is_alive():
            if stored(self.out) != before:
                run.join(self.random.uniform(0, self.pause))
                if stored(self.out) != before:
                    break
            time.sleep(0.0005)
        self._end(run)


def _run(words: list[str]) -> Done:
    """Run ``boxcov WORDS`` in this process; warnings are no errors, as in a process of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return boxcov(*words)


def _main(words: list[str]) -> None:
    """Run ``boxcov WORDS`` in a forked child."""
    done = _run(words)
    os.write(2, done.err.encode())  # pytest shows it if the test fails
    os._exit(done.code)


def stored(out: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of the files that a run keeps beside ``out``."""
    found = []
    for folder, _, names in os.walk(out.parent):  # rglob raises if a folder goes away meanwhile
        for name in names:
            if f"{out.name}." in name or f"{out.name}.parts" in Path(folder).name:
                with contextlib.suppress(OSError):  # it has just been replaced
                    about = Path(folder, name).lstat()
                    found.append((name, about.st_size, about.st_mtime_ns))
    return sorted(entry for entry in found if not entry[0].endswith(".lock"))


def frames_kept(out: Path) -> int:
    """Return the number of frames in the checkpoints of both passes of a fit."""
    return sum(_frames(out.with_name(f"{out.name}.checkpoint{more}")) for more in ("", ".second"))


def _frames(path: Path) -> int:
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            file.get_tensor(name)
        about = json.loads(file.metadata()["boxcov.checkpoint"])
    assert about["frames"] == about["next"]
    return int(about["frames"])


def blocks_kept(out: Path) -> int:
    """Return the number of blocks of a run; each must be readable."""
    parts = list(out.with_name(f"{out.name}.parts").glob("[0-9]*.safetensors"))
    for path in parts:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name)
    return len(parts)


def undated(page: Path) -> bytes:
    """Return a page without its date and time."""
    return re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC", b"", page.read_bytes())


def but_for_time(path: Path) -> Any:
    """Return the content of a detections file without the times per frame."""
    found = Detections.load(path)
    arrays = {name: array.tobytes() for name, array in found.numpy().items()}
    return arrays, {
        name: value for name, value in found.meta.items() if name not in ("milliseconds", "ms")
    }


def runs_kept(out: Path) -> int:
    """Return the number of files of a reproduction; each must be readable."""
    return len(reproduced(out)) if out.exists() else 0


def reproduced(folder: Path) -> dict[str, Any]:
    """Return the content of a reproduction's files, by name, without measured times."""
    return {
        str(path.relative_to(folder)): _timeless(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _timeless(path: Path) -> Any:
    if path.name.startswith("."):  # half written
        return None
    if path.stem in ("plain", "runtime"):
        return path.stat().st_size > 0
    if path.parent.name == "predictions" or path.name == "exact.safetensors":
        return but_for_time(path)
    if path.name == "demo.json":
        scenes = json.loads(path.read_text())
        return {name: {**scene, "cost": 0} for name, scene in scenes.items()}
    if path.name == "reproduction.md":
        return re.sub(r"\*\*Run time\*\*.*?extrapolated", "", path.read_text(), flags=re.S)
    if path.name == "report.html":
        return [
            line
            for line in undated(path).splitlines()
            if b"Milliseconds per frame" not in line and b"<td>cpu</td>" not in line
        ]
    return path.read_bytes()
