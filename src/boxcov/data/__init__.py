"""Data sets: indexable sequences of frames ``(inputs, targets)`` for ``detector(inputs)``."""

from boxcov.data import coco, kitti, nuscenes, shapes, simulated
from boxcov.data.loader import loaded
from boxcov.data.sequence import batched

__all__ = ["batched", "coco", "kitti", "loaded", "nuscenes", "shapes", "simulated"]
