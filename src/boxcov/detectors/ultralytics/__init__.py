"""Ultralytics' YOLO, version 8 and later."""

from boxcov.detectors.ultralytics.checkpoints import load
from boxcov.detectors.ultralytics.detector import Yolo, wrap

__all__ = ["Yolo", "load", "wrap"]
