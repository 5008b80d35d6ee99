"""A long run that is killed again and again, and what is left of it each time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from safetensors import safe_open

CHECKPOINT = "posterior.safetensors.checkpoint"


class Killed:
    """``boxcov fit WORDS`` in processes of its own, each ended by SIGKILL at a random moment of its life, then resumed."""

    def __init__(self, folder: Path, words: list[object], seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.out = folder / "posterior.safetensors"
        self.words = [sys.executable, "-m", "boxcov", "fit", *map(str, words), "--checkpoint-every", "0", "--out", str(self.out)]
        began = time.monotonic()
        subprocess.run(self.words, check=True, capture_output=True)
        self.seconds = time.monotonic() - began
        self.whole = self.out.read_bytes()  # of the run that was let alone
        self.out.unlink()
        self.kills = self.finished = 0
        self.counted: Counter[int] = Counter()  # frames in the checkpoint after each kill

    def kill(self) -> None:
        """Once; a run that was done before its time is compared, and begun anew."""
        run = subprocess.Popen([*self.words, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            run.wait(self.random.uniform(0.2, 1.05) * self.seconds)
            assert run.returncode == 0, run.stderr and run.stderr.read()
            self._compare()
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
            self.kills += 1
            self.counted[self._frames()] += 1
        assert not self.out.exists() or self.out.read_bytes() == self.whole

    def finish(self) -> None:
        """Let it go on to its end."""
        subprocess.run([*self.words, "--resume"], check=True, capture_output=True)
        self._compare()

    def _compare(self) -> None:
        assert self.out.read_bytes() == self.whole
        assert not (self.folder / CHECKPOINT).exists()
        self.out.unlink()
        self.finished += 1

    def _frames(self) -> int:
        """The frames of the checkpoint, which must be whole whenever it is there."""
        if not (self.folder / CHECKPOINT).exists():
            return 0
        with safe_open(self.folder / CHECKPOINT, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name)
            about = json.loads(file.metadata()["boxcov.checkpoint"])
        assert about["frames"] == about["next"]
        return int(about["frames"])
