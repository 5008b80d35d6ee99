"""Files that boxcov writes for a CenterPoint, and the weights in the package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import boxcov
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint import CenterPoint, Config
from helpers.centerpoint_cases import cloud, detector_of, frames, pillar_config, voxel_config


@pytest.mark.parametrize("kind", ["pillar", "voxel"])
def test_own_files_round_trip(kind, tmp_path):
    config = pillar_config() if kind == "pillar" else voxel_config()
    detector = detector_of(config)
    path = tmp_path / "own.safetensors"
    centerpoint.save(detector, path)
    again = centerpoint.load(path)
    assert again.config == config
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    for name, tensor in again.state_dict().items():
        before = detector.state_dict()[name]
        assert torch.equal(tensor, before.half().float() if before.dim() > 1 else before)
    centerpoint.save(again, path)  # half precision loses nothing twice
    posterior = boxcov.fit(again, frames(config, 1), prior_precision=1.0)
    assert (
        boxcov.ExactGLM(centerpoint.load(path), posterior)([cloud(config)])
        .covariance.isfinite()
        .all()
    )


def test_own_weights_with_other_rules(tmp_path):
    path = tmp_path / "own.safetensors"
    centerpoint.save(detector_of(pillar_config()), path)
    strict = replace(pillar_config(), reporting=replace(pillar_config().reporting, threshold=0.9))
    assert centerpoint.load(path, strict).config.reporting.threshold == 0.9


def test_the_small_network_fits_in_four_megabytes(tmp_path):
    path = tmp_path / "small.safetensors"
    centerpoint.save(CenterPoint(Config.small()), path)
    assert path.stat().st_size <= 4e6


def test_the_name_of_the_packaged_weights(monkeypatch, tmp_path):
    monkeypatch.setattr("boxcov.detectors.centerpoint.checkpoints._WEIGHTS", tmp_path)
    with pytest.raises(boxcov.BoxcovError, match="weights of small are not in this installation"):
        centerpoint.load("small")
    centerpoint.save(CenterPoint(pillar_config()), tmp_path / "small.safetensors")
    assert centerpoint.load("small").config == pillar_config()


def test_pillar_is_found_by_name_in_a_checkout(tmp_path, monkeypatch):
    checkout = Path(__file__).parents[3]
    monkeypatch.chdir(checkout)  # the tests of the wheel find it by the working directory
    assert sum(p.numel() for p in centerpoint.load("pillar").parameters()) == 5_982_854
    name = "boxcov.detectors.centerpoint.checkpoints.__file__"
    monkeypatch.setattr(name, str(tmp_path / "a/b/c/d/e.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(boxcov.BoxcovError, match=r"pillar are not in this .* work in a checkout"):
        centerpoint.load("pillar")
    with pytest.raises(boxcov.BoxcovError, match=r"pilar: no such file \(did you mean 'pillar'"):
        centerpoint.load("pilar")


def test_values_beyond_half_precision_are_not_saved(tmp_path):
    detector = CenterPoint(pillar_config())
    with torch.no_grad():
        detector.head.shared[0].weight[0, 0, 0, 0] = 1e6
    with pytest.raises(
        boxcov.BoxcovError, match=r"head\.shared\.0\.weight has values too large for half precision"
    ):
        centerpoint.save(detector, tmp_path / "x.safetensors")
