"""KITTI's object detection data: frames, and result files with covariances."""

from boxcov.data.kitti.results import read_results, write_results
from boxcov.data.kitti.sequence import CLASSES, TYPES, Kitti, KittiDrive, frames, sequences

__all__ = [
    "CLASSES",
    "TYPES",
    "Kitti",
    "KittiDrive",
    "frames",
    "read_results",
    "sequences",
    "write_results",
]
