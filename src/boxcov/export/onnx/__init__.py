"""A detector with its covariances as one ONNX file: boxes, scores, labels, covariances.

Needs the packages onnx, onnxscript and onnxruntime. See docs/guide/deploy.md for what the graph
contains.
"""

from boxcov.export.onnx.write import about, export, graph_samples
from boxcov.static_selection import StaticLimits

__all__ = ["StaticLimits", "about", "export", "graph_samples"]
