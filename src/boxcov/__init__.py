"""boxcov: for every box of a frozen object detector, the covariance of that box under what the detector does not know."""

from boxcov import data, detectors
from boxcov.curvature.fit import fit
from boxcov.curvature.posterior import Posterior
from boxcov.detections import Detections
from boxcov.detector import Detector, Selection
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.version import __version__

__all__ = [
    "BoxcovError",
    "BoxcovWarning",
    "Detections",
    "Detector",
    "Posterior",
    "Selection",
    "__version__",
    "data",
    "detectors",
    "fit",
]
