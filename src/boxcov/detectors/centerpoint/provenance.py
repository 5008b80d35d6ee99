"""What was understood of a checkpoint, with the evidence for each item."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import warn

from boxcov.detectors.centerpoint.config import Config, Framework, Pillars
from boxcov.errors import BoxcovError, BoxcovWarning

TITLES: dict[Framework, str] = {
    "mmdet3d": "mmdetection3d",
    "det3d": "det3d",
    "openpcdet": "OpenPCDet",
}
# The branch with the conventions of 1.0 was begun in 2021; its version said 0.16 at most.
_BRANCH_BEGUN, _BRANCH_VERSION = "202104", 16
GENERATIONS = {True: "before 1.0", False: "1.0 or later"}


@dataclass(frozen=True)
class Fact:
    """One thing that was understood of a checkpoint."""

    name: str
    value: str
    evidence: str


def choose_generation(
    given: bool | None, about: Mapping[str, Any], point_features: int | None, path: Path
) -> tuple[bool, str]:
    """Return whether mmdetection3d before 1.0 wrote a checkpoint, as given or by the evidence.

    given: ``legacy`` of the user, who is warned if the file tells another generation.
    """
    if given is None:
        return is_legacy(about, point_features, path)
    try:
        found, evidence = is_legacy(about, point_features, path)
    except BoxcovError:
        return given, "as given"
    if found != given:
        warn(
            f"{path}: read as a file of mmdetection3d {GENERATIONS[given]}, as given, but it says "
            f"{GENERATIONS[found]} ({evidence}): sizes and headings will be wrong. Remove legacy= "
            "(--legacy or --no-legacy)",
            BoxcovWarning,
            stacklevel=2,
        )
    return given, "as given"


def is_legacy(about: Mapping[str, Any], point_features: int | None, path: Path) -> tuple[bool, str]:
    """Return whether mmdetection3d before 1.0 wrote a checkpoint, and the evidence.

    Version 1.0 changed the conventions of sizes and yaw, but the weights have the same shapes.
    Raise if nothing in the file decides.

    about: the meta data. point_features: inputs of the pillar encoder's first layer.
    """
    version, date = about.get("mmdet3d_version"), _date(about, path)
    numbers = [int(part) for part in re.findall(r"\d+", str(version or ""))[:2]]
    if "mmengine_version" in about:
        return False, "mmengine_version in the meta data, which only 1.1 and later write"
    if numbers and numbers[0] >= 1:
        return False, f"mmdet3d_version {version} in the meta data"
    if len(numbers) == 2 and numbers[1] > _BRANCH_VERSION:
        return True, f"mmdet3d_version {version} in the meta data"
    if date and date[0] < _BRANCH_BEGUN:
        return True, f"{date[1]}, before the conventions of 1.0 existed"
    if not numbers and point_features == 11:
        return False, "11 point features, since 1.0 (10 before)"
    seen = [f"mmdet3d_version {version}" if version else "no mmdet3d_version"]
    seen += [date[1]] if date else []
    seen += [f"{point_features} point features"] if point_features else []
    raise BoxcovError(
        f"{path}: the file does not tell whether mmdetection3d before 1.0 wrote it, which had "
        f"other conventions for sizes and yaw (found: {', '.join(seen)}): give legacy=True for "
        "before 1.0 or legacy=False, on the command line --legacy or --no-legacy. If you do not "
        "know, run boxcov check with either: it compares the boxes with their classes"
    )


def _date(about: Mapping[str, Any], path: Path) -> tuple[str, str] | None:
    """Return the year and month of a checkpoint, as 202110, and where they are from."""
    text = str(about.get("time", ""))
    try:
        stamp = time.strptime(text)  # time.asctime, as mmcv writes it
        return f"{stamp.tm_year}{stamp.tm_mon:02}", f"written {stamp.tm_year}-{stamp.tm_mon:02}"
    except ValueError:
        pass
    if found := re.match(r"(20\d\d)(\d\d)\d\d_", text):
        return found[1] + found[2], f"written {found[1]}-{found[2]}"
    if found := re.search(r"_(20\d\d)(\d\d)\d\d_\d{6}", path.name):
        return found[1] + found[2], f"{found[1]}-{found[2]} in the file name"
    return None


def describe(config: Config, framework: Framework, legacy: bool | None, source: str) -> list[Fact]:
    """Return what the configuration says of a checkpoint. source: where the configuration is from.

    legacy: whether the conventions are those of mmdetection3d before 1.0.
    """
    low, high = config.point_range[:3], config.point_range[3:]
    axes = ", ".join(f"{axis} {a:g} to {b:g}" for axis, a, b in zip("xyz", low, high))
    size = " x ".join(f"{side:g}" for side in config.voxel_size)
    rules, encoder, (rows, columns) = config.reporting, config.encoder, config.map_size
    old = framework == "det3d" or legacy
    nms = f"rotated NMS at IoU {rules.overlap:g}" if rules.nms == "rotated" else "circle NMS"
    limit = "no limits"
    if encoder.max_cells is not None:
        limit = f"at most {encoder.max_cells[1]:,} cells of {encoder.max_points} points per frame"
    if isinstance(encoder, Pillars):
        widths = " and ".join(map(str, encoder.widths))
        kind = f"pillars, widths {widths}, {encoder.point_features} features per point"
        limit += ", points of any height" if encoder.any_height else ""
    else:
        kind = "sparse voxels"
        limit += ", points shuffled" if encoder.shuffled else ""
    return [
        Fact("encoder", kind, "names and shapes of the weights"),
        Fact("grid", f"{size} m; {axes} m; a map of {rows} x {columns} cells", source),
        Fact("limits", limit, source),
        Fact("sweeps", f"{config.sweeps or 'not known how many'} per frame", source),
        Fact(
            "classes",
            " | ".join(" ".join(names) for names in config.tasks),
            f"{source}; channels of the heat maps: "
            + " ".join(str(len(names)) for names in config.tasks),
        ),
        Fact(
            "boxes",
            "log sizes (w, l, h), rotation -yaw - pi / 2" if old else "log sizes (l, w, h), yaw",
            "conventions of " + TITLES[framework] + (" before 1.0" if legacy else ""),
        ),
        Fact(
            "selection",
            f"score > {rules.threshold:g}, {nms}, {rules.max_boxes} boxes per task",
            source,
        ),
    ]
