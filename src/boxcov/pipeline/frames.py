"""Load the frames that ``--data KIND:WHERE`` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os.path import isdir
from pathlib import Path
from typing import Any
from warnings import warn

import torch

from boxcov._files.input_file import MAX_FRAMES, conform
from boxcov._torch.modules import move
from boxcov.data import batched, coco, kitti, loaded, nuscenes, simulated
from boxcov.data.sequence import FrameSequence
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, BoxcovWarning, counted, did_you_mean, join_names
from boxcov.pipeline.kitti_axes import KittiAsNuScenes, has_kitti_classes
from boxcov.pipeline.options import DataOptions, PredictedData
from boxcov.pipeline.user_code import PREFIX, load_function, user_code

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
    name, frame_range = _parse_split(source.split)
    name = name or default_training_split(source.data)
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
    split, splits = source.split or default_training_split(source.data), ", ".join(SIMULATED_SPLITS)
    if "[" in split:
        raise BoxcovError(
            f"split {split!r}: simulated splits have no ranges: use --count, and --split with one "
            f"of {splits}"
        )
    if split not in SIMULATED_SPLITS:
        known = did_you_mean(split, SIMULATED_SPLITS)
        raise BoxcovError(f"no split {split!r} of simulated frames{known}: there are {splits}")
    frames = simulated.frames(
        scenario or "clear",
        seed=source.seed + SIMULATED_SPLITS[split],
        count=100 if source.count is None else source.count,
        sweeps=source.sweeps,
        device=device,
    )
    return _check_frames(frames, simulated.CLASSES, classes, source.data)


def _mini(root: str) -> str:
    """Return the prefix of the splits of a nuScenes folder that holds the mini version alone."""
    # isdir is False, not an error, for a path that is too long
    has_mini, has_all = (isdir(f"{root}/v1.0-{name}") for name in ("mini", "trainval"))
    return "mini_" if has_mini and not has_all else ""


def _nuscenes_version(split: str) -> str:
    if split.startswith("mini"):
        return "v1.0-mini"
    return "v1.0-test" if split == "test" else "v1.0-trainval"


def split_image_size(where: str) -> tuple[str, str]:
    """Return the folder of the images and their size as given: pixels, "whole" or nothing."""
    root, _, size = where.rpartition("@")
    return (root, size) if root and (size == "whole" or size.isdecimal()) else (where, "")


def _parse_split(split: str | None) -> tuple[str, slice]:
    name, bracket, rest = (split or "").partition("[")
    if not bracket:
        return name, slice(None)
    try:
        start, stop = (int(end) if end else None for end in rest.removesuffix("]").split(":"))
    except ValueError:
        raise BoxcovError(
            f"split {split!r}: give a range of frames as in train[:28] or train[28:40]"
        ) from None
    return name, slice(start, stop)


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


def default_training_split(data: str) -> str:
    """Return the split of ``load_frames``: frames that a detector is usually trained on."""
    kind, _, where = data.partition(":")
    splits = {"nuscenes": f"{_mini(where)}train", "kitti": "training", "coco": "train2017"}
    return splits.get(kind, "train")


def default_test_split(data: str) -> str:
    """Return the split for predictions: frames that a detector is usually not trained on."""
    kind, _, where = data.partition(":")
    # training is the only split of KITTI with labels
    splits = {"nuscenes": f"{_mini(where)}val", "kitti": "training", "coco": "val2017"}
    return splits.get(kind, "test")


def frames_name(source: DataOptions) -> str:
    """Return data, split and seed in words, as error models remember their frames."""
    return f"{source.data} {source.split} seed {source.seed}"


def shares_frames(name: str, count: int, source: DataOptions, length: int) -> bool:
    """Return whether ``count`` frames of ``frames_name`` are among the ``length`` of ``source``.

    Ranges that count from the end of a split are only compared as texts.

    >>> source = DataOptions("coco:photos", "val2017[30:]")
    >>> [shares_frames(f"coco:photos val2017[:{n}] seed 7", n, source, 50) for n in (30, 40)]
    [False, True]
    """
    if name == frames_name(source):
        return True
    data, _, split = name.rpartition(" seed ")[0].rpartition(" ")
    if data != source.data or data.startswith("simulated"):
        return False
    (own, own_range), (other, other_range) = _parse_split(source.split), _parse_split(split)
    ours, theirs = (range(MAX_FRAMES)[part] for part in (own_range, other_range))
    ours, theirs = ours[:length], theirs[:count]
    return own == other and max(ours.start, theirs.start) < min(ours.stop, theirs.stop)


def warn_of_other_inputs(fitted: Mapping[str, Any], source: DataOptions) -> None:
    """Warn if ``source`` has another image size or number of sweeps than a posterior's frames.

    fitted: the meta data of the posterior, empty if it was made in Python.
    """
    (kind, _, where), (other, _, root) = (
        str(data).partition(":") for data in (source.data, fitted.get("data", ""))
    )
    own = known = ""
    if kind == other == "coco":
        own, known = (f"coco:ROOT@{split_image_size(folder)[1]}" for folder in (where, root))
    elif kind == other and kind in ("simulated", "nuscenes") and "sweeps" in fitted:
        own, known = f"--sweeps {source.sweeps}", f"--sweeps {fitted['sweeps']}"
    if own != known:
        option = f"--data {known}" if kind == "coco" else known
        warn(
            f"{source.data}: these are frames of {own}, but the posterior was fitted on frames of "
            f"{known}, with other errors: give {option}, or fit a posterior on frames like these",
            BoxcovWarning,
            stacklevel=3,
        )


def other_split(source: DataOptions, first: str, second: str) -> str:
    """Return the advice to take other frames than ``source``; first, second: uses of its parts.

    >>> other_split(DataOptions("coco:photos", "val2017[30:]"), "fit", "calibrate")
    "give another --split, or parts of it, 'val2017[:100]' to fit and 'val2017[100:]' to calibrate"
    """
    split = str(source.split).partition("[")[0]
    parts = f", or parts of it, '{split}[:100]' to {first} and '{split}[100:]' to {second}"
    return "give another --split" + ("" if source.data.startswith("simulated") else parts)


def default_calibration_split(data: str) -> str:
    """Return the split for calibration: different from that of ``boxcov predict`` if possible."""
    return "val" if data.startswith(("simulated", PREFIX)) else default_test_split(data)


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


def source_of_detections(path: Path, meta: Mapping[str, Any], given: PredictedData) -> DataOptions:
    """Return the frames that a file of detections was computed on.

    given: which frames these are if the file does not say so, or where they are now.
    """
    stored, data = meta.get("source"), given.data
    if "files" in meta:
        raise BoxcovError(
            f"{path}: boxes of {meta['files']}, frames without labels: predict labelled frames "
            "with --data KIND:WHERE"
        )
    if not isinstance(stored, Mapping):
        if data is None:
            raise BoxcovError(
                f"{path}: does not state which frames it was computed on: give --data KIND:WHERE, "
                "and --split and --count unless they are those of boxcov predict"
            )
        if data.startswith("coco:") and not split_image_size(data)[1]:
            raise BoxcovError(
                f"{path}: does not state the size of the images that its boxes are on: give --data "
                f"{data}@640 for images letterboxed to 640 pixels, or {data}@whole"
            )
        return DataOptions(data, given.split or default_test_split(data), given.count)
    source: DataOptions = conform(stored, DataOptions, f"{path}: meta.source")
    if given.split not in (None, source.split) or given.count not in (None, source.count):
        raise BoxcovError(
            f"{path}: states its frames, split {source.split} and count {source.count}: remove "
            "--split and --count"
        )
    if data is None:
        if source.data.startswith(PREFIX):  # reading a file never runs what the file names
            raise BoxcovError(
                f"{path}: its frames come from {source.data}, which boxcov does not run unless you "
                f"name it: give --data {source.data}"
            )
        return source
    same_kind = data.partition(":")[0] == source.data.partition(":")[0]
    if not same_kind or (data.startswith("simulated") and data != source.data):
        raise BoxcovError(
            f"{path}: predictions for {source.data}, not for {data}: "
            "--data only states where a data set is now"
        )
    size, other = (split_image_size(where)[1] for where in (source.data, data))
    if size and other not in ("", size):
        raise BoxcovError(f"{path}: boxes on images @{size}, not @{other}: remove @{other}")
    return replace(source, data=f"{data}@{size}" if size and not other else data)
