"""How good boxes and covariances are, from plain arrays: numpy only. docs/evaluation.md defines each number."""

from boxcov.error_model.risk import Risk, fit_risk
from boxcov.evaluate.curves import curves
from boxcov.evaluate.expected_iou import expected_iou
from boxcov.evaluate.matching import match
from boxcov.evaluate.quality import partition, quality
from boxcov.evaluate.records import Records
from boxcov.evaluate.scalar_uncertainty import uncertainty_of
from boxcov.evaluate.summary import by_class, by_range, compare, summarise, table

__all__ = [
    "Records",
    "Risk",
    "by_class",
    "by_range",
    "compare",
    "curves",
    "expected_iou",
    "fit_risk",
    "match",
    "partition",
    "quality",
    "summarise",
    "table",
    "uncertainty_of",
]
