"""KITTI's object detection data: frames, and result files with covariances."""

from boxcov.data.kitti.drive import KittiDrive, sequences
from boxcov.data.kitti.results import read_results, write_results
from boxcov.data.kitti.sequence import CLASSES, TYPES, Kitti, frames

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
