"""Load the detector that ``--detector KIND:WHICH`` names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import torch

from boxcov._torch.process_state import seconds
from boxcov.checks.plausibility import observe
from boxcov.detector import Detector
from boxcov.detectors import centerpoint, torchvision, transformers, ultralytics, yolox
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.yolox import YOLOX
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.pipeline.frames import load_labelled_frames, warn_of_fewer_frames
from boxcov.pipeline.options import DataOptions, DetectorOptions
from boxcov.pipeline.options.option import DETECTORS, SHIPPED_POSTERIOR
from boxcov.pipeline.source import split_image_size
from boxcov.pipeline.user_code import load_function
from boxcov.posterior import file as posterior_file

D = TypeVar("D", bound=Detector)
LoadFrames = Callable[[DataOptions, str, Sequence[str]], Sequence[Any]]


def load_detector(which: str | DetectorOptions, device: str = "cpu") -> Detector:
    """Return the detector ``which`` on ``device``.

    which: the options of a command, or a name as for ``--detector``.
    """
    options = DetectorOptions(detector=which) if isinstance(which, str) else which
    _refuse_other_posterior(options)
    kind, _, name = options.detector.partition(":")
    loaders: dict[str, Callable[[str], Detector]] = {
        "centerpoint": partial(centerpoint.load, config=options.config, legacy=options.legacy),
        "yolox": yolox.load,
        "transformers": transformers.load,
        "torchvision": torchvision.load,
        "ultralytics": ultralytics.load,
        "python": _build_detector,
    }
    if kind != "centerpoint" and (options.config is not None or options.legacy is not None):
        raise BoxcovError(
            f"--config and --legacy are for checkpoints of CenterPoint, not {options.detector}: "
            "remove them"
        )
    return move_to_device(loaders[kind](name), device)


def _refuse_other_posterior(options: DetectorOptions) -> None:
    """Raise if no detector is given, and the posterior names one of another kind."""
    path: Path | None = getattr(getattr(options, "estimator", options), "posterior", None)
    if path in (None, SHIPPED_POSTERIOR) or options.detector != DetectorOptions().detector:
        return
    named = posterior_file.named_detector(path)
    # a function of the user's may return any detector
    if named.partition(":")[0] in DETECTORS.keys() - {"centerpoint", "python"}:
        raise BoxcovError(
            f"{path}: a posterior of {named}, and without --detector the detector is "
            f"{options.detector}: give --detector {named}"
        )


def _build_detector(where: str) -> Detector:
    """Return the detector that the user's function returns."""
    found = load_function(f"python:{where}")()
    if not isinstance(found, Detector):
        raise BoxcovError(
            f"{where} returns a {type(found).__name__}, expected a boxcov.Detector: "
            "return boxcov.wrap(model, ...)"
        )
    return found


def trained_size(detector: Detector) -> int | None:
    """Return the side of the square images that a detector was trained on, None if not known.

    Files of Ultralytics hold it. Those of YOLOX do not, but the released files are known.
    """
    return detector.trained_size if isinstance(detector, (YOLOX, ultralytics.Yolo)) else None


def match_source(source: DataOptions, detector: Detector) -> DataOptions:
    """Return ``source`` as the detector was trained: the size of images that none was given for.

    Raise if that size is not known; warn if the number of sweeps is another one.
    """
    kind, _, where = source.data.partition(":")
    if kind == "coco" and isinstance(detector, CenterPoint):
        raise BoxcovError(
            f"--data {source.data}: these are images, and a CenterPoint takes point clouds: give "
            "--detector KIND:WHICH"
        )
    if kind == "coco" and where and not split_image_size(where)[1]:
        if size := trained_size(detector):
            return replace(source, data=f"{source.data}@{size}")
        if isinstance(detector, (transformers.QueryDetector, torchvision.TorchvisionDetector)):
            return replace(source, data=f"{source.data}@whole")
        raise BoxcovError(
            f"--data {source.data}: boxcov does not know which images this detector was trained "
            f"on: give {source.data}@640 for images letterboxed to 640 pixels, or "
            f"{source.data}@whole"
        )
    if kind in ("nuscenes", "simulated"):
        warn_of_sweeps(detector, source.sweeps, "give --sweeps {}")
    return source


def warn_of_sweeps(detector: Detector, sweeps: int, advice: str) -> None:
    """Warn if a CenterPoint was trained on another number of sweeps per frame."""
    trained = detector.config.sweeps if isinstance(detector, CenterPoint) else None
    if trained not in (None, sweeps):
        warnings.warn(
            f"the checkpoint was trained on {trained} sweeps per frame, and these frames have "
            f"{sweeps}: {advice.format(trained)}",
            BoxcovWarning,
            stacklevel=3,
        )


def is_foreign(detector: Detector) -> TypeGuard[CenterPoint]:
    """Return whether a detector is a CenterPoint that another framework wrote."""
    return isinstance(detector, CenterPoint) and bool(detector.provenance)


def warn_if_implausible(detector: Detector, frames: Sequence[Any]) -> None:
    """Warn if another framework's CenterPoint gives boxes that do not look right at first.

    A checkpoint that is read with the wrong configuration loads without an error.
    """
    if not is_foreign(detector):
        return
    looks = observe(detector, [frames[i] for i in range(min(2, len(frames)))])
    wrong = [f"{o.name}: {o.seen} ({o.todo})" for o in looks if o.passed is False]
    if wrong:
        warnings.warn(
            f"the boxes of the first frames do not look right: {'; '.join(wrong)}. boxcov check "
            "shows what was understood of the checkpoint, and a picture",
            BoxcovWarning,
            stacklevel=2,
        )


def open_data(
    detector: Detector, source: DataOptions, device: str, load: LoadFrames = load_labelled_frames
) -> tuple[DataOptions, Sequence[Any]]:
    """Return ``source`` as the detector was trained, and its frames; warn of what looks wrong."""
    source = match_source(source, detector)
    frames = load(source, device, detector.classes)
    warn_of_fewer_frames(frames, source.count, source.name)
    warn_if_implausible(detector, frames)
    return source, frames


def move_to_device(detector: D, device: str) -> D:
    """Return the detector on ``device``; raise if this machine has no such device."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise BoxcovError(
            f"no device {device!r} on this machine: give cpu, or cuda if torch finds a GPU"
        ) from None
    return detector.to(device)


def plain_milliseconds(detector: Detector, frames: Iterable[Any]) -> list[float]:
    """Return the time of the plain detector on each frame but the first, which warms up."""
    device, found = next(detector.parameters()).device, []
    for inputs, _ in frames:
        began = seconds(device)
        detector.detect(inputs)
        found.append(1e3 * (seconds(device) - began))
    return found[1:] or found
