"""A long run that is killed and resumed many times."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from boxcov import Detections


class Killed:
    """Run ``boxcov WORDS --out OUT``, kill it at a random moment by SIGKILL, then resume it.

    content: reads what must be equal from ``out``; by default the bytes of the file or files.
    kept: checks the files that a kill left and counts them. resume: the option to continue with.
    """

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
        began = time.monotonic()
        subprocess.run(self.words, check=True, capture_output=True)
        self.seconds = time.monotonic() - began
        self.whole = content(out)  # of the run that was let alone
        self._remove()
        self.kills = self.finished = 0
        self.counted: Counter[int] = Counter()  # what was kept after each kill

    def kill(self) -> None:
        """Once; a run that was done before its time is compared, and begun anew."""
        run = subprocess.Popen(
            self.again, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            run.wait(self.random.uniform(0.2, 1.05) * self.seconds)
            assert run.returncode == 0, run.stderr and run.stderr.read()
            self._compare()
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
            self.kills += 1
            self.counted[self.kept(self.out)] += 1
        assert self._so_far()

    def finish(self) -> None:
        """Let it go on to its end."""
        subprocess.run(self.again, check=True, capture_output=True)
        self._compare()

    def _compare(self) -> None:
        assert self.content(self.out) == self.whole
        self._remove()
        assert {
            path.name for path in self.out.parent.iterdir()
        } == self.before  # nothing is left, half written or not
        self.finished += 1

    def _so_far(self) -> bool:
        """What is there has the content that it is to have."""
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


def frames_kept(out: Path) -> int:
    """The frames in the checkpoints of a fit, of both passes."""
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
    """The blocks of a run, each of which must be whole."""
    parts = list(out.with_name(f"{out.name}.parts").glob("[0-9]*.safetensors"))
    for path in parts:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name)
    return len(parts)


def undated(page: Path) -> bytes:
    """A page without the minute it was made in."""
    return re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC", b"", page.read_bytes())


def but_for_time(path: Path) -> Any:
    """A file of detections without the milliseconds of its frames."""
    found = Detections.load(path)
    arrays = {name: array.tobytes() for name, array in found.numpy().items()}
    return arrays, {
        name: value for name, value in found.meta.items() if name not in ("milliseconds", "ms")
    }


def runs_kept(out: Path) -> int:
    """The files of a reproduction, each of which must be whole."""
    return len(reproduced(out)) if out.exists() else 0


def reproduced(folder: Path) -> dict[str, Any]:
    """All files of a reproduction, by name, without what was measured by the clock."""
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
    if path.parent.name == "predictions":
        return but_for_time(path)
    if path.name == "reproduction.md":
        return re.sub(r"\*\*Run time\*\*.*?extrapolated", "", path.read_text(), flags=re.S)
    if path.name == "report.html":
        return [
            line
            for line in undated(path).splitlines()
            if b"Milliseconds per frame" not in line and b"<td>cpu</td>" not in line
        ]
    return path.read_bytes()
