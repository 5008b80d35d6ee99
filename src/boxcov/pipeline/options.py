"""The options of every command: one frozen dataclass per command, and the only list of its options.

The functions of ``boxcov.pipeline`` take these dataclasses; ``boxcov.cli`` builds the command line
from them. Nothing here imports torch or typer, so that ``boxcov --help`` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from boxcov.errors import BoxcovError

INPUT, METHOD, OUTPUT = "Input", "Method", "Output"  # the panels of the help text


@dataclass(frozen=True)
class Option:
    """What the command line shows for a field: its help text and the panel it appears in."""

    help: str
    panel: str
    metavar: str | None = None
    min: float | None = None
    positional: bool = False
    default: str | None = None  # shown instead of the field's own default


# Options that mean the same in every command

Detector = Annotated[
    str,
    Option(
        "centerpoint:small, centerpoint:CHECKPOINT, yolox:CHECKPOINT or transformers:FOLDER.",
        INPUT,
        metavar="KIND:WHICH",
    ),
]
Data = Annotated[
    str,
    Option(
        "simulated:SCENARIO, nuscenes:ROOT, kitti:ROOT or coco:ROOT.", INPUT, metavar="KIND:WHERE"
    ),
]
Split = Annotated[
    str | None,
    Option(
        "train, test or val for simulated frames; the name of a split otherwise, optionally with "
        "a range of its frames: 'train[:28]'.",
        INPUT,
    ),
]
Sweeps = Annotated[
    int, Option("LiDAR sweeps per frame (at most 10 for simulated frames).", INPUT, min=1)
]
Seed = Annotated[int, Option("Random seed.", METHOD, min=0)]
Device = Annotated[str, Option("cpu, cuda, cuda:1 ...", METHOD)]
Workers = Annotated[
    int,
    Option("Processes that load frames in the background; the results are the same.", INPUT, min=0),
]
Resume = Annotated[bool, Option("Continue an interrupted run.", OUTPUT)]
PosteriorFile = Annotated[
    Path, Option("Posterior written by boxcov fit or calibrate.", INPUT, metavar="FILE")
]
MovedData = Annotated[
    str | None,
    Option(
        "Where the frames are now; by default where they were when the file was written.",
        INPUT,
        metavar="KIND:WHERE",
    ),
]
ImageSize = Annotated[
    int | None,
    Option("Side of the square input image of a YOLOX in pixels, a multiple of 32.", INPUT, min=32),
]
Format = Annotated[
    Literal["native", "nuscenes", "kitti", "coco", "ros", "autoware", "csv", "parquet", "rerun"],
    Option("File format; native is what boxcov evaluate and boxcov convert read.", OUTPUT),
]


@dataclass(frozen=True)
class DataOptions:
    """Which frames: everything that is needed to load the same frames again.

    >>> DataOptions("simulated:rain", "test", count=3).sweeps
    10
    """

    data: Data = "simulated:clear"
    split: Split = None
    count: Annotated[
        int | None,
        Option(
            "Number of frames.", INPUT, min=1, default="100 simulated frames, or the whole split"
        ),
    ] = None
    seed: Seed = 0
    sweeps: Sweeps = 10


@dataclass(frozen=True)
class EstimatorOptions:
    """How covariances are computed. Options that the method does not have are refused.

    >>> EstimatorOptions("glm", Path("p.safetensors"), samples=10)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: the method glm has no option --samples: remove it
    """

    method: Annotated[
        Literal["mcglm", "glm", "exact", "mci", "nms"],
        Option("nms is a baseline: the spread of the boxes that NMS removes.", METHOD),
    ] = "exact"
    posterior: Annotated[
        Path | None,
        Option(
            "Posterior written by boxcov fit; only nms and mci (MC dropout) work without one.",
            INPUT,
            metavar="FILE",
        ),
    ] = None
    samples: Annotated[
        int | None,
        Option(
            "Posterior samples of mcglm and mci (10 by default); for exact, estimate the layers "
            "below the head from this many samples.",
            METHOD,
        ),
    ] = None
    derivative: Annotated[
        Literal["jvp", "fd"] | None,
        Option("mcglm: forward mode (jvp) or the paper's finite difference (fd).", METHOD),
    ] = None
    epsilon: Annotated[
        float | None, Option("Step of --derivative fd (1e-7 by default).", METHOD)
    ] = None

    def __post_init__(self) -> None:
        if self.samples is not None and self.method not in ("mcglm", "exact", "mci"):
            raise BoxcovError(f"the method {self.method} has no option --samples: remove it")
        for name in ("derivative", "epsilon"):
            if getattr(self, name) is not None and self.method != "mcglm":
                raise BoxcovError(f"the method {self.method} has no option --{name}: remove it")
        if self.epsilon is not None and self.derivative != "fd":
            raise BoxcovError("--epsilon is the step of --derivative fd: forward mode has no step")
        if self.posterior is None and self.method in ("mcglm", "glm", "exact"):
            raise BoxcovError(
                f"the method {self.method} needs a posterior: "
                "run boxcov fit and pass its file as --posterior FILE"
            )
        if self.posterior is not None and not self.posterior.is_file():
            raise BoxcovError(f"{self.posterior}: no such file: write a posterior with boxcov fit")


@dataclass(frozen=True)
class MessageOptions:
    """What the ROS and Autoware messages state besides the boxes."""

    frame_id: Annotated[str, Option("ros and autoware: coordinate frame of the boxes.", OUTPUT)] = (
        "lidar"
    )
    covariance: Annotated[
        Literal["predictive", "epistemic"],
        Option(
            "ros and autoware: covariance of the errors (needs a calibration), "
            "or the epistemic one.",
            OUTPUT,
        ),
    ] = "predictive"


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of ``boxcov fit``."""

    out: Annotated[Path, Option("File for the posterior.", OUTPUT, metavar="FILE")]
    detector: Detector = "centerpoint:small"
    source: DataOptions = DataOptions()
    depth: Annotated[
        str,
        Option(
            "head, neck (neck and head), backbone (all three), or module names, comma-separated.",
            METHOD,
        ),
    ] = "head"
    prior_precision: Annotated[
        float, Option("Prior precision tau of (n F + tau I)^-1.", METHOD, min=0.0)
    ] = 1.0
    n_data: Annotated[
        float | None,
        Option(
            "Number n of frames the detector was trained on.",
            METHOD,
            default="the number of frames of the data",
        ),
    ] = None
    fisher: Annotated[
        Literal["empirical", "mc", "identity"],
        Option("Labels of the data, labels sampled from the detector, or no Fisher.", METHOD),
    ] = "empirical"
    fraction: Annotated[
        float, Option("Use only this fraction of the frames, chosen at random.", INPUT)
    ] = 1.0
    form: Annotated[
        Literal["eigen", "paper"],
        Option("eigen: (n F + tau I)^-1; paper: Q^-1 (x) H^-1, without n and tau.", METHOD),
    ] = "eigen"
    locations: Annotated[
        Literal["all", "gradient"],
        Option(
            "Average the inputs of a layer over all locations, or weight them by their "
            "squared gradient.",
            METHOD,
        ),
    ] = "all"
    ekfac: Annotated[
        bool, Option("Correct the eigenvalues (EKFAC): a second pass over the frames.", METHOD)
    ] = False
    compress: Annotated[
        float | None,
        Option(
            "Write a smaller file: no variance changes by more than this fraction, e.g. 0.01.",
            OUTPUT,
            metavar="FRACTION",
        ),
    ] = None
    batch: Annotated[int, Option("Frames per batch.", METHOD, min=1)] = 1
    nonfinite: Annotated[
        Literal["error", "skip"],
        Option("Frames with a NaN or infinity in the input or gradient: stop, or skip.", METHOD),
    ] = "error"
    checkpoint_every: Annotated[
        float,
        Option(
            "Write FILE.checkpoint this often, and when interrupted.",
            OUTPUT,
            metavar="SECONDS",
            min=0.0,
        ),
    ] = 60.0
    device: Device = "cpu"
    workers: Workers = 0
    resume: Resume = False

    def __post_init__(self) -> None:
        if self.compress is None:
            return
        if not 0 < self.compress < 1:
            raise BoxcovError(f"--compress must lie between 0 and 1, got {self.compress}")
        if self.ekfac or self.form == "paper" or self.prior_precision == 0:
            raise BoxcovError(
                "--compress needs a plain fit: no --ekfac, no --form paper, "
                "and a --prior-precision above 0"
            )


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of ``boxcov predict``."""

    out: Annotated[
        Path, Option("File for the boxes; a folder with --format kitti.", OUTPUT, metavar="FILE")
    ]
    detector: Detector = "centerpoint:small"
    source: DataOptions = DataOptions()
    estimator: EstimatorOptions
    max_boxes: Annotated[
        int | None, Option("glm: only the first boxes of each frame.", METHOD, min=1)
    ] = None
    calibrated: Annotated[
        bool,
        Option("Also write the covariance of the errors; needs boxcov calibrate first.", OUTPUT),
    ] = False
    with_logit: Annotated[
        bool,
        Option(
            "Also write the variance of the score logit and its covariance with the box.", OUTPUT
        ),
    ] = False
    format: Format = "native"
    message: MessageOptions = MessageOptions()
    device: Device = "cpu"
    workers: Workers = 0
    resume: Resume = False

    def __post_init__(self) -> None:
        method = self.estimator.method
        if self.max_boxes is not None and method != "glm":
            raise BoxcovError(f"the method {method} has no option --max-boxes: remove it")
        if self.calibrated and (self.estimator.posterior is None or method == "nms"):
            raise BoxcovError(
                "--calibrated needs a posterior with a calibration: write one with boxcov calibrate"
            )
        if self.with_logit and method == "nms":
            raise BoxcovError("the method nms has no option --with-logit: remove it")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of ``boxcov convert``."""

    detections: Annotated[
        Path,
        Option("Written by boxcov predict in the native format.", INPUT, "FILE", positional=True),
    ]
    out: Annotated[
        Path, Option("File to write; a folder with --format kitti.", OUTPUT, metavar="FILE")
    ]
    format: Format
    data: MovedData = None
    message: MessageOptions = MessageOptions()


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of ``boxcov evaluate``."""

    predictions: Annotated[
        tuple[Path, ...],
        Option(
            "Written by boxcov predict, one file per method.", INPUT, "FILE...", positional=True
        ),
    ]
    data: MovedData = None
    uncertainty: Annotated[
        Literal["trace", "expected-iou", "relative", "logdet", "score-variance"],
        Option("The scalar uncertainty u computed from each covariance.", METHOD),
    ] = "trace"
    out: Annotated[
        Path | None, Option("Write a report: one HTML page.", OUTPUT, metavar="FILE")
    ] = None
    scenes: Annotated[int, Option("Frames to show in the report.", OUTPUT, min=0)] = 6
    replicates: Annotated[int, Option("Bootstrap replicates for the intervals.", METHOD, min=2)] = (
        200
    )
    seed: Seed = 0
    workers: Workers = 0
    resume: Resume = False


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of ``boxcov calibrate``."""

    out: Annotated[
        Path,
        Option("File for the calibrated posterior; may be the input.", OUTPUT, metavar="FILE"),
    ]
    detector: Detector = "centerpoint:small"
    source: DataOptions = DataOptions()
    estimator: EstimatorOptions
    kind: Annotated[
        Literal["product", "score"],
        Option(
            "product: variance from score, size, range, class and the epistemic variances; "
            "score: without the epistemic variances.",
            METHOD,
        ),
    ] = "product"
    heading: Annotated[
        Literal["direction", "axis"],
        Option("axis ignores half turns, which no variance can describe.", METHOD),
    ] = "direction"
    fit_share: Annotated[
        float, Option("Fraction of the frames, from the first on, for the fit.", METHOD)
    ] = 0.5
    device: Device = "cpu"

    def __post_init__(self) -> None:
        if self.estimator.posterior is None or self.estimator.method == "nms":
            raise BoxcovError(
                "the calibration is stored in a posterior: give --posterior FILE "
                "and a method that uses it"
            )
        if not 0 < self.fit_share < 1:
            raise BoxcovError(f"--fit-share must lie between 0 and 1, got {self.fit_share}")


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of ``boxcov check``."""

    detector: Detector = "centerpoint:small"
    data: Data = "simulated:clear"
    split: Split = None
    sweeps: Sweeps = 10
    seed: Seed = 0
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of ``boxcov train``."""

    out: Annotated[Path, Option("File for the weights; the report is written next to it.", OUTPUT)]
    config: Annotated[str, Option("small, pillar, voxel or kitti.", METHOD)] = "small"
    data: Data = "simulated:clear"
    split: Split = None
    test: Annotated[
        tuple[str, ...],
        Option("Test data; may be repeated.", INPUT, "KIND:WHERE", default="as --data"),
    ] = ()
    test_split: Annotated[
        str | None, Option("Split of the test data, e.g. 'train[28:]'.", INPUT)
    ] = None
    count: Annotated[int, Option("Frames to train on, if simulated.", INPUT, min=1)] = 2000
    test_count: Annotated[int, Option("Frames to test on, if simulated.", INPUT, min=1)] = 100
    steps: Annotated[int, Option("Training steps.", METHOD, min=1)] = 4000
    batch: Annotated[int, Option("Frames per step.", METHOD, min=1)] = 4
    rate: Annotated[float, Option("Highest learning rate.", METHOD)] = 2e-3
    sweeps: Sweeps = 10
    seed: Seed = 0
    device: Device = "cpu"
    start_from: Annotated[str | None, Option("Initial weights: a file, or small.", INPUT)] = None
    resume: Resume = False


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of ``boxcov bench``."""

    detector: Detector = "centerpoint:small"
    data: Data = "simulated:clear"
    boxes: Annotated[
        tuple[int, ...],
        Option(
            "Boxes per frame; may be repeated.",
            METHOD,
            min=1,
            default="as many as the detector reports",
        ),
    ] = ()
    samples: Annotated[
        tuple[int, ...], Option("Monte Carlo samples; may be repeated.", METHOD, min=2)
    ] = (10,)
    depth: Annotated[
        tuple[str, ...],
        Option("Depth of the posterior: head, neck or backbone; may be repeated.", METHOD),
    ] = ("head",)
    frames: Annotated[int, Option("Frames to time.", INPUT, min=1)] = 3
    repeats: Annotated[int, Option("Repetitions per frame.", METHOD, min=1)] = 7
    seed: Seed = 0
    device: Device = "cpu"

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.frames < 1:
            raise BoxcovError(
                "a benchmark needs at least one frame and one repetition, "
                f"got frames {self.frames} and repeats {self.repeats}"
            )


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of ``boxcov export``."""

    out: Annotated[Path, Option("The .onnx file.", OUTPUT, metavar="FILE")]
    posterior: PosteriorFile
    detector: Detector = "centerpoint:small"
    samples: Annotated[
        int, Option("Posterior samples, stored as constants in the file.", METHOD, min=2)
    ] = 10
    exact: Annotated[
        bool, Option("The exact covariance of the head instead of samples.", METHOD)
    ] = False
    boxes: Annotated[
        int, Option("Rows of the outputs: the maximal number of boxes.", OUTPUT, min=1)
    ] = 100
    candidates: Annotated[
        int, Option("Maximal number of boxes before NMS, per task or image.", METHOD, min=1)
    ] = 256
    pairs: Annotated[
        int, Option("Maximal number of overlapping pairs of rotated boxes.", METHOD, min=1)
    ] = 8192
    example: Annotated[
        Path | None,
        Option(
            "Frame to check the file on, as for boxcov stream.",
            INPUT,
            metavar="FILE",
            default="a simulated frame, or noise",
        ),
    ] = None
    size: ImageSize = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        _check_image_size(self.size)


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of ``boxcov stream``."""

    frames: Annotated[
        str,
        Option(
            "Folder of .bin point clouds or images, read in order of their names; "
            "- reads paths from stdin.",
            INPUT,
            "FOLDER",
            positional=True,
        ),
    ]
    detector: Detector = "centerpoint:small"
    estimator: EstimatorOptions
    points: Annotated[
        Literal["nuscenes", "kitti", "plain"],
        Option("Layout of a point in the .bin files.", INPUT),
    ] = "nuscenes"
    size: ImageSize = None
    watch: Annotated[bool, Option("Wait for new files in the folder, until Ctrl-C.", INPUT)] = False
    count: Annotated[int | None, Option("Stop after this many frames.", INPUT, min=1)] = None
    warmup: Annotated[int, Option("First frames to leave out of the latencies.", OUTPUT, min=0)] = 5
    seed: Seed = 0
    device: Device = "cpu"

    def __post_init__(self) -> None:
        _check_image_size(self.size)
        if self.watch and self.frames == "-":
            raise BoxcovError("--watch needs a folder: paths on stdin are always waited for")


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Options of ``boxcov reproduce``."""

    out: Annotated[
        Path,
        Option(
            "Folder for runs, tables, figures and the report; finished runs are reused.",
            OUTPUT,
            metavar="DIR",
        ),
    ]
    quick: Annotated[
        bool, Option("Few frames: a check that takes minutes, not numbers to read.", METHOD)
    ] = False
    detector: Detector = "centerpoint:small"
    data: Annotated[str, Option("Frames for the posterior.", INPUT, "KIND:WHERE")] = (
        "simulated:clear"
    )
    split: Annotated[str | None, Option("Split of --data.", INPUT)] = "train"
    count: Annotated[int | None, Option("Number of frames of --data.", INPUT, min=1)] = None
    n_data: Annotated[
        float | None,
        Option("Frames the detector was trained on; 3500 for centerpoint:small.", METHOD),
    ] = None
    test: Annotated[
        str | None, Option("Frames to test on.", INPUT, "KIND:WHERE", default="as --data")
    ] = None
    test_split: Annotated[str | None, Option("Split of --test.", INPUT)] = None
    test_count: Annotated[int | None, Option("Number of frames of --test.", INPUT, min=1)] = None
    shift: Annotated[
        tuple[str, ...],
        Option("Data with a distribution shift; may be repeated.", INPUT, "KIND:WHERE"),
    ] = ()
    shift_count: Annotated[
        int | None, Option("Number of frames of each --shift.", INPUT, min=1)
    ] = None
    threshold: Annotated[
        float, Option("Only predictions with a higher score are evaluated.", METHOD)
    ] = 0.1
    sweeps: Sweeps = 10
    seed: Seed = 0
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of ``boxcov demo``."""

    out: Annotated[
        Path, Option("Folder for the posterior, predictions, figures and report.", OUTPUT)
    ] = Path("demo")


def _check_image_size(size: int | None) -> None:
    if size is not None and size % 32:
        raise BoxcovError(f"--size must be a multiple of 32 pixels, got {size}")
