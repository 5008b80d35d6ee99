"""Interrupted fits, and the content of their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from boxcov import Checkpoint, Posterior, fit
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter

FRAMES = shapes.frames(count=7)


class Cut(Exception):
    """The error that interrupts a run."""


class CutOff:
    """Frames of which reading one raises ``error``."""

    def __init__(self, frames, at: int, error: BaseException | None = None) -> None:
        self.frames, self.at, self.error, self.read = frames, at, error or Cut(), []

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, i: int):
        if i >= len(self.frames):
            raise IndexError
        if i == self.at:
            raise self.error
        self.read.append(i)
        return self.frames[i]


def cut(path: Path, at: int = 4, frames=FRAMES, **settings) -> None:
    with pytest.raises(Cut):
        fit(
            TinyCenter(),
            CutOff(frames, at),
            checkpoint=Checkpoint(path, every_seconds=0),
            **settings,
        )


def bytes_of(posterior: Posterior, folder: Path) -> bytes:
    posterior.save(folder / "posterior")
    return (folder / "posterior").read_bytes()


def about(path: Path) -> dict:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["boxcov.checkpoint"])


def edit(path: Path, change) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = about(path)
    change(header, tensors)
    save_file(tensors, path, {"boxcov.checkpoint": json.dumps(header)})
