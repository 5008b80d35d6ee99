"""Results of frames, kept one by one, so that a study that was stopped resumes at its frame."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def each_frame(path: Path, count: int, compute: Callable[[int], Result]) -> Iterator[Result]:
    """Yield ``compute(number)`` of each frame; results of an earlier run are read.

    path: the file that the study writes of all results. It then calls ``forget(path)``.
    """
    folder = _folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        kept = folder / f"{number}.pickle"
        if not kept.exists():
            part = kept.with_suffix(".part")  # an interrupted run leaves no half file
            part.write_bytes(pickle.dumps(compute(number)))
            part.rename(kept)
        yield pickle.loads(kept.read_bytes())


def forget(path: Path) -> None:
    """Remove the results of single frames, once ``path`` holds them all."""
    shutil.rmtree(_folder(path), ignore_errors=True)


def _folder(path: Path) -> Path:
    return path.with_suffix(".frames")
