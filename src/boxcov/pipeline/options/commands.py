"""The options of each command, except those of deployment and of research."""

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
    Format,
    MessageOptions,
    PredictedData,
)
from boxcov.pipeline.options.option import (
    DATA,
    INPUT,
    METHOD,
    OUTPUT,
    REQUIRED,
    Options,
    argument,
    check_name,
    option,
)


@dataclass(frozen=True, kw_only=True)
class FitCommand(DetectorOptions):
    """Options of ``boxcov fit``."""

    out: Path = vocabulary.out(REQUIRED, text="File for the posterior.")
    force: bool = vocabulary.force()
    source: DataOptions = DataOptions()
    depth: str = option(
        "head",
        METHOD,
        "Layers of the posterior: head, neck (neck and head), backbone (all three), or module "
        "names, comma-separated.",
    )
    prior_precision: float | Literal["auto"] = option(
        "auto",
        METHOD,
        "Prior precision tau of (n F + tau I)^-1; auto: one per layer, from the marginal "
        "likelihood or the RMS of the weights.",
        metavar="auto|NUMBER",
        within="(0, inf)",
    )
    n_data: float | None = option(
        None,
        METHOD,
        "Number n of frames the detector was trained on.",
        shown="the number of frames of the data",
        within="(0, inf)",
    )
    fisher: Literal["empirical", "mc", "identity"] = option(
        "empirical",
        METHOD,
        "Gradients for the labels of the data (empirical), for labels sampled from the detector "
        "(mc), or none: the posterior is the prior (identity).",
    )
    fraction: float = option(
        1.0, INPUT, "Use only this fraction of the frames, chosen at random.", within="(0, 1]"
    )
    form: Literal["eigen", "paper"] = option(
        "eigen", METHOD, "eigen: (n F + tau I)^-1; paper: Q^-1 (x) H^-1, without n and tau."
    )
    ekfac: bool = option(
        False, METHOD, "Correct the eigenvalues (EKFAC): a second pass over the frames."
    )
    compress: float | None = option(
        None,
        OUTPUT,
        "Write a smaller file: no variance changes by more than this fraction, e.g. 0.01.",
        metavar="FRACTION",
        within="(0, 1)",
    )
    batch: int = option(1, METHOD, "Frames per batch.", within="[1, inf)")
    nonfinite: Literal["error", "skip"] = option(
        "error", METHOD, "Frames with a NaN or infinity in the input or gradient: stop, or skip."
    )
    checkpoint_every: float = option(
        60.0,
        OUTPUT,
        "Write FILE.checkpoint this often, and when interrupted.",
        metavar="SECONDS",
        within="[0, inf)",
    )
    device: str = vocabulary.device()
    workers: int = vocabulary.workers()
    resume: bool = vocabulary.resume()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compress is not None and (self.ekfac or self.form == "paper"):
            raise BoxcovError("--compress needs a plain fit: no --ekfac, and no --form paper")


@dataclass(frozen=True, kw_only=True)
class PredictCommand(DetectorOptions):
    """Options of ``boxcov predict``."""

    out: Path = vocabulary.out(REQUIRED, text="File for the boxes; a folder with --format kitti.")
    force: bool = vocabulary.force()
    source: DataOptions = DataOptions()
    files: FileOptions = FileOptions()
    estimator: EstimatorOptions
    with_logit: bool = option(
        False, OUTPUT, "Also write the variance of the score logit and its covariance with the box."
    )
    format: Format = vocabulary.format("native")
    show: Path | None = vocabulary.show()
    message: MessageOptions = MessageOptions()
    device: str = vocabulary.device()
    workers: int = vocabulary.workers()
    resume: bool = vocabulary.resume()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.with_logit and self.estimator.method == "nms":
            raise BoxcovError("the method nms has no option --with-logit: remove it")
        if self.format == "native" and self.out.suffix in (".csv", ".json", ".parquet", ".rrd"):
            raise BoxcovError(
                f"--out {self.out}: the format native is no {self.out.suffix} file: give --format, "
                "or a name that ends in .safetensors"
            )
        if self.show == self.out:
            raise BoxcovError(f"--show and --out are both {self.out}: give two names")
        _refuse_two_sources(self.files, self.source)


def _refuse_two_sources(files: FileOptions, source: DataOptions) -> None:
    """Raise if both files and a data set are given."""
    is_data = source.split is not None or source.data != DataOptions().data
    if files.source is not None and is_data:
        raise BoxcovError("--source takes the place of --data and --split: remove them")


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
        if self.predictions is not None:
            self._refuse_unused()
        _refuse_two_sources(self.files, self.source)
        if self.boxes is not None and self.boxes == self.out:
            raise BoxcovError(f"--boxes and --out are both {self.out}: give two names")

    def _refuse_unused(self) -> None:
        """Raise if there are options that boxes of a file do not need."""
        given = vars(self.files) | vars(self.estimator) | vars(self.source)
        usual = vars(FileOptions()) | vars(EstimatorOptions()) | vars(DataOptions())
        labels = ("data", "split", "count") if self.by == "disagreement" else ()
        unused = [f"--{n}" for n, v in given.items() if v != usual[n] and n not in labels]
        if unused:
            raise BoxcovError(f"--predictions holds boxes already: remove {', '.join(unused)}")


@dataclass(frozen=True, kw_only=True)
class ConvertCommand(Options):
    """Options of ``boxcov convert``."""

    detections: Path = argument("Written by boxcov predict in the native format.")
    out: Path = vocabulary.out(REQUIRED, text="File to write; a folder with --format kitti.")
    force: bool = vocabulary.force()
    format: Format = vocabulary.format(REQUIRED)
    source: PredictedData = PredictedData()
    message: MessageOptions = MessageOptions()


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(Options):
    """Options of ``boxcov evaluate``."""

    predictions: tuple[Path, ...] = argument(
        "Written by boxcov predict, one file per method.", metavar="FILE..."
    )
    source: PredictedData = PredictedData()
    out: Path | None = vocabulary.out(None, text="Write a report: one HTML page.")
    force: bool = vocabulary.force()
    scenes: int = option(6, OUTPUT, "Frames to show in the report.", within="[0, inf)")
    replicates: int = option(
        200, METHOD, "Bootstrap replicates for the intervals.", within="[2, inf)"
    )
    seed: int = vocabulary.seed()
    workers: int = vocabulary.workers()
    resume: bool = vocabulary.resume()


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand(DetectorOptions):
    """Options of ``boxcov calibrate``."""

    out: Path = vocabulary.out(
        REQUIRED, text="File for the calibrated posterior; may be the input."
    )
    force: bool = vocabulary.force()
    source: DataOptions = DataOptions()
    estimator: EstimatorOptions
    threshold: float | None = option(
        None,
        METHOD,
        "A box whose IoU with its object is below this is misplaced: 0.1, 0.2, ... 0.9 for "
        "LiDAR, 0.55, 0.6, ... 0.95 for images.",
        shown="0.4 for LiDAR, 0.7 for images",
        within="(0, 1)",
    )
    fit_share: float = option(
        0.5,
        METHOD,
        "The report fits on this fraction of the frames, the first ones, and judges the others.",
        within="(0, 1)",
    )
    copies: int = option(
        3,
        METHOD,
        "Turned and mirrored copies of each frame that the error model learns from, too, where "
        "the detector can make them (LiDAR).",
        within="[0, 100]",
    )
    stress: str | None = option(
        None,
        INPUT,
        "Labelled frames that teach how much wider regions are in frames unlike the others: "
        "resized (copies of the frames with resized objects, LiDAR) or KIND:WHERE.",
        metavar="resized|KIND:WHERE",
    )
    device: str = vocabulary.device()

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.estimator.for_detector(self.detector)
        if given.posterior is None or given.method == "nms":
            raise BoxcovError(
                "the error model is stored in a posterior: give --posterior FILE "
                "and a method that uses it"
            )
        if self.stress not in (None, "resized"):
            check_name("data", DATA, self.stress)


@dataclass(frozen=True, kw_only=True)
class CheckCommand(DetectorOptions):
    """Options of ``boxcov check``."""

    out: Path | None = vocabulary.out(
        None, text="Write a picture (PNG) of the first frame: boxes red, labels green."
    )
    force: bool = vocabulary.force()
    data: str = vocabulary.data()
    split: str | None = vocabulary.split()
    sweeps: int = vocabulary.sweeps()
    seed: int = vocabulary.seed()
    device: str = vocabulary.device()


@dataclass(frozen=True, kw_only=True)
class DemoCommand(Options):
    """Options of ``boxcov demo``."""

    out: Path = option(
        Path("demo"), OUTPUT, "Folder for the predictions and reports.", metavar="DIR"
    )
