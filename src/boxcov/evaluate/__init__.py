"""Quality of boxes and covariances, from plain arrays. docs/guide/evaluate.md defines each number.

The paper's metrics need numpy alone; curves, regressions and chi-square intervals need scipy
(``pip install 'boxcov[cli]'``).
"""

from boxcov.evaluate.curves import curves
from boxcov.evaluate.expected_iou import expected_iou
from boxcov.evaluate.matching import match
from boxcov.evaluate.quality import partition, quality
from boxcov.evaluate.records import Records
from boxcov.evaluate.scalar_uncertainty import uncertainty_of
from boxcov.evaluate.summary import by_class, by_range, compare, summarise, table

__all__ = [
    "Records",
    "by_class",
    "by_range",
    "compare",
    "curves",
    "expected_iou",
    "match",
    "partition",
    "quality",
    "summarise",
    "table",
    "uncertainty_of",
]
