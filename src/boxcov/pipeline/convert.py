"""``boxcov convert``: write a file of detections in another format."""

from __future__ import annotations

from typing import Any

from boxcov._files.input_file import reading
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.pipeline.frames import frame_count, frames_of_detections, load_frames
from boxcov.pipeline.options import ConvertCommand
from boxcov.pipeline.output_format import (
    FORMATS_WITH_FRAMES,
    MESSAGE_FORMATS,
    check_format,
    write_detections,
)
from boxcov.pipeline.paths import holds_output


@holds_output
def run(options: ConvertCommand) -> dict[str, Any]:
    """Write the detections in another format; return the number of boxes and frames."""
    out, format = options.out, options.format
    found = Detections.load(options.detections)
    if out.exists() and out.samefile(options.detections):
        raise BoxcovError(f"{out}: is the input file; give another name")
    has_predictive = found.predictive is not None
    with reading(options.detections, "predictions of frames that can be loaded"):
        frames = _load_frames(options, found)
        check_format(format, frames, found.fields, has_predictive, options.message)
    write_detections(format, out, frames, found, options.message)
    count = frame_count(found) if frames is None else len(frames)
    return {"out": str(out), "format": format, "boxes": len(found), "frames": count}


def _load_frames(options: ConvertCommand, found: Detections) -> Any:
    """Return the frames of the detections, or None if the format does not need them."""
    optional = options.format in (*MESSAGE_FORMATS, "rerun") and "source" not in found.meta
    if options.format not in FORMATS_WITH_FRAMES or optional:
        return None
    return frames_of_detections(options.detections, found, options.source, load_frames)
