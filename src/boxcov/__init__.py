"""boxcov: epistemic covariances for the boxes of a frozen object detector."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from boxcov.version import __version__

if TYPE_CHECKING:
    from boxcov import data, detectors, error_model, evaluate
    from boxcov.checks import check
    from boxcov.concatenation import join_frames
    from boxcov.detections import Detections
    from boxcov.detector import Candidates, Detector, Selection
    from boxcov.error_model.calibrate import calibrate
    from boxcov.error_model.model import ErrorModel
    from boxcov.errors import BoxcovError, BoxcovWarning
    from boxcov.kfac.checkpoint import Checkpoint
    from boxcov.kfac.ekfac import apply_ekfac
    from boxcov.kfac.fit import fit
    from boxcov.kfac.options import FitOptions
    from boxcov.monitor import Monitor
    from boxcov.posterior.posterior import Posterior
    from boxcov.predict.deployment import CompiledModel, compile
    from boxcov.predict.exact import ExactGLM
    from boxcov.predict.glm import GLM
    from boxcov.predict.held_out_nll import held_out_nll
    from boxcov.predict.mcglm import MCGLM
    from boxcov.predict.mci import MCI
    from boxcov.predict.nms_spread import NMSSpread
    from boxcov.predict.route import EngineOptions
    from boxcov.wrapper import wrap

# names are imported on first access, so that ``boxcov --help`` does not import torch
_HOMES = {
    "data": "",
    "detectors": "",
    "error_model": "",
    "evaluate": "",
    "ErrorModel": "error_model.model",
    "calibrate": "error_model.calibrate",
    "check": "checks",
    "Checkpoint": "kfac.checkpoint",
    "FitOptions": "kfac.options",
    "apply_ekfac": "kfac.ekfac",
    "fit": "kfac.fit",
    "Monitor": "monitor",
    "Posterior": "posterior.posterior",
    "join_frames": "concatenation",
    "Detections": "detections",
    "Candidates": "detector",
    "Detector": "detector",
    "Selection": "detector",
    "BoxcovError": "errors",
    "BoxcovWarning": "errors",
    "CompiledModel": "predict.deployment",
    "compile": "predict.deployment",
    "ExactGLM": "predict.exact",
    "GLM": "predict.glm",
    "held_out_nll": "predict.held_out_nll",
    "MCGLM": "predict.mcglm",
    "MCI": "predict.mci",
    "NMSSpread": "predict.nms_spread",
    "EngineOptions": "predict.route",
    "wrap": "wrapper",
}

__all__ = [
    "GLM",
    "MCGLM",
    "MCI",
    "BoxcovError",
    "BoxcovWarning",
    "Candidates",
    "Checkpoint",
    "CompiledModel",
    "Detections",
    "Detector",
    "EngineOptions",
    "ErrorModel",
    "ExactGLM",
    "FitOptions",
    "Monitor",
    "NMSSpread",
    "Posterior",
    "Selection",
    "__version__",
    "apply_ekfac",
    "calibrate",
    "check",
    "compile",
    "data",
    "detectors",
    "error_model",
    "evaluate",
    "fit",
    "held_out_nll",
    "join_frames",
    "wrap",
]


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
    return sorted(__all__)
