"""Detectors that fulfil the contract, one file a family."""
