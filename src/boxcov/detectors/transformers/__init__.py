"""DETR, YOLOS and RT-DETR of Hugging Face transformers, loaded from local folders."""

from boxcov.detectors.transformers.checkpoints import load
from boxcov.detectors.transformers.detector import QueryDetector
from boxcov.detectors.transformers.families import Detr, RTDetr, Yolos, wrap

__all__ = ["Detr", "QueryDetector", "RTDetr", "Yolos", "load", "wrap"]
