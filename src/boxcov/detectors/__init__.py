"""Detectors that fulfil the contract, one file or folder per family."""

from boxcov.detectors import centerpoint, torchvision, transformers, ultralytics, yolox

__all__ = ["centerpoint", "torchvision", "transformers", "ultralytics", "yolox"]
