"""The shared words of the command line: the same in every verb. Light, so that ``--help`` is quick."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Method(str, Enum):
    mcglm = "mcglm"
    glm = "glm"
    exact = "exact"
    mci = "mci"
    nms = "nms"


class Format(str, Enum):
    native = "native"
    nuscenes = "nuscenes"
    kitti = "kitti"
    coco = "coco"
    ros = "ros"
    autoware = "autoware"
    csv = "csv"
    parquet = "parquet"
    rerun = "rerun"


class CovarianceKind(str, Enum):
    predictive = "predictive"
    epistemic = "epistemic"


class DerivativeKind(str, Enum):
    jvp = "jvp"
    fd = "fd"


class FisherKind(str, Enum):
    empirical = "empirical"
    mc = "mc"
    identity = "identity"


class NonFiniteKind(str, Enum):
    error = "error"
    skip = "skip"


class FormKind(str, Enum):
    eigen = "eigen"
    paper = "paper"


class SummaryKind(str, Enum):
    trace = "trace"
    expected_iou = "expected-iou"
    relative = "relative"
    logdet = "logdet"
    score_variance = "score-variance"


class LocationsKind(str, Enum):
    all = "all"
    gradient = "gradient"


DetectorWord = Annotated[
    str,
    typer.Option(
        "--detector",
        metavar="KIND:WHICH",
        help="centerpoint:small, centerpoint:CHECKPOINT, yolox:CHECKPOINT or transformers:FOLDER.",
    ),
]
DataWord = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="KIND:WHERE",
        help="simulated:SCENARIO, nuscenes:ROOT, kitti:ROOT or coco:ROOT.",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        help="train, test or val of simulated data; a split of a real set, with a part of it if need be: 'train[:28]'."
    ),
]
Count = Annotated[
    int | None,
    typer.Option(
        min=1, help="Frames: so many simulated ones (100), or the first ones of a real split (all)."
    ),
]
Depth = Annotated[
    str,
    typer.Option(
        help="head, neck (and head), backbone (and both), or module names with commas between them."
    ),
]
Sweeps = Annotated[
    int, typer.Option(min=1, help="Turns of the LiDAR in a frame, 10 at most if simulated.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of all that is drawn: simulated frames, samples.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")]
Posterior = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="What boxcov fit wrote; every method but nms and MC dropout needs one."
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        min=0,
        help="Processes that read frames ahead while the detector works; 0 reads them in between. The same results.",
    ),
]
FrameId = Annotated[
    str,
    typer.Option(
        help="Of the formats ros and autoware: the frame of reference that the boxes are in."
    ),
]
CovarianceWord = Annotated[
    CovarianceKind,
    typer.Option(
        "--covariance",
        help="Of ros and autoware: that of the errors, which takes --calibrated, or what the weights do not know alone.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut off.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON for a script, and nothing else on stdout.")
]
