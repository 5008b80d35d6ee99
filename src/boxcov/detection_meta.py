"""What a file of detections says about itself: one schema for all formats that boxcov reads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from boxcov._files.input_file import MAX_CLASSES, MAX_FIELDS, MAX_FRAMES, conform
from boxcov._files.output_file import to_json
from boxcov.errors import BoxcovError, counted, join_names

_SCHEMA: dict[str, Any] = {
    # how the covariances were computed
    **dict.fromkeys(("method", "weights_sha256", "detector", "device", "boxcov", "torch"), str),
    **dict.fromkeys(("derivative", "depth", "form", "fisher", "posterior", "refused"), str | None),
    **dict.fromkeys(("samples", "seed"), int | None),
    **dict.fromkeys(("epsilon", "dropout", "n_data", "tolerance"), float | None),
    "posterior_sha256": str,
    "configuration": dict[str, str],
    "prior_precision": float | str | dict[str, float] | None,
    # which frames, and the time of each
    "source": dict[str, str | int | None],
    "files": str,
    "names": list[str],
    "frames": int,
    "block": int,
    "milliseconds": list[float],
    # what the numbers mean
    "signals": list[str],
    # "error_model" is checked by Detections, against the numbers that it describes
}


def check_names(fields: Any, classes: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a file; raise if they are more than any detector has, or not distinct."""
    fields = conform(fields, tuple[str, ...], "fields")
    classes = conform(classes, tuple[str, ...], "classes")
    for what, names, most in (("fields", fields, MAX_FIELDS), ("classes", classes, MAX_CLASSES)):
        if len(names) > most:
            raise BoxcovError(f"{len(names)} {what}, at most {most} are read")
    if len(set(fields)) < len(fields):
        raise BoxcovError(f"two fields have the same name: {join_names(fields)}")
    return fields, classes


def check_meta(meta: Any, boxes_until: int = 0) -> Mapping[str, Any]:
    """Return the metadata of a file; raise if an entry that boxcov reads is not what it should be.

    Entries that boxcov does not read stay as they are.
    boxes_until: the number of the last frame that has a box, plus 1.
    """
    meta = conform(meta, dict[str, Any], "meta")
    for name, kind in _SCHEMA.items():
        if name in meta:
            conform(meta[name], kind, f"meta.{name}")
    for name in ("frames", "block"):
        if not 0 <= meta.get(name, 0) <= MAX_FRAMES:
            raise BoxcovError(
                f"meta.{name} is {meta[name]}, expected a whole number from 0 to {MAX_FRAMES}"
            )
    times = len(meta.get("milliseconds", ()))
    frames = meta.get("frames", max(boxes_until, times))
    if frames < boxes_until:
        raise BoxcovError(
            f"meta.frames is {frames}, but there are boxes in frame {boxes_until - 1}"
        )
    if times > frames:
        raise BoxcovError(f"meta.milliseconds has more numbers than the {counted(frames, 'frame')}")
    return meta


def meta_to_write(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata for a file; raise if an entry cannot be written as JSON.

    >>> import numpy as np
    >>> meta_to_write({"town": "Ulm", "pose": np.eye(4)})
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: meta['pose'] cannot be written (Object of type ndarray is not JSON \
serializable): meta may hold texts, numbers, booleans, None, and lists and dicts of these
    """
    for name, entry in meta.items():
        try:
            to_json({name: entry})
        except TypeError as error:
            raise BoxcovError(
                f"meta[{name!r}] cannot be written ({error}): meta may hold texts, numbers, "
                "booleans, None, and lists and dicts of these"
            ) from None
    return dict(meta)


def check_summary(about: Any, name: str, D: int) -> None:
    """Raise if ``meta["error_model"]`` does not describe the error model that gave ``name``."""
    if not (
        isinstance(about, Mapping)
        and _is_rising(about.get("thresholds"), 2)
        and _is_rising(about.get("levels"), 1)
        and _is_number(about.get("threshold"))
        and isinstance(about.get("dof"), (list, tuple))
        and len(about["dof"]) == D
        and all(v is None or (_is_number(v) and not v <= 0) for v in about["dof"])
    ):
        raise BoxcovError(
            f"these detections have {name}, but meta['error_model'] does not say the thresholds, "
            f"the threshold, the levels and {D} dof of the error model that computed it: predict "
            "again with the calibrated posterior"
        )


def _is_rising(values: Any, count: int) -> bool:
    """Whether these are at least ``count`` numbers from 0 to 1, each above the one before."""
    return (
        isinstance(values, (list, tuple))
        and len(values) >= count
        and all(map(_is_number, values))
        and all(low < high for low, high in pairwise(values))
        and 0 <= values[0] <= values[-1] <= 1
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not abs(value) > 1e308  # JSON has integers beyond
