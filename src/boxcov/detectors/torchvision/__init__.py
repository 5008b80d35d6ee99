"""Detectors of torchvision: RetinaNet, FCOS, SSD and Faster R-CNN."""

from boxcov.detectors.torchvision.checkpoints import load, wrap
from boxcov.detectors.torchvision.dense import FCOS, SSD, RetinaNet
from boxcov.detectors.torchvision.detector import TorchvisionDetector
from boxcov.detectors.torchvision.rcnn import FasterRCNN

__all__ = ["FCOS", "SSD", "FasterRCNN", "RetinaNet", "TorchvisionDetector", "load", "wrap"]
