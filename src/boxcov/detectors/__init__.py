"""Detectors that fulfil the contract, one file or folder a family."""

from boxcov.detectors import centerpoint, yolox

__all__ = ["centerpoint", "yolox"]
