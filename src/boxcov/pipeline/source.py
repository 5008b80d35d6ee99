"""Which frames a source names: default splits and ranges, and those that a file was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os.path import isdir
from pathlib import Path
from typing import Any, Literal
from warnings import warn

from boxcov._files.input_file import MAX_FRAMES, conform
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.pipeline.options import DataOptions, PredictedData
from boxcov.pipeline.user_code import PREFIX

_SPLITS = {  # by kind of data: for a fit, for predictions and for calibration
    "nuscenes": ("train", "val", "val"),
    "kitti": ("training", "training", "training"),  # the only one with labels
    "coco": ("train2017", "val2017", "val2017"),
}


def default_split(data: str, use: Literal["fit", "predict", "calibrate"]) -> str:
    """Return the split of a command if none is given: another one for each use, if possible."""
    kind, _, where = data.partition(":")
    splits = _SPLITS.get(kind, ("train", "test", "val"))
    split = dict(zip(("fit", "predict", "calibrate"), splits))[use]
    return f"{_mini(where)}{split}" if kind == "nuscenes" else split


def _mini(root: str) -> str:
    """Return the prefix of the splits of a nuScenes folder that holds the mini version alone."""
    # isdir is False, not an error, for a path that is too long
    has_mini, has_all = (isdir(f"{root}/v1.0-{name}") for name in ("mini", "trainval"))
    return "mini_" if has_mini and not has_all else ""


def split_image_size(where: str) -> tuple[str, str]:
    """Return the folder of the images and their size as given: pixels, "whole" or nothing."""
    root, _, size = where.rpartition("@")
    return (root, size) if root and (size == "whole" or size.isdecimal()) else (where, "")


def parse_split(split: str | None) -> tuple[str, slice]:
    """Return the name of a split and the range of its frames; raise if that is no range."""
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
    try:
        (own, own_range), (other, other_range) = parse_split(source.split), parse_split(split)
    except BoxcovError:  # the name in a file is a free text
        return False
    ours, theirs = (range(MAX_FRAMES)[part] for part in (own_range, other_range))
    ours, theirs = ours[:length], theirs[:count]
    return own == other and max(ours.start, theirs.start) < min(ours.stop, theirs.stop)


def warn_of_shared_frames(
    what: str, name: str, count: int, source: DataOptions, length: int, effect: str
) -> None:
    """Warn if ``what``, which ``count`` frames of ``name`` made, saw some of those of ``source``.

    name: as of ``frames_name``; length: of ``source``; effect: the rest of the sentence.
    """
    if shares_frames(name, count, source, length):
        split = str(source.split).partition("[")[0]
        warn(
            f"{source.data}: {what} was fitted on frames of the split {split}, too{effect}",
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
                f"{path}: does not state which frames it was computed on: give --data KIND:WHERE "
                "and --split NAME, and --count unless it is that of boxcov predict"
            )
        if data.startswith("coco:") and not split_image_size(data)[1]:
            raise BoxcovError(
                f"{path}: does not state the size of the images that its boxes are on: give --data "
                f"{data}@640 for images letterboxed to 640 pixels, or {data}@whole"
            )
        return DataOptions(data, given.split or default_split(data, "predict"), given.count)
    if stored.get("data") == "simulated":  # the name in files of boxcov 0.1
        stored = {**stored, "data": "simulated:clear"}
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
