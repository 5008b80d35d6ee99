"""ONNX files of DETR, YOLOS and RT-DETR give the boxes, covariances and risks of PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from boxcov import MCGLM, BoxcovError, ExactGLM, fit
from boxcov.export.onnx import StaticLimits, export
from helpers.error_models import with_error_model
from helpers.onnx_file import File, check_rows
from helpers.transformers_cases import MODELS, made, objects, pixels

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("boxes", [3, 100])
def test_rows_are_the_selection(name: str, boxes: int) -> None:
    detector = made(name)
    with torch.no_grad():
        raw = detector(pixels(seed=5))
        plain, static = detector.select(raw), detector.select_static(raw, StaticLimits(boxes=boxes))
        n = int(static.count)
        assert n == min(len(plain), boxes)
        assert int(static.left_off) == len(plain) - n
        best = plain.scores.sort(descending=True).values[:n].min()
        keep = plain.scores >= best
        assert torch.equal(static.selection.scores[:n], plain.scores[keep])
        assert torch.equal(static.selection.labels[:n], plain.labels[keep])
        assert torch.equal(
            detector.decode(raw, static.selection)[:n], detector.decode(raw, plain)[keep]
        )
    with pytest.raises(BoxcovError, match="takes one image, got a batch of 2"):
        detector.select_static(detector(pixels(2)), StaticLimits())


@pytest.mark.parametrize("samples", ["exact", 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_file_agrees(name: str, samples: str | int, tmp_path: Path) -> None:
    detector = made(name)
    frames = [(pixels(seed=i), [objects(2, seed=i)]) for i in range(2)]
    posterior = fit(detector, frames, n_data=100, prior_precision=1.0)
    inputs = {"pixel_values": pixels(seed=3), "sizes": torch.tensor([[480.0, 640.0]])}
    exact = samples == "exact"
    model = ExactGLM(detector, posterior) if exact else MCGLM(detector, posterior, samples)
    method = "exact" if exact else f"mcglm, {samples} samples"
    calibrated = with_error_model(model, posterior, inputs, method)
    said = export(detector, calibrated, tmp_path / "d.onnx", inputs, samples)
    assert said["inputs"] == {"pixel_values": [1, 3, 64, 96], "sizes": [1, 2]}
    model = ExactGLM(detector, calibrated) if exact else MCGLM(detector, calibrated, samples)
    file = File(tmp_path / "d.onnx")
    for seed in (3, 4):
        inputs["pixel_values"] = pixels(seed=seed)
        expected = model(inputs)
        assert len(expected) > 2
        check_rows(file(*inputs.values()), expected)
