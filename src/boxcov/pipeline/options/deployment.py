"""The options of ``boxcov stream``, ``boxcov monitor`` and ``boxcov export``."""

# ruff: noqa: RUF009  (``option`` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from boxcov.errors import BoxcovError
from boxcov.pipeline.options import vocabulary
from boxcov.pipeline.options.common import (
    DetectorOptions,
    EstimatorOptions,
    FileOptions,
    ReaderOptions,
)
from boxcov.pipeline.options.option import (
    INPUT,
    METHOD,
    OUTPUT,
    REQUIRED,
    Options,
    argument,
    option,
)


@dataclass(frozen=True, kw_only=True)
class StreamCommand(DetectorOptions):
    """Options of ``boxcov stream``."""

    files: FileOptions
    estimator: EstimatorOptions
    watch: bool = option(False, INPUT, "Wait for new files in the folder, until Ctrl-C.")
    count: int | None = vocabulary.count(text="Stop after this many frames.")
    calibrated: bool | None = option(
        None,
        OUTPUT,
        "Whether the lines hold risk, regions and the deviations of the errors.",
        shown="if the posterior is calibrated",
    )
    with_covariance: bool = option(
        False, OUTPUT, "Also write the covariance matrices, not only standard deviations."
    )
    show: Path | None = vocabulary.show()
    force: bool = option(False, OUTPUT, "Replace --show if it exists.")
    seed: int = vocabulary.seed()
    device: str = vocabulary.device()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.files.source is None:
            raise BoxcovError("give --source: a folder, a video, or - for paths on stdin")
        if self.watch and self.files.source == "-":
            raise BoxcovError("--watch needs a folder: paths on stdin are always waited for")


@dataclass(frozen=True, kw_only=True)
class MonitorCommand(Options):
    """Options of ``boxcov monitor``."""

    frames: str = argument(
        "Lines of boxcov stream (.jsonl; - reads them from stdin), or a file of boxcov predict.",
        metavar="FRAMES",
    )
    usual: Path = option(
        REQUIRED, INPUT, "Usual frames in the same formats, or a .json file of --save."
    )
    false_alarm_rate: float | None = option(
        None,
        METHOD,
        "Share of usual frames with an alarm.",
        shown="0.05, or as saved",
        within="(0, 1)",
    )
    run_length: float | None = option(
        None,
        METHOD,
        "Mean number of usual frames before a false change.",
        metavar="FRAMES",
        shown="1000, or as saved",
        within="(1, inf)",
    )
    format: Literal["json", "prometheus"] = option(
        "json", OUTPUT, "One JSON line per frame, or the totals as Prometheus text."
    )
    out: Path | None = vocabulary.out(
        None, text="prometheus: file to replace after each frame.", shown="stdout, at the end"
    )
    save: Path | None = option(None, OUTPUT, "Write the usual frames as a small .json file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames == str(self.usual) == "-":
            raise BoxcovError("FRAMES and --usual are both stdin: give one of them as a file")
        if self.out is not None and self.format == "json":
            raise BoxcovError("--out is for --format prometheus: JSON lines go to stdout")
        if self.save is not None and self.save.suffix != ".json":
            raise BoxcovError(f"--save must name a .json file, got {self.save}")


@dataclass(frozen=True, kw_only=True)
class ExportCommand(ReaderOptions, DetectorOptions):
    """Options of ``boxcov export``."""

    out: Path = vocabulary.out(REQUIRED, text="The .onnx file.")
    force: bool = vocabulary.force()
    posterior: Path | None = vocabulary.posterior(
        text="Written by boxcov fit or calibrate.",
        shown="small, the calibrated one in the package, for centerpoint:small",
    )
    samples: int | None = option(
        None,
        METHOD,
        "Posterior samples, stored as constants in the file.",
        within="[2, inf)",
        shown="as the error model was calibrated, or 10",
    )
    exact: bool = option(False, METHOD, "The exact covariance of the head instead of samples.")
    boxes: int = option(
        100, OUTPUT, "Rows of the outputs: the maximal number of boxes.", within="[1, inf)"
    )
    candidates: int = option(
        256, METHOD, "Maximal number of boxes before NMS, per task or image.", within="[1, inf)"
    )
    pairs: int = option(
        8192, METHOD, "Maximal number of overlapping pairs of rotated boxes.", within="[1, inf)"
    )
    example: Path | None = option(
        None,
        INPUT,
        "Frame to check the file on, as for boxcov stream.",
        shown="a simulated frame, or noise",
    )
    seed: int = vocabulary.seed()
