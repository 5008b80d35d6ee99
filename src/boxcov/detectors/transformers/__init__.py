"""Detectors of Hugging Face transformers: DETR, YOLOS and RT-DETR, their queries as instances. Loaded from folders, never from the hub."""

from boxcov.detectors.transformers.checkpoints import load
from boxcov.detectors.transformers.detector import QueryDetector
from boxcov.detectors.transformers.families import Detr, RTDetr, Yolos, wrap

__all__ = ["Detr", "QueryDetector", "RTDetr", "Yolos", "load", "wrap"]
