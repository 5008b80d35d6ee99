"""Load the frames that ``--data KIND:WHERE`` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from warnings import warn

import torch

from boxcov._torch.modules import move
from boxcov.data import batched, coco, kitti, loaded, nuscenes, simulated
from boxcov.data.sequence import FrameSequence
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, BoxcovWarning, counted, did_you_mean, join_names
from boxcov.pipeline.kitti_axes import KittiAsNuScenes, has_kitti_classes
from boxcov.pipeline.options import DataOptions, PredictedData
from boxcov.pipeline.source import (
    default_split,
    parse_split,
    source_of_detections,
    split_image_size,
)
from boxcov.pipeline.user_code import load_function, user_code

Progress = Callable[[int, int], None]  # frames done, frames in total
SIMULATED_SPLITS = {"train": 0, "test": 1000, "val": 2000}  # added to the seed
PRELOAD_BATCH = 8  # simulated frames that a GPU generates at once


def silent(done: int, total: int) -> None:
    """The progress of work that shows none."""


def load_frames(
    source: DataOptions, device: str = "cpu", classes: Sequence[str] = simulated.CLASSES
) -> Sequence[Any]:
    """Return the frames of ``source``, a sequence of (inputs, targets).

    COCO images are letterboxed to 416 pixels, or as in ``coco:ROOT@640``; ``coco:ROOT@whole`` keeps
    their size. KITTI frames are converted to the axes and classes of nuScenes for a detector that
    has those classes. Simulated frames are generated on ``device``. ``python:MODULE:FUNCTION``
    calls a function of the user's with the name of the split.

    classes: those of the detector; an error is raised if the data has other classes.
    """
    kind, _, where = source.data.partition(":")
    if kind == "simulated":
        return _simulated_frames(source, where, device, classes)
    name, frame_range = parse_split(source.split)
    name = name or default_split(source.data, "fit")
    frames: Any
    labels: Sequence[str]
    if kind == "nuscenes":
        frames = nuscenes.frames(where, _nuscenes_version(name), name, source.sweeps)
        labels = simulated.CLASSES
    elif kind == "kitti":
        frames, labels = kitti.frames(where, split=name), kitti.CLASSES
    elif kind == "coco":
        root, size = split_image_size(where)
        frames = coco.frames(root, name, None if size == "whole" else int(size or 416))
        labels = frames.classes
    else:
        frames, labels = UserFrames(load_function(source.data)(name), where), classes
    frames = frames[frame_range][: source.count]
    if kind == "kitti" and not has_kitti_classes(classes):
        frames, labels = KittiAsNuScenes(frames), simulated.CLASSES
    elif kind == "kitti":
        classes = kitti.CLASSES  # the same names in another case
    return _check_frames(frames, labels, classes, f"{source.data}, split {source.split or name}")


def frame_names(frames: Sequence[Any]) -> list[str] | None:
    """Return the file or token of each frame; None for frames that have numbers alone."""
    return getattr(frames, "names", None) if isinstance(frames, FrameSequence) else None


def numbered(count: int) -> list[str]:
    """Return the numbers of frames that have no names."""
    return [str(number) for number in range(count)]


def load_labelled_frames(
    source: DataOptions, device: str = "cpu", classes: Sequence[str] = simulated.CLASSES
) -> Sequence[Any]:
    """Return the frames of ``source`` as ``load_frames``; raise if the split has no labels."""
    frames = load_frames(source, device, classes)
    check_labels(frames, source)
    return frames


def warn_of_fewer_frames(frames: Sequence[Any], count: int | None, where: str) -> None:
    """Warn if ``--count`` asks for more frames than there are."""
    if count is not None and len(frames) < count:
        verb = "is" if len(frames) == 1 else "are"
        there = f"{where}: there {verb} {counted(len(frames), 'frame')}"
        warn(f"{there}, fewer than --count {count}", BoxcovWarning, stacklevel=3)


def check_labels(frames: Sequence[Any], source: DataOptions) -> None:
    """Raise if the frames have no labels."""
    if not getattr(frames, "has_labels", True):
        raise BoxcovError(
            f"{source.data}, split {source.split}: the frames have no labels, which this command "
            "needs: give another split"
        )


class UserFrames(FrameSequence):
    """The frames of a function of the user's, each checked to be (inputs, targets)."""

    def __init__(self, frames: Any, where: str) -> None:
        if not hasattr(frames, "__len__") or not hasattr(frames, "__getitem__"):
            raise BoxcovError(
                f"{where} returns a {type(frames).__name__}, expected a sequence of "
                "(inputs, targets): a list, or an object with a length and an index"
            )
        with user_code(where):
            super().__init__(len(frames))
        self.frames, self.where = frames, where

    def load(self, index: int) -> Any:
        with user_code(f"{self.where}, frame {index}"):
            frame = self.frames[index]
        if not isinstance(frame, (tuple, list)) or len(frame) != 2:
            raise BoxcovError(
                f"{self.where}: frame {index} is a {type(frame).__name__}, expected a pair "
                "(inputs, targets)"
            )
        return tuple(frame)


def _simulated_frames(
    source: DataOptions, scenario: str, device: str, classes: Sequence[str]
) -> Sequence[Any]:
    split, splits = source.split or default_split(source.data, "fit"), ", ".join(SIMULATED_SPLITS)
    if "[" in split:
        raise BoxcovError(
            f"split {split!r}: simulated splits have no ranges: use --count, and --split with one "
            f"of {splits}"
        )
    if split not in SIMULATED_SPLITS:
        known = did_you_mean(split, SIMULATED_SPLITS)
        raise BoxcovError(f"no split {split!r} of simulated frames{known}: there are {splits}")
    frames = simulated.frames(
        scenario,
        seed=source.seed + SIMULATED_SPLITS[split],
        count=100 if source.count is None else source.count,
        sweeps=source.sweeps,
        device=device,
    )
    return _check_frames(frames, simulated.CLASSES, classes, source.data)


def _nuscenes_version(split: str) -> str:
    if split.startswith("mini"):
        return "v1.0-mini"
    return "v1.0-test" if split == "test" else "v1.0-trainval"


def _check_frames(
    frames: Sequence[Any], labels: Sequence[str], classes: Sequence[str], where: str
) -> Sequence[Any]:
    if not len(frames):
        raise BoxcovError(f"{where}: there are no frames: give another range, or a higher count")
    if tuple(labels) != tuple(classes):
        raise BoxcovError(
            f"{where}: the labels are {join_names(labels, 10)}; the detector has "
            f"{join_names(classes, 10)}. A detector with names of its own is given by a function "
            "that loads it with classes=, python:FILE.py:FUNCTION"
        )
    return frames


def load_in_background(
    frames: Sequence[Any], workers: int, device: str, seed: int, batch: int = 1
) -> Sequence[Any]:
    """Return the frames in batches, loaded ahead by ``workers`` processes if there are any."""
    if workers and isinstance(frames, simulated.Simulated) and device.startswith("cuda"):
        raise BoxcovError(
            "--workers is for frames that are read from files: simulated frames are generated "
            "on the GPU, so remove it"
        )
    batches = frames if batch == 1 else batched(frames, batch)
    return loaded(batches, workers, seed) if workers else batches


def preload_frames(frames: Sequence[Any], device: str, progress: Progress = silent) -> list[Any]:
    """Return all frames as a list of tensors on ``device``, for several passes over them."""
    items: list[Any] = []
    for start in range(0, len(frames), PRELOAD_BATCH):
        numbers = range(start, min(start + PRELOAD_BATCH, len(frames)))
        if isinstance(frames, simulated.Simulated):
            points, targets = frames.batch(list(numbers))
            new = [([cloud], [target]) for cloud, target in zip(points, targets)]
        else:
            new = [frames[i] for i in numbers]
        items += move(new, torch.device(device))
        progress(len(items), len(frames))
    return items


def frames_of_detections(
    path: Path,
    found: Detections,
    given: PredictedData,
    load: Callable[..., Sequence[Any]] = load_labelled_frames,
) -> Sequence[Any]:
    """Return the frames that the detections of a file were computed on."""
    source = source_of_detections(path, found.meta, given)
    frames = load(source, "cpu", found.classes)
    check_frame_count(path, found, frames, source)
    return frames


def frame_count(found: Detections) -> int:
    """Return the number of frames that a file of detections states, or that have boxes."""
    return found.meta.get("frames", int(found.frame.max()) + 1 if len(found) else 0)


def check_frame_count(
    path: Path, found: Detections, frames: Sequence[Any], source: DataOptions
) -> None:
    """Raise unless the detections of a file can be of ``frames``, those of ``source``."""
    count = frame_count(found)
    if len(frames) < count or len(frames) != found.meta.get("frames", len(frames)):
        raise BoxcovError(
            f"{path}: boxes of {count} frames, but {source.data} has {len(frames)}: give the "
            "--data, --split and --count that they were predicted on"
        )
