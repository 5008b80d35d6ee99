"""CenterPoint on LiDAR point clouds, with weights of det3d, mmdetection3d, OpenPCDet or boxcov."""

from boxcov.detectors.centerpoint.checkpoints import load, save
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.detector import CenterPoint
from boxcov.detectors.centerpoint.frameworks import to_framework
from boxcov.detectors.centerpoint.loss import object_counts

__all__ = ["CenterPoint", "Config", "load", "object_counts", "save", "to_framework"]
