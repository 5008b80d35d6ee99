"""The file formats of ``boxcov predict`` and ``boxcov convert``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import warn

from boxcov._files.output_file import to_json, write_text
from boxcov.box_layout import IMAGE, SPACE, find_layout
from boxcov.data import coco, kitti, nuscenes
from boxcov.data.poses import BOX_FIELDS, transform_detections
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, BoxcovWarning, import_package
from boxcov.export import ros, tables
from boxcov.export.rerun import write_rrd
from boxcov.pipeline.kitti_axes import TO_KITTI, KittiAsNuScenes, detections_to_kitti
from boxcov.pipeline.options import MessageOptions

MESSAGE_FORMATS = ("ros", "autoware")
FORMATS_WITH_FRAMES = ("nuscenes", "kitti", "coco", "rerun", *MESSAGE_FORMATS)
_PACKAGES = {"parquet": "pyarrow", "rerun": "rerun"}
_DATA_SETS: dict[str, tuple[str, Any]] = {
    "nuscenes": ("nuScenes", nuscenes.NuScenes),
    "kitti": ("KITTI", (kitti.Kitti, KittiAsNuScenes)),
    "coco": ("COCO", coco.Coco),
}
_LAYOUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "nuscenes": (BOX_FIELDS,),
    "coco": (IMAGE,),
    "autoware": (SPACE,),
    "ros": (SPACE, IMAGE),
}


def check_format(
    format: str,
    frames: Sequence[Any] | None,
    fields: tuple[str, ...],
    has_predictive: bool = False,
    message: MessageOptions | None = None,
) -> None:
    """Raise unless boxes with these fields in ``frames`` can be written in this format."""
    if format in _LAYOUTS:
        find_layout(fields, _LAYOUTS[format], f"the format {format}", exact=format in _DATA_SETS)
    if format in _DATA_SETS and not isinstance(frames, _DATA_SETS[format][1]):
        raise BoxcovError(
            f"the format {format} is for frames of {_DATA_SETS[format][0]}: "
            f"give --data {format}:ROOT, or use the format native"
        )
    covariance = (message or MessageOptions()).covariance
    if format in MESSAGE_FORMATS and not has_predictive and covariance == "predictive":
        raise BoxcovError(
            f"the format {format} is read by trackers, which need the covariance of the errors: "
            "predict with a posterior from boxcov calibrate, or --covariance epistemic"
        )
    if format in _PACKAGES:
        import_package(_PACKAGES[format])


def write_detections(
    format: str, out: Path, frames: Any, found: Detections, message: MessageOptions | None = None
) -> None:
    """Write the boxes of all frames in a format that ``check_format`` accepts.

    frames: may be None unless the format is one of FORMATS_WITH_FRAMES.
    """
    if format == "native":
        found.save(out)
    elif format == "csv":
        tables.write_csv(out, found)
    elif format == "parquet":
        tables.write_parquet(out, found)
    elif format == "rerun":
        write_rrd(out, found, frames)
    elif format in MESSAGE_FORMATS:
        _write_messages(format, out, frames, found, message or MessageOptions())
    else:
        _write_results(format, out, frames, found)


def _write_results(format: str, out: Path, frames: Any, found: Detections) -> None:
    """Write the submission format of a data set."""
    per_frame = found.frames(len(frames))
    if format == "nuscenes":
        nuscenes.write_results(out, frames, per_frame)
    elif format == "coco":
        coco.write_results(out, frames, per_frame)
    elif isinstance(frames, KittiAsNuScenes):
        in_kitti = [detections_to_kitti(one) for one in per_frame]
        kitti.write_results(out, frames.frames, in_kitti)
        written = sum(map(len, in_kitti))
        if written < len(found):
            warn(
                f"{out}: {len(found) - written} of {len(found)} boxes are not written, because "
                f"KITTI has no such classes: it has {', '.join(kitti.CLASSES)}",
                BoxcovWarning,
                stacklevel=3,
            )
    else:
        kitti.write_results(out, frames, (replace(one, classes=kitti.CLASSES) for one in per_frame))


def _write_messages(
    format: str, out: Path, frames: Any, found: Detections, options: MessageOptions
) -> None:
    """Write one message per frame, in the axes of the data set's sensor."""
    if isinstance(frames, KittiAsNuScenes):
        found = transform_detections(found, TO_KITTI)
    build: Callable[..., dict[str, Any]]
    if format == "autoware":
        build, kind = ros.detected_objects, "autoware_perception_msgs/DetectedObjects"
    elif found.fields[:4] == IMAGE:
        build, kind = ros.detection2d_array, "vision_msgs/Detection2DArray"
    else:
        build, kind = ros.detection3d_array, "vision_msgs/Detection3DArray"
    count = found.meta.get("frames") if frames is None else len(frames)
    messages = []
    for number, one in enumerate(found.frames(count)):
        # microseconds; only nuScenes has time stamps
        time = frames.timestamp(number) if isinstance(frames, nuscenes.NuScenes) else 0
        stamp = (time // 1_000_000, time % 1_000_000 * 1000)
        messages.append(build(one, options.frame_id, stamp, covariance=options.covariance))
    content = {
        "type": kind,
        "covariance": options.covariance,
        "uncertainty": dict(found.meta),
        "messages": messages,
    }
    write_text(out, to_json(content))
