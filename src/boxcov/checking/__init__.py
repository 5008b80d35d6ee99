"""``boxcov.check``: whether a new adapter keeps the contract, before anything is fitted with it."""

from boxcov.checking.report import Finding, Report
from boxcov.checking.run import check

__all__ = ["Finding", "Report", "check"]
