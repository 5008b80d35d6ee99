"""The options of ``boxcov rank``."""

# ruff: noqa: RUF009  (``option`` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from boxcov.errors import BoxcovError
from boxcov.pipeline.options import vocabulary
from boxcov.pipeline.options.common import (
    DataOptions,
    DetectorOptions,
    EstimatorOptions,
    FileOptions,
)
from boxcov.pipeline.options.option import INPUT, METHOD, OUTPUT, REQUIRED, option


@dataclass(frozen=True, kw_only=True)
class RankCommand(DetectorOptions):
    """Options of ``boxcov rank``."""

    out: Path = vocabulary.out(
        REQUIRED, text="CSV file with one line per frame, the first one first."
    )
    force: bool = vocabulary.force()
    by: Literal["risk", "epistemic", "disagreement"] = option(
        "risk",
        METHOD,
        "risk: boxes that are probably bad, to label frames where the detector fails; epistemic: "
        "boxes that the training data says little about, to label frames unlike it; disagreement: "
        "labels that the boxes contradict, to find wrong labels (needs labelled --data).",
    )
    aggregate: Literal["sum", "mean", "max"] | None = option(
        None,
        METHOD,
        "A frame's value from those of its boxes.",
        shown="sum for risk, mean for epistemic, max for disagreement",
    )
    boxes: Path | None = option(
        None, OUTPUT, "Also write a CSV file with one line per box, the first one first."
    )
    fiftyone: str | None = option(
        None, OUTPUT, "Also make a FiftyOne dataset of this name, with the values of its samples."
    )
    predictions: Path | None = option(
        None, INPUT, "Boxes written by boxcov predict, instead of running the detector."
    )
    source: DataOptions = DataOptions()
    files: FileOptions = FileOptions()
    estimator: EstimatorOptions
    device: str = vocabulary.device()
    workers: int = vocabulary.workers()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by == "disagreement" and self.files.source is not None:
            raise BoxcovError(
                "--by disagreement compares boxes with labels, and --source has none: give "
                "labelled frames with --data"
            )
        if self.boxes is not None and self.boxes == self.out:
            raise BoxcovError(f"--boxes and --out are both {self.out}: give two names")
