"""Options that several commands share."""

# ruff: noqa: RUF009  (``option`` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass, replace
from os.path import isfile, splitext
from pathlib import Path
from typing import Literal, cast, get_args

from boxcov.errors import BoxcovError
from boxcov.pipeline.options import vocabulary
from boxcov.pipeline.options.option import (
    INPUT,
    METHOD,
    OUTPUT,
    SHIPPED_POSTERIOR,
    Options,
    option,
)

SHIPPED_NOTE = "posterior: small, the calibrated one of centerpoint:small in the package"
Format = Literal[
    "native", "nuscenes", "kitti", "coco", "ros", "autoware", "csv", "parquet", "rerun"
]


@dataclass(frozen=True, kw_only=True)
class DetectorOptions(Options):
    """Which detector, and what its checkpoint does not tell."""

    detector: str = option(
        "centerpoint:small",
        INPUT,
        "centerpoint:small, centerpoint:pillar (in a checkout), centerpoint:CHECKPOINT, "
        "yolox:CHECKPOINT, transformers:FOLDER, "
        "torchvision:NAME (such as retinanet_resnet50_fpn, with weights of a file: NAME:FILE), "
        "ultralytics:FILE.pt, or a function of your own that returns a detector, "
        "python:MODULE:FUNCTION or python:FILE.py:FUNCTION.",
        metavar="KIND:WHICH",
    )
    config: str | None = option(
        None,
        INPUT,
        "Network of a CenterPoint checkpoint of another framework: pillar02, voxel01, voxel0075 "
        "(with -circlenms for circle NMS), or the framework's configuration file.",
        metavar="NAME|FILE",
        shown="in the checkpoint or beside it",
    )
    legacy: bool | None = option(
        None,
        INPUT,
        "Whether mmdetection3d before 1.0 wrote a CenterPoint checkpoint.",
        shown="what the checkpoint tells",
    )

    @property
    def detector_meta(self) -> dict[str, str]:
        """What is stored in result files."""
        given = {"detector": self.detector, "config": self.config, "legacy": self.legacy}
        return {name: str(value) for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class DataOptions(Options):
    """Which frames: everything that is needed to load the same frames again."""

    data: str = vocabulary.data()
    split: str | None = vocabulary.split()
    count: int | None = vocabulary.count(
        text="Number of frames.", shown="100 simulated frames, or the whole split"
    )
    seed: int = vocabulary.seed()
    sweeps: int = vocabulary.sweeps()

    @property
    def name(self) -> str:
        """The data and the split, for titles and messages."""
        return f"{self.data} {self.split}" if self.split else self.data


@dataclass(frozen=True, kw_only=True)
class ReaderOptions(Options):
    """How a file of the user's is read as an input of the detector."""

    points: Literal["nuscenes", "kitti", "plain"] = option(
        "nuscenes",
        INPUT,
        "The float32 numbers of a point in a .bin file: nuscenes (x y z intensity beam), kitti (x "
        "y z intensity) or plain (x y z intensity age).",
    )
    reader: str | None = option(
        None,
        INPUT,
        "Reads your files: a function of your own that takes a path and returns the detector's "
        "inputs.",
        metavar="python:FILE.py:FUNCTION",
    )
    size: int | None = option(
        None,
        INPUT,
        "Images are scaled to fit a square of this side in pixels, a multiple of 32.",
        within="[32, inf)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None and self.size % 32:
            raise BoxcovError(f"--size must be a multiple of 32 pixels, got {self.size}")


@dataclass(frozen=True, kw_only=True)
class FileOptions(ReaderOptions):
    """Frames of the user's without labels, and how their files are read."""

    source: str | None = option(
        None,
        INPUT,
        "Your own frames, without labels: a folder of images or of .bin point clouds, read in "
        "order of their names, one such file, or a video (.mp4, .gif ...). For boxcov stream also "
        "-: paths on stdin.",
        metavar="FOLDER|FILE",
    )


@dataclass(frozen=True)
class PredictedData(Options):
    """The frames of a file of detections, as far as the file does not state them."""

    data: str | None = option(
        None,
        INPUT,
        "Where the frames are now, if they moved; for detections made in Python, which frames.",
        metavar="KIND:WHERE",
        shown="as stated in the file",
    )
    split: str | None = option(
        None, INPUT, "Split of --data.", shown="as stated in the file, or that of boxcov predict"
    )
    count: int | None = vocabulary.count(
        text="Number of frames of --data.", shown="as stated in the file"
    )


Method = Literal["mcglm", "glm", "exact", "mci", "nms"]


@dataclass(frozen=True)
class EstimatorOptions(Options):
    """How covariances are computed. Options that the method does not have are refused."""

    method: Method | None = option(
        None,
        METHOD,
        "exact: the covariance under the posterior; mcglm: its estimate from samples; glm: one "
        "backward pass per number (slow); mci: MC dropout, or re-runs with sampled weights; nms: "
        "the spread of the boxes that NMS removes, a baseline.",
        shown="as the posterior was calibrated, or exact",
    )
    posterior: Path | None = vocabulary.posterior(
        text="Written by boxcov fit or calibrate. nms and mci (MC dropout) need none, except in "
        "boxcov calibrate.",
        shown="small, the calibrated one in the package, for centerpoint:small",
    )
    samples: int | None = option(
        None,
        METHOD,
        "Posterior samples of mcglm and mci; for exact, estimate the layers below the head from "
        "this many samples.",
        shown="as the posterior was calibrated, or 10 for mcglm and mci",
        within="[2, inf)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None and self.method in ("glm", "nms"):
            raise BoxcovError(f"the method {self.method} has no option --samples: remove it")

    def for_detector(self, detector: str) -> EstimatorOptions:
        """Return the options with the posterior in the package, if none is given and it fits."""
        if self.posterior is not None or self.method in ("nms", "mci"):
            return self
        user = f"the method {self.method or 'exact'}"
        return replace(self, posterior=default_posterior(detector, user))

    def shipped_note(self, detector: str) -> list[str]:
        """Return the line that names the posterior in the package, if that one is used."""
        return [SHIPPED_NOTE] if self.for_detector(detector) != self else []

    def as_calibrated(self, method: str, samples: int | None) -> EstimatorOptions:
        """Return the options, with the error model's method and samples where none are given."""
        if method not in get_args(Method) or self.method not in (None, method):
            return self
        own = samples if self.samples is None else self.samples
        return replace(self, method=cast(Method, method), samples=own)


def default_posterior(detector: str, user: str) -> Path:
    """Return the name of the posterior in the package; raise if it is not the detector's.

    user: what needs a posterior, for the message.
    """
    if detector != "centerpoint:small":
        kind, _, where = detector.partition(":")
        if kind in ("centerpoint", "yolox") and splitext(where)[1] and not isfile(where):
            raise BoxcovError(f"{where}: no such file")  # comes first: there is nothing to fit
        raise BoxcovError(
            f"{user} needs a posterior of {detector}: run boxcov fit and pass its file as "
            "--posterior FILE"
        )
    return SHIPPED_POSTERIOR


@dataclass(frozen=True)
class MessageOptions(Options):
    """What the ROS and Autoware messages state besides the boxes."""

    frame_id: str = option("lidar", OUTPUT, "ros and autoware: coordinate frame of the boxes.")
    covariance: Literal["predictive", "epistemic"] = option(
        "predictive",
        OUTPUT,
        "ros and autoware: covariance of the errors (after boxcov calibrate), or epistemic.",
    )
