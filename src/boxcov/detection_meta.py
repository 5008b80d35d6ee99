"""What a file of detections says about itself: one schema for all formats that boxcov reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from boxcov.errors import BoxcovError
from boxcov.input_file import MAX_FRAMES, Count, Range, conform

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
    "frames": Annotated[int, Range(0, MAX_FRAMES)],
    "block": Count,
    "milliseconds": list[float],
    "ms": list[float],
    # what the numbers mean
    "signals": list[str],
    # "error_model" is checked by Detections, against the numbers that it describes
}


def check_meta(meta: Any, boxes_until: int = 0) -> Mapping[str, Any]:
    """Return the metadata of a file; raise if an entry that boxcov reads is not what it should be.

    Entries that boxcov does not read stay as they are.
    boxes_until: the number of the last frame that has a box, plus 1.

    >>> check_meta({"frames": 0}, boxes_until=3)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: meta.frames is 0, but there are boxes in frame 2
    """
    meta = conform(meta, dict[str, Any], "meta")
    for name, kind in _SCHEMA.items():
        if name in meta:
            conform(meta[name], kind, f"meta.{name}")
    frames = meta.get("frames", max(boxes_until, len(meta.get("milliseconds", ()))))
    if frames < boxes_until:
        raise BoxcovError(
            f"meta.frames is {frames}, but there are boxes in frame {boxes_until - 1}"
        )
    if len(meta.get("milliseconds", ())) > frames:
        raise BoxcovError(f"meta.milliseconds has more numbers than the {frames} frames")
    return dict(meta)


def check_summary(about: Any, name: str, D: int) -> None:
    """Raise if ``meta["error_model"]`` does not describe the error model that gave ``name``."""
    lists = {"thresholds": 2, "levels": 1, "dof": D}
    if not (
        isinstance(about, Mapping)
        and all(
            isinstance(about.get(key), (list, tuple))
            and len(about[key]) >= count
            and all(isinstance(v, (int, float)) or (v is None and key == "dof") for v in about[key])
            for key, count in lists.items()
        )
        and len(about["dof"]) == D
        and isinstance(about.get("threshold"), (int, float))
    ):
        raise BoxcovError(
            f"these detections have {name}, but meta['error_model'] does not say the thresholds, "
            f"the threshold, the levels and {D} dof of the error model that computed it: predict "
            "again with the calibrated posterior"
        )
