"""A detector together with its uncertainty as one ONNX file: boxes, scores, labels and covariances, in shapes that do not change.

Needs ``pip install 'boxcov[onnx]'``. See docs/guide/deploy.md for what is in the graph and what is not.
"""

from boxcov.export.onnx.write import about, export
from boxcov.static_selection import StaticLimits

__all__ = ["StaticLimits", "about", "export"]
