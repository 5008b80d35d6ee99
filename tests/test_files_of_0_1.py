"""Files written by boxcov 0.1 still load.

The files in ``data_0_1`` were written at version 0.1.0 with the detector and frames below, whose
numbers are exact in every arithmetic.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from shutil import copy

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from boxcov import BoxcovWarning, Checkpoint, Detections, ExactGLM, Posterior, fit
from boxcov.detectors.tiny import TinyCenter

FILES = Path(__file__).parent / "data_0_1"
FRAMES = [(((torch.arange(64 * 64) % (5 + i)) / 8).reshape(1, 1, 64, 64), None) for i in range(3)]
SETTINGS = {"depth": ["head.branches.rot"], "n_data": 100, "fisher": "mc"}


@pytest.fixture(scope="module")
def detector() -> TinyCenter:
    detector = TinyCenter(width=4)
    with torch.no_grad():
        for p in detector.parameters():
            p.copy_(((5 * torch.arange(p.numel()) % 7 - 3) / 16).reshape(p.shape))
    return detector


@pytest.mark.parametrize("name", ["posterior", "ekfac", "compressed"])
def test_posteriors_load_and_predict(detector: TinyCenter, name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = Posterior.load(FILES / f"{name}.safetensors", detector)
    left_out = [
        w for w in caught if "leaves out the full Fisher of head.branches.rot.3" in str(w.message)
    ]
    assert len(left_out) == (name == "ekfac")
    assert list(posterior.blocks) == ["head.branches.rot.0", "head.branches.rot.3"]
    assert (posterior.frames, posterior.n_data, posterior.fisher) == (3, 100, "mc")
    first, last = posterior.blocks.values()
    assert (first.ekfac_eigenvalues is not None) == (name == "ekfac")
    assert last.ekfac_eigenvalues is None
    assert (posterior.error > 0) == (name == "compressed")
    assert bool(ExactGLM(detector, posterior)(FRAMES[0][0]).covariance.isfinite().all())


def test_a_calibration_is_left_out_with_a_warning(detector: TinyCenter, tmp_path: Path) -> None:
    path = tmp_path / "posterior.safetensors"
    with safe_open(FILES / "posterior.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["boxcov.posterior"])
    about["calibration"] = {"kind": "product", "fields": {}}
    tensors = load_file(FILES / "posterior.safetensors")
    save_file(tensors, path, {"boxcov.posterior": json.dumps(about)})
    with pytest.warns(BoxcovWarning, match="run `boxcov calibrate` again"):
        posterior = Posterior.load(path, detector)
    assert posterior.error_model is None
    assert "uncalibrated" in repr(posterior)


def test_the_predictions_of_a_posterior_are_unchanged(detector: TinyCenter) -> None:
    written = Detections.load(FILES / "detections.safetensors")
    posterior = Posterior.load(FILES / "posterior.safetensors", detector)
    found = ExactGLM(detector, posterior)(FRAMES[0][0])
    assert (written.fields, written.classes) == (found.fields, found.classes)
    traces = found.uncertainty.sort().values
    for trace in written.uncertainty:  # rounding may reorder boxes of equal scores
        assert float((traces - trace).abs().min()) <= 1e-3 * float(trace)


def test_a_checkpoint_is_resumed(detector: TinyCenter, tmp_path: Path) -> None:
    path = copy(FILES / "fit.checkpoint", tmp_path)
    resumed = fit(detector, FRAMES, checkpoint=Checkpoint(path, resume=True), **SETTINGS)
    posterior = Posterior.load(FILES / "posterior.safetensors", detector)
    assert resumed.frames == 3
    for name, block in posterior.blocks.items():
        torch.testing.assert_close(resumed.blocks[name].H.matrix, block.H.matrix)
