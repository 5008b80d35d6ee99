"""An ONNX file of a YOLO of Ultralytics gives the boxes and covariances of PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

try:
    from ultralytics.nn.tasks import DetectionModel, yaml_model_load
except Exception as error:
    pytest.skip(
        f"ultralytics cannot be imported: {type(error).__name__}: {str(error)[:80]}",
        allow_module_level=True,
    )

from boxcov import MCGLM, BoxcovError, ExactGLM, fit
from boxcov.detectors.ultralytics import Yolo, wrap
from boxcov.export.onnx import StaticLimits, export
from helpers.error_models import with_error_model
from helpers.onnx_file import File, check_rows

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

LIMITS = StaticLimits(boxes=6, candidates=130)


def tiny() -> Yolo:
    """YOLOv8 with an eighth of the width of its smallest form."""
    config = yaml_model_load("yolov8n.yaml")
    config["scales"] = {"n": [0.33, 0.03, 1024]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DetectionModel(config, nc=3, verbose=False).eval()
        with torch.no_grad():
            for p in model.model[-1].cv3.parameters():
                p.add_(0.3 * torch.randn(p.shape))
            for level in model.model[-1].cv3:
                level[-1].bias.zero_()
    model.names = {0: "cat", 1: "cow", 2: "dog"}
    return wrap(model, classes=["cat", "dog"], threshold=0.5, overlap=0.3, max_boxes=6)


def image(seed: int) -> torch.Tensor:
    return torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(seed))


def test_rows_are_the_selection() -> None:
    detector = tiny()
    for seed in range(3):
        with torch.no_grad():
            raw = detector(image(seed))
            plain, static = detector.select(raw), detector.select_static(raw, LIMITS)
            n = int(static.count)
            assert (n, int(static.left_off)) == (len(plain), 0)
            assert n > 1
            assert torch.equal(static.selection.scores[:n], plain.scores)
            assert torch.equal(static.selection.labels[:n], plain.labels)
            rows = detector.decode(raw, static.selection)[:n]
            assert torch.equal(rows, detector.decode(raw, plain))
    with pytest.raises(BoxcovError, match="takes one image, got a batch of 2"):
        detector.select_static(detector(image(0).expand(2, -1, -1, -1)), LIMITS)


# one image does not train all levels
@pytest.mark.filterwarnings("ignore:the loss of .* frames? has a zero gradient")
@pytest.mark.parametrize("samples", ["exact", 2])
def test_the_file_agrees(samples: str | int, tmp_path: Path) -> None:
    detector, exact = tiny(), samples == "exact"
    target = {"boxes": torch.tensor([[8.0, 8, 40, 50]]), "labels": torch.tensor([1])}
    posterior = fit(detector, [(image(0), [target])], n_data=100, prior_precision=1.0)
    model = ExactGLM(detector, posterior) if exact else MCGLM(detector, posterior, samples)
    method = "exact" if exact else f"mcglm, {samples} samples"
    calibrated = with_error_model(model, posterior, image(3), method)
    export(detector, calibrated, tmp_path / "y.onnx", image(3), samples, limits=LIMITS)
    model = ExactGLM(detector, calibrated) if exact else MCGLM(detector, calibrated, samples)
    file = File(tmp_path / "y.onnx")
    for seed in (3, 4):
        expected = model(image(seed))
        assert len(expected) > 1
        check_rows(file(image(seed)), expected)
