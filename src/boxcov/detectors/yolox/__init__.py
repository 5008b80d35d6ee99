"""YOLOX on images, nano to x, with or without BatchNorm folded into the convolutions."""

from boxcov.detectors.yolox.checkpoints import load
from boxcov.detectors.yolox.config import SIZES, Config
from boxcov.detectors.yolox.detector import YOLOX

__all__ = ["SIZES", "YOLOX", "Config", "load"]
