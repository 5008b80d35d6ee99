"""nuScenes: frames from its v1.0 tables, and result files with covariances."""

from boxcov.data.nuscenes.classes import CLASSES
from boxcov.data.nuscenes.index import scene_names
from boxcov.data.nuscenes.results import read_results, write_results
from boxcov.data.nuscenes.sequence import NuScenes, frames, sequences

__all__ = [
    "CLASSES",
    "NuScenes",
    "frames",
    "read_results",
    "scene_names",
    "sequences",
    "write_results",
]
