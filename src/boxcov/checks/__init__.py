"""``boxcov.check``: whether a new adapter keeps the contract, before anything is fitted with it."""

from boxcov.checks.check import check
from boxcov.checks.report import Finding, Report

__all__ = ["Finding", "Report", "check"]
