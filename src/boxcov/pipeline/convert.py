"""The work of ``boxcov convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.export.choose import Which
from boxcov.pipeline import formats
from boxcov.pipeline.sources import check_folder, source_of


def run(
    path: Path,
    out: Path,
    format: str,
    data: str | None = None,
    frame_id: str = "lidar",
    covariance: Which = "predictive",
) -> dict[str, Any]:
    """Write the detections of ``path`` to ``out`` in another format, with the frames that it was made from where the format has a use for them."""
    check_folder(out, folder=format == "kitti")
    if out.exists() and out.samefile(path):
        raise BoxcovError(f"{out}: is the file to be converted; give another name")
    found = Detections.load(path)
    count = found.meta.get("frames", int(found.frame.max()) + 1 if len(found) else 0)
    frames = _frames(path, found, format, data, count)
    words = formats.Words(frame_id, covariance)
    formats.check(format, frames, found, found.predictive is not None, words)
    formats.write(format, out, frames, found, words)
    return {"out": str(out), "format": format, "boxes": len(found), "frames": count}


def _frames(path: Path, found: Detections, format: str, data: str | None, count: int) -> Any:
    if format not in formats.FRAMES or (format in formats.MESSAGES and "source" not in found.meta):
        return None
    frames = source_of(path, found.meta, data).frames("cpu", found.classes)
    if len(frames) != count:
        raise BoxcovError(
            f"{path}: of {count} frames, and there are {len(frames)} where they were made from: they are not the same"
        )
    return frames
