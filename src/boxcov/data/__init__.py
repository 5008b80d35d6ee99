"""Frames: sized, indexable sequences of (inputs, targets), ready for ``detector(inputs)``."""

from boxcov.data import coco, kitti, nuscenes, shapes, simulated
from boxcov.data.frame import batched
from boxcov.data.loader import loaded

__all__ = ["batched", "coco", "kitti", "loaded", "nuscenes", "shapes", "simulated"]
