"""boxcov: for every box of a frozen object detector, the covariance of that box under what the detector does not know."""

from boxcov import data, detectors, evaluate
from boxcov.calibration import Calibration
from boxcov.curvature.fit import fit
from boxcov.curvature.posterior import Posterior
from boxcov.detections import Detections
from boxcov.detector import Candidates, Detector, Selection
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.predict.exact import ExactGLM
from boxcov.predict.glm import GLM
from boxcov.predict.held_out import held_out_nll
from boxcov.predict.mcglm import MCGLM
from boxcov.predict.mci import MCI
from boxcov.predict.nms import NMSSpread
from boxcov.version import __version__

__all__ = [
    "GLM",
    "MCGLM",
    "MCI",
    "BoxcovError",
    "BoxcovWarning",
    "Calibration",
    "Candidates",
    "Detections",
    "Detector",
    "ExactGLM",
    "NMSSpread",
    "Posterior",
    "Selection",
    "__version__",
    "data",
    "detectors",
    "evaluate",
    "fit",
    "held_out_nll",
]
