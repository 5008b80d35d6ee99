"""Detectors that fulfil the contract, one file or folder a family."""

from boxcov.detectors import centerpoint, transformers, yolox

__all__ = ["centerpoint", "transformers", "yolox"]
