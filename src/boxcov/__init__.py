"""boxcov: epistemic covariances for the boxes of a frozen object detector."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from boxcov.version import __version__ as __version__

if TYPE_CHECKING:
    from boxcov import data as data
    from boxcov import detectors as detectors
    from boxcov import error_model as error_model
    from boxcov import evaluate as evaluate
    from boxcov.checks import check as check
    from boxcov.concatenation import join_frames as join_frames
    from boxcov.detections import Detections as Detections
    from boxcov.detector import Candidates as Candidates
    from boxcov.detector import Detector as Detector
    from boxcov.detector import Selection as Selection
    from boxcov.error_model.calibrate import calibrate as calibrate
    from boxcov.error_model.model import ErrorModel as ErrorModel
    from boxcov.errors import BoxcovError as BoxcovError
    from boxcov.errors import BoxcovWarning as BoxcovWarning
    from boxcov.kfac.checkpoint import Checkpoint as Checkpoint
    from boxcov.kfac.fit import FitOptions as FitOptions
    from boxcov.kfac.fit import fit as fit
    from boxcov.monitor import Monitor as Monitor
    from boxcov.posterior.posterior import Posterior as Posterior
    from boxcov.predict.compile import CompiledModel as CompiledModel
    from boxcov.predict.compile import compile as compile
    from boxcov.predict.engine_options import EngineOptions as EngineOptions
    from boxcov.predict.exact import ExactGLM as ExactGLM
    from boxcov.predict.glm import GLM as GLM
    from boxcov.predict.mcglm import MCGLM as MCGLM
    from boxcov.predict.mci import MCI as MCI
    from boxcov.predict.nms_spread import NMSSpread as NMSSpread
    from boxcov.wrapper import wrap as wrap

# names are imported on first access, so that ``boxcov --help`` does not import torch
_MODULES = {
    "": "data detectors error_model evaluate",
    "checks": "check",
    "concatenation": "join_frames",
    "detections": "Detections",
    "detector": "Candidates Detector Selection",
    "error_model.calibrate": "calibrate",
    "error_model.model": "ErrorModel",
    "errors": "BoxcovError BoxcovWarning",
    "kfac.checkpoint": "Checkpoint",
    "kfac.fit": "FitOptions fit",
    "monitor": "Monitor",
    "posterior.posterior": "Posterior",
    "predict.compile": "CompiledModel compile",
    "predict.engine_options": "EngineOptions",
    "predict.exact": "ExactGLM",
    "predict.glm": "GLM",
    "predict.mcglm": "MCGLM",
    "predict.mci": "MCI",
    "predict.nms_spread": "NMSSpread",
    "wrapper": "wrap",
}
_HOMES = {name: home for home, names in _MODULES.items() for name in names.split()}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'boxcov' has no attribute {name!r}")
    home = _HOMES[name]
    found = (
        getattr(import_module(f"boxcov.{home}"), name) if home else import_module(f"boxcov.{name}")
    )
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
