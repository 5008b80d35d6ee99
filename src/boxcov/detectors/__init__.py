"""Detectors that fulfil the contract, one file or folder per family."""

from boxcov.detectors import centerpoint, tiny, torchvision, transformers, ultralytics, yolox

__all__ = ["centerpoint", "tiny", "torchvision", "transformers", "ultralytics", "yolox"]
