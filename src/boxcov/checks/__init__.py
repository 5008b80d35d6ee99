"""``boxcov.check``: does a new adapter keep the contract? Run it before the first fit."""

from boxcov.checks.check import check
from boxcov.checks.report import Finding, Report

__all__ = ["Finding", "Report", "check"]
