"""How good boxes and covariances are, from plain arrays: numpy only."""

from boxcov.evaluate.matching import match
from boxcov.evaluate.quality import partition, quality
from boxcov.evaluate.records import Records

__all__ = ["Records", "match", "partition", "quality"]
