"""ONNX files of torchvision's dense detectors give the boxes and covariances of PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from boxcov import MCGLM, BoxcovError, ExactGLM, fit
from boxcov.detectors.torchvision import wrap
from boxcov.export.onnx import StaticLimits, export
from helpers.error_models import with_error_model
from helpers.onnx_file import File, check_rows
from helpers.torchvision_cases import MODELS, NAMES, objects

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

DENSE = ("retinanet", "fcos", "ssd")
LIMITS = StaticLimits(boxes=12, candidates=400)


def image(seed: int) -> Tensor:
    return torch.rand(1, 3, 50, 80, generator=torch.Generator().manual_seed(seed))


def detector_of(name: str) -> Any:
    """A detector whose candidates fit into the limits."""
    model = MODELS[name]()
    model.topk_candidates = 60
    return wrap(model, NAMES, threshold=0.35)


@pytest.mark.parametrize("name", DENSE)
def test_rows_are_the_selection(name: str) -> None:
    detector = detector_of(name)
    for seed in (3, 4):
        with torch.no_grad():
            raw = detector(image(seed))
            plain, static = detector.select(raw), detector.select_static(raw, LIMITS)
            n = int(static.count)
            assert (n, int(static.left_off)) == (len(plain), 0)
            assert n > 2
            assert torch.equal(static.selection.scores[:n], plain.scores)
            assert torch.equal(static.selection.labels[:n], plain.labels)
            rows = detector.decode(raw, static.selection)[:n]
            assert torch.equal(rows, detector.decode(raw, plain))
        for level, selection in enumerate(static.of_kind):
            assert set(selection.where.level.tolist()) == {level}
            own = static.kind == level
            assert torch.equal(selection.where.cell[own], static.selection.where.cell[own])
    with pytest.raises(BoxcovError, match="takes one image, got a batch of 2"):
        detector.select_static(detector(image(0).expand(2, -1, -1, -1)), LIMITS)


# one image does not train all levels
@pytest.mark.filterwarnings("ignore:the loss of .* frames? has a zero gradient")
@pytest.mark.parametrize(
    ("name", "samples"), [("retinanet", "exact"), ("ssd", "exact"), ("fcos", 2), ("ssd", 2)]
)
def test_the_file_agrees(name: str, samples: str | int, tmp_path: Path) -> None:
    detector, exact = detector_of(name), samples == "exact"
    posterior = fit(detector, [(image(0), [objects(2)])], n_data=100, prior_precision=1.0)
    model = ExactGLM(detector, posterior) if exact else MCGLM(detector, posterior, samples)
    method = "exact" if exact else f"mcglm, {samples} samples"
    calibrated = with_error_model(model, posterior, image(3), method)
    said = export(detector, calibrated, tmp_path / "d.onnx", image(3), samples, limits=LIMITS)
    assert said["inputs"] == {"inputs": [1, 3, 50, 80]}
    model = ExactGLM(detector, calibrated) if exact else MCGLM(detector, calibrated, samples)
    file = File(tmp_path / "d.onnx")
    for seed in (3, 4):
        expected = model(image(seed))
        assert len(expected) > 2
        check_rows(file(image(seed)), expected)


def test_regions_have_no_fixed_number(tmp_path: Path) -> None:
    detector = wrap(MODELS["faster_rcnn"](), NAMES)
    posterior = fit(detector, [(image(0), [objects(2)])], n_data=100, prior_precision=1.0)
    with pytest.raises(BoxcovError, match="FasterRCNN has no select_static"):
        export(detector, posterior, tmp_path / "d.onnx", image(3), "exact")
