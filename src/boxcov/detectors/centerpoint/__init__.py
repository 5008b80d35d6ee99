"""CenterPoint on LiDAR point clouds, with weights of det3d, mmdetection3d, OpenPCDet or boxcov."""

from boxcov.detectors.centerpoint.checkpoints import load, save
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.detector import CenterPoint

__all__ = ["CenterPoint", "Config", "load", "save"]
