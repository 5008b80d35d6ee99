"""Detectors that fulfil the contract, one file or folder a family."""

from boxcov.detectors import centerpoint

__all__ = ["centerpoint"]
