"""ONNX files of DETR, YOLOS and RT-DETR give the boxes, covariances and risks of PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from boxcov import MCGLM, BoxcovError, ExactGLM, fit
from boxcov.export.onnx import StaticLimits, export
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.export import run as run_export
from boxcov.pipeline.options import ExportCommand
from helpers.error_models import with_error_model
from helpers.onnx_file import File, check_rows
from helpers.transformers_cases import MODELS, made, objects, pixels, transformers, yolos

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


def test_an_image_processor_stays_outside_the_file(tmp_path: Path) -> None:
    model, folder, image = yolos(), tmp_path / "model", tmp_path / "a.png"
    model.save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": 96}
    transformers.YolosImageProcessorPil(size=size).save_pretrained(folder)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(image)
    detector = load_detector(f"transformers:{folder}")
    x = torch.from_numpy(pixels).permute(2, 0, 1).flip(0).float()[None]
    posterior = fit(detector, [(x, [objects(2, height=40, width=60)])], prior_precision=1.0)
    posterior.save(tmp_path / "p.safetensors")
    options = ExportCommand(
        out=tmp_path / "d.onnx",
        detector=f"transformers:{folder}",
        posterior=tmp_path / "p.safetensors",
        exact=True,
        example=image,
    )
    said = run_export(options)
    assert said["inputs"] == {"pixel_values": [1, 3, 64, 96], "sizes": [1, 2]}
    expected = ExactGLM(detector, posterior)(x)
    assert len(expected) > 2
    given = detector.prepare(x)
    check_rows(File(tmp_path / "d.onnx")(given["pixel_values"], given["sizes"]), expected)


# an export takes half a minute, half of it for the error model; YOLOS is above, without one
QUICK = [("detr", 3, True), ("rt_detr", "exact", False)]
EVERY = [(name, samples, True) for name in MODELS for samples in ("exact", 3)]


@pytest.mark.parametrize(
    ("name", "samples", "has_error_model"),
    [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in EVERY if c not in QUICK)],
)
def test_the_file_agrees(
    name: str, samples: str | int, has_error_model: bool, tmp_path: Path
) -> None:
    detector = made(name)
    frames = [(pixels(seed=i), [objects(2, seed=i)]) for i in range(2)]
    posterior = fit(detector, frames, n_data=100, prior_precision=1.0)
    inputs = {"pixel_values": pixels(seed=3), "sizes": torch.tensor([[480.0, 640.0]])}
    exact = samples == "exact"
    if has_error_model:
        model = ExactGLM(detector, posterior) if exact else MCGLM(detector, posterior, samples)
        method = "exact" if exact else f"mcglm, {samples} samples"
        posterior = with_error_model(model, posterior, inputs, method)
    said = export(detector, posterior, tmp_path / "d.onnx", inputs, samples)
    assert said["inputs"] == {"pixel_values": [1, 3, 64, 96], "sizes": [1, 2]}
    model = ExactGLM(detector, posterior) if exact else MCGLM(detector, posterior, samples)
    file = File(tmp_path / "d.onnx")
    for seed in (3, 4):
        inputs["pixel_values"] = pixels(seed=seed)
        expected = model(inputs)
        assert len(expected) > 2
        check_rows(file(*inputs.values()), expected)
