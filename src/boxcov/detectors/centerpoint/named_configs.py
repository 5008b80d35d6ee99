"""The published nuScenes networks by name."""

from __future__ import annotations

from dataclasses import replace

from boxcov.detectors.centerpoint.config import Config, Framework
from boxcov.errors import BoxcovError

NAMES = ("pillar02", "voxel01", "voxel0075")
CIRCLE = "-circlenms"  # at the end of a name: circle NMS instead of rotated NMS


def named_config(name: str, framework: Framework) -> Config:
    """Return the published nuScenes network ``name`` of a framework.

    name: ``pillar02``, ``voxel01`` or ``voxel0075``; with ``-circlenms`` for circle NMS.

    >>> named_config("voxel0075", "det3d").point_range[3], named_config("voxel01", "det3d").sweeps
    (54.0, 10)
    >>> named_config("pillar02-circlenms", "mmdet3d").reporting.nms
    'circle'
    """
    plain = name.removesuffix(CIRCLE)
    if plain not in NAMES:
        raise BoxcovError(
            f"no configuration {name!r}: give {', '.join(NAMES)} (with {CIRCLE} for circle NMS), "
            "or the path of a configuration file of the framework (.py or .yaml)"
        )
    sizes = {"voxel01": 0.1, "voxel0075": 0.075}
    config = (
        Config.pillar(framework) if plain == "pillar02" else Config.voxel(sizes[plain], framework)
    )
    config = replace(config, sweeps=10)
    if plain == name:
        return config
    return replace(config, reporting=replace(config.reporting, nms="circle"))
