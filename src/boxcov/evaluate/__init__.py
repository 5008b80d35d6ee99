"""Quality of boxes and covariances, from plain arrays. docs/guide/evaluate.md defines each number.

The paper's metrics need numpy alone; curves, regressions and chi-square quantiles need scipy.
"""

from importlib import import_module
from typing import Any

from boxcov.evaluate.matching import match
from boxcov.evaluate.quality import curves, partition, quality
from boxcov.evaluate.records import Records
from boxcov.evaluate.summary import compare, summarise, table

__all__ = [
    "Records",
    "compare",
    "curves",
    "match",
    "partition",
    "plot_coverage",
    "plot_reliability",
    "plot_risk",
    "quality",
    "report",
    "summarise",
    "table",
]

# of a package above this one: imported on first access
_HOMES = {
    "plot_coverage": "report.figures",
    "plot_reliability": "report.figures",
    "plot_risk": "report.figures",
    "report": "report.page",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'boxcov.evaluate' has no attribute {name!r}")
    return getattr(import_module(f"boxcov.{_HOMES[name]}"), name)
