"""ONNX files with an error model give risk, scales and regions of PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import boxcov
from boxcov import MCGLM, BoxcovError, Detections, ExactGLM
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.error_model.inputs import box_inputs, stack_inputs
from boxcov.export.onnx import StaticLimits, about, export
from boxcov.export.onnx.write import check_agreement
from helpers.error_models import with_error_model
from helpers.onnx_file import File, check_rows

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")


def test_tiny_with_an_error_model(tmp_path) -> None:
    frames = shapes.frames(count=2)
    detector = TinyCenter(threshold=0.05, most=3).eval()
    posterior = boxcov.fit(detector, frames)
    plain = MCGLM(detector, posterior, 2)
    calibrated = with_error_model(plain, posterior, frames[0][0], "mcglm, 2 samples")
    limits = StaticLimits(boxes=4)
    said = export(detector, calibrated, tmp_path / "t.onnx", frames[0][0], 2, limits=limits)
    assert said == about(tmp_path / "t.onnx")
    assert said["error_model"]["thresholds"] == [0.3, 0.4, 0.5]
    assert said["outputs"]["region_widths"] == [3, 7, 5]
    model, file = MCGLM(detector, calibrated, 2), File(tmp_path / "t.onnx")
    for inputs, _ in frames:
        expected = model(inputs)
        assert len(expected) == 3
        check_rows(file(inputs), expected)


def test_boxes_of_equal_scores_may_come_in_any_order() -> None:
    """Cells of a black image have equal scores up to rounding, which differs between runtimes."""
    scores = torch.tensor([0.7, 0.5, 0.5, 0.5, 0.0])
    expected = {
        "boxes": torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [3.0, 3.0], [0.0, 0.0]]),
        "scores": scores,
        "labels": torch.tensor([0, 0, 0, 1, -1]),
        "count": torch.tensor(4),
        "risk": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]),
    }
    order = torch.tensor([0, 3, 1, 2, 4])
    found = {name: value[order] if value.dim() else value for name, value in expected.items()}
    check_agreement(found | {"scores": scores.roll(0) + 1e-7}, expected)
    with pytest.raises(BoxcovError, match=r"other risk than PyTorch.* 2 boxes of the example have"):
        check_agreement(found | {"risk": expected["risk"]}, expected)
    cut = expected["boxes"] + torch.tensor([[0.0], [0.0], [9.0], [0.0], [0.0]])  # another of them
    with pytest.raises(BoxcovError, match=r"other boxes than .*: take a real frame as the example"):
        check_agreement(expected | {"boxes": cut}, expected)
    apart = expected | {"scores": torch.tensor([0.7, 0.6, 0.5, 0.4, 0.0])}
    with pytest.raises(BoxcovError, match=r"it was not written$"):
        check_agreement(apart | {"boxes": cut}, apart)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_unknown_numbers_must_be_unknown_in_both(value: float) -> None:
    row = {"boxes": torch.ones(1, 2), "scores": torch.ones(1), "labels": torch.zeros(1)}
    known = {**row, "count": torch.tensor(1), "scale": torch.tensor([[1.0, 2.0]])}
    unknown = {**known, "scale": torch.tensor([[1.0, value]])}
    check_agreement(unknown, unknown)
    for found, expected in ((known, unknown), (unknown, known)):
        with pytest.raises(BoxcovError, match="gives other scale than PyTorch"):
            check_agreement(found, expected)


class Inputs(nn.Module):
    """The inputs of the error model, from boxes and covariances."""

    def forward(self, boxes: Tensor, scores: Tensor, labels: Tensor, variances: Tensor) -> Tensor:
        covariance, fields = torch.diag_embed(variances), ("x1", "y1", "x2", "y2")
        found = Detections(boxes, scores, labels, 0 * labels, fields, ("a", "b"), covariance)
        named = box_inputs(found)
        return stack_inputs(named, tuple(named))


def test_inputs_of_clipped_boxes_are_those_of_pytorch(tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    boxes, variances = (1 + torch.rand(6, 4, generator=generator) for _ in range(2))
    boxes[:, 2:] += boxes[:, :2]
    arguments = (boxes, torch.rand(6, generator=generator), torch.arange(6) % 2, variances)
    path = tmp_path / "inputs.onnx"
    torch.onnx.export(Inputs(), arguments, path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    variances[0, 0] = variances[2, 1] = variances[2, 3] = 0.0
    boxes[3, :2] = variances[3] = 0.0  # fills the image
    expected = Inputs()(*arguments)
    assert int((expected == 1).sum()) >= 7
    (found,) = session.run(None, dict(zip(names, (one.numpy() for one in arguments))))
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6)


def test_error_models_that_do_not_fit_are_refused(tmp_path, tiny, posterior, image) -> None:
    out = tmp_path / "t.onnx"
    calibrated = with_error_model(ExactGLM(tiny, posterior), posterior, image, "exact")
    said = 'is for covariances of exact, not mcglm, 10 samples: give samples="exact" or none'
    with pytest.raises(BoxcovError, match=said):
        export(tiny, calibrated, out, image, 10)
    with pytest.raises(BoxcovError, match="at most 2000 boxes, got 2001"):
        export(tiny, calibrated, out, image, "exact", limits=StaticLimits(boxes=2001))
    other = replace(calibrated.error_model, inputs=("variance logit",))
    with pytest.raises(BoxcovError, match="the error model needs variance logit"):
        export(tiny, posterior.with_error_model(other), out, image, "exact")
    assert not out.exists()
