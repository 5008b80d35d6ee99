"""The options of ``boxcov train``, ``boxcov bench`` and ``boxcov reproduce``."""

# ruff: noqa: RUF009  (``option`` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from boxcov.errors import BoxcovError
from boxcov.pipeline.options import vocabulary
from boxcov.pipeline.options.common import DetectorOptions
from boxcov.pipeline.options.option import INPUT, METHOD, OUTPUT, REQUIRED, Options, option


@dataclass(frozen=True, kw_only=True)
class TrainCommand(Options):
    """Options of ``boxcov train``."""

    out: Path = vocabulary.out(
        REQUIRED, text="File for the weights; a report is written next to it."
    )
    force: bool = vocabulary.force()
    config: Literal["small", "pillar", "voxel", "kitti"] = option(
        "small", METHOD, "Which network, and the grid of its cells."
    )
    data: str = vocabulary.data()
    split: str | None = vocabulary.split()
    test: tuple[str, ...] = option(
        (), INPUT, "Test data; may be repeated.", metavar="KIND:WHERE", shown="as --data"
    )
    test_split: str | None = option(None, INPUT, "Split of the test data, e.g. 'train[28:]'.")
    count: int = option(2000, INPUT, "Frames to train on, if simulated.", within="[1, inf)")
    test_count: int = option(100, INPUT, "Frames to test on, if simulated.", within="[1, inf)")
    steps: int = option(4000, METHOD, "Training steps.", within="[1, inf)")
    batch: int = option(4, METHOD, "Frames per step.", within="[1, inf)")
    rate: float = option(2e-3, METHOD, "Highest learning rate.", within="(0, inf)")
    sweeps: int = vocabulary.sweeps()
    seed: int = vocabulary.seed()
    device: str = vocabulary.device()
    start_from: str | None = option(
        None, INPUT, "Initial weights: a file, small, or pillar (in a checkout)."
    )
    resume: bool = vocabulary.resume()


@dataclass(frozen=True, kw_only=True)
class BenchCommand(DetectorOptions):
    """Options of ``boxcov bench``."""

    data: str = vocabulary.data()
    boxes: tuple[int, ...] = option(
        (),
        METHOD,
        "Boxes per frame; may be repeated.",
        within="[1, inf)",
        shown="as many as the detector reports",
    )
    samples: tuple[int, ...] = option(
        (10,), METHOD, "Monte Carlo samples; may be repeated.", within="[2, inf)"
    )
    posterior: Path | None = vocabulary.posterior(
        text="Posterior to time, written by boxcov fit or calibrate, with its error model.",
        shown="one fitted on four frames",
    )
    depth: tuple[str, ...] = option(
        (),
        METHOD,
        "Depth of a fitted posterior: head, neck or backbone; may be repeated.",
        shown="head",
    )
    count: int = option(3, INPUT, "Frames to time.", within="[1, inf)")
    repeats: int = option(7, METHOD, "Repetitions per frame.", within="[1, inf)")
    stages: bool = option(
        False,
        METHOD,
        "Time the stages of a frame by boxcov.compile(fused=True) instead, with launches, "
        "operations, bytes and the machine's limit (CenterPoint).",
    )
    seed: int = vocabulary.seed()
    device: str = vocabulary.device()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.posterior is not None and self.depth:
            raise BoxcovError("--depth is for a fitted posterior: remove it, or --posterior")
        if self.stages and set(self.depth) - {"head"}:
            raise BoxcovError("--stages has the posterior of the head: remove --depth")


@dataclass(frozen=True, kw_only=True)
class ReproduceCommand(DetectorOptions):
    """Options of ``boxcov reproduce``."""

    out: Path = option(
        REQUIRED,
        OUTPUT,
        "Folder for runs, tables, figures and the report; finished runs are reused.",
        metavar="DIR",
    )
    quick: bool = option(
        False, METHOD, "Few frames: a check that takes minutes, not numbers to read."
    )
    data: str = option("simulated:clear", INPUT, "Frames for the posterior.", metavar="KIND:WHERE")
    split: str | None = option("train", INPUT, "Split of --data.")
    count: int | None = vocabulary.count(text="Number of frames of --data.")
    n_data: float | None = option(
        None,
        METHOD,
        "Frames the detector was trained on; 3500 for centerpoint:small.",
        within="(0, inf)",
    )
    test: str | None = option(
        None, INPUT, "Frames to test on.", metavar="KIND:WHERE", shown="as --data"
    )
    test_split: str | None = option(None, INPUT, "Split of --test.")
    test_count: int | None = vocabulary.count(text="Number of frames of --test.")
    threshold: float = option(
        0.1, METHOD, "Only predictions with a higher score are evaluated.", within="[0, 1)"
    )
    sweeps: int = vocabulary.sweeps()
    seed: int = vocabulary.seed()
    device: str = vocabulary.device()
