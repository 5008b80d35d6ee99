"""ONNX files of a user's own detector: dict inputs, two levels, layers of other heads."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import boxcov
from boxcov import MCGLM, BoxcovError, ExactGLM, Selection
from boxcov.export.onnx import StaticLimits, export
from boxcov.static_selection import StaticSelection, best_rows
from helpers.error_models import make_error_model, with_error_model
from helpers.onnx_file import File, check_rows

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

BINS = 4


class Pyramid(nn.Module):
    """Distances to the four sides as distributions over bins, on two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)
        self.down = nn.Conv2d(6, 6, 3, 2, 1)
        self.heads = nn.ModuleList(nn.Conv2d(6, 2 + 4 * BINS, 1) for _ in range(2))

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        fine = F.leaky_relu(self.stem(inputs["image"]), 0.1)
        coarse = F.hardswish(self.down(fine))
        fine = fine + F.interpolate(coarse, scale_factor=2.0, mode="bilinear")
        maps = [head(x).flatten(2).mT for head, x in zip(self.heads, (fine, coarse))]
        return {"values": torch.cat(maps, 1), "size": inputs["size"]}  # (B, 80, 2 + 4 BINS)


def centres() -> Tensor:
    rows = [torch.arange(side).repeat_interleave(side) * 16 / side for side in (8, 4)]
    columns = [torch.arange(side).repeat(side) * 16 / side for side in (8, 4)]
    return torch.stack([torch.cat(columns), torch.cat(rows)], 1)  # (80, 2)


def select(model: nn.Module, raw: dict[str, Any]) -> Selection:
    scores, labels = raw["values"][:, :, :2].sigmoid().max(2)
    frame, cell = (scores > 0.5).nonzero(as_tuple=True)
    order = scores[frame, cell].argsort(descending=True)
    frame, cell = frame[order], cell[order]
    return Selection(frame, scores[frame, cell], labels[frame, cell], (frame, cell))


def select_static(model: nn.Module, raw: dict[str, Any], limits: StaticLimits) -> StaticSelection:
    scores, labels = raw["values"][0, :, :2].sigmoid().max(1)
    cell, count, more = best_rows(scores, scores > 0.5, limits.boxes)
    frame = torch.zeros_like(cell)
    return StaticSelection(Selection(frame, scores[cell], labels[cell], (frame, cell)), count, more)


def decode(model: nn.Module, raw: dict[str, Any], selection: Selection) -> Tensor:
    frame, cell = selection.where
    shares = raw["values"][frame, cell, 2:].unflatten(1, (4, BINS)).softmax(2)
    left, top, right, bottom = (shares @ torch.arange(float(BINS))).unbind(1)
    x, y = centres()[cell].unbind(1)
    height, width = raw["size"][frame].unbind(1)
    boxes = torch.stack([x - left, y - top, x + right, y + bottom], 1)
    return boxes * torch.stack([width, height, width, height], 1) / 16


def entropy(model: nn.Module, raw: dict[str, Any], selection: Selection) -> dict[str, Tensor]:
    frame, cell = selection.where
    logits = raw["values"][frame, cell, 2:].unflatten(1, (4, BINS))
    return {"entropy": -(logits.softmax(2) * logits.log_softmax(2)).sum((1, 2))}


def two_groups(model: Any, raw: dict[str, Any], selection: Selection) -> list[Any]:
    cell = selection.where[1]
    rows = [(cell < 64).nonzero()[:, 0], (cell >= 64).nonzero()[:, 0]]
    return [(row, lambda row=row: decode(model, raw, selection)[row]) for row in rows]


def own_detector(**methods: Any) -> boxcov.Detector:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Pyramid()
    return boxcov.wrap(
        model,
        select=select,
        decode=decode,
        loss=lambda model, raw, targets: raw["values"].square().sum((1, 2)),
        parts={"head": "heads", "neck": "down", "backbone": "stem"},
        box_fields=("x1", "y1", "x2", "y2"),
        classes=("car", "pedestrian"),
        **methods,
    ).eval()


def frame(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    image = 3 * torch.randn(1, 3, 16, 16, generator=generator)
    return {"image": image, "size": torch.tensor([[20.0, 30.0 + seed]])}


def test_dict_inputs_and_levels_with_an_error_model(tmp_path) -> None:
    detector = own_detector(select_static=select_static, signals=entropy)
    posterior = boxcov.fit(detector, [(frame(0), None)], depth="neck", prior_precision=1.0)
    plain = MCGLM(detector, posterior, 3)
    calibrated = with_error_model(plain, posterior, frame(0), "mcglm, 3 samples")
    assert "signal entropy" in calibrated.error_model.inputs
    said = export(
        detector, calibrated, tmp_path / "own.onnx", frame(0), 3, limits=StaticLimits(boxes=90)
    )
    assert said["inputs"] == {"image": [1, 3, 16, 16], "size": [1, 2]}
    model = MCGLM(detector, calibrated, 3)
    file = File(tmp_path / "own.onnx")
    for inputs in (frame(0), frame(1)):
        expected = model(inputs)
        assert 3 < len(expected) < 80
        check_rows(file(*inputs.values()), expected)


@pytest.mark.parametrize("mistake", ["boxes", "labels"])
def test_another_static_selection_is_refused(tmp_path, mistake: str) -> None:
    def wrong(model: Any, raw: Any, limits: StaticLimits) -> StaticSelection:
        scores, labels = raw["values"][0, :, :2].sigmoid().max(1)
        above = 0.4 if mistake == "boxes" else 0.5
        cell, count, more = best_rows(scores, scores > above, limits.boxes)
        labels = 1 - labels if mistake == "labels" else labels
        where = (torch.zeros_like(cell), cell)
        return StaticSelection(Selection(where[0], scores[cell], labels[cell], where), count, more)

    detector = own_detector(select_static=wrong)
    posterior = boxcov.fit(detector, [(frame(0), None)], prior_precision=1.0)
    path, limits = tmp_path / "own.onnx", StaticLimits(boxes=90)
    said = {"boxes": r"reports \d+ boxes, and select\(\) \d+", "labels": "labels are not those"}
    with pytest.raises(BoxcovError, match=rf"Pyramid\.select_static\(\).*{said[mistake]}"):
        export(detector, posterior, path, frame(0), 3, limits=limits)
    assert not path.exists()


def test_everything_missing_is_listed_at_once(tmp_path) -> None:
    def signals(model: Any, raw: dict[str, Any], selection: Selection) -> dict[str, Tensor]:
        best = float(selection.scores.max())
        inverse = torch.linalg.inv(raw["values"][0, :18, :18] + 99 * torch.eye(18))
        return {
            "best": torch.full_like(selection.scores, best),
            "x": inverse[0, 0] + selection.scores,
        }

    detector = own_detector(signals=signals, instances=two_groups)
    posterior = boxcov.fit(detector, [(frame(0), None)], depth="neck", prior_precision=1.0)
    model = make_error_model(detector.box_fields, detector.classes, "exact", posterior.fingerprint)
    with pytest.raises(BoxcovError) as raised:
        export(detector, posterior.with_error_model(model), tmp_path / "t.onnx", frame(0), "exact")
    title, *obstacles = re.split(r"\(\d\) ", str(raised.value))
    assert title.startswith("WrappedPyramid cannot be written to ONNX (docs/guide/deploy.md")
    parts = (
        "has no select_static(raw, limits)",
        "WrappedPyramid.instances() must return one group for boxes of one kind",
        "in signals: best = float(selection.scores.max())",
        "torch.onnx has no version of aten._linalg_check_errors.default, aten.linalg_inv_ex",
    )
    for part, obstacle in zip(parts, obstacles, strict=True):
        assert part in obstacle
    assert not (tmp_path / "t.onnx").exists()


def test_an_example_without_boxes_names_the_missing_method(tmp_path) -> None:
    detector = own_detector()
    for head in detector.model.heads:
        head.bias.data[:2] = -99.0  # the score logits
    assert len(detector.detect(frame(0))) == 0
    posterior = boxcov.fit(detector, [(frame(0), None)], prior_precision=1.0)
    with pytest.raises(BoxcovError, match=r"no select_static.* the example frame has no box"):
        export(detector, posterior, tmp_path / "t.onnx", frame(0), 2)


def test_without_instances_the_way_out_is_named(tmp_path) -> None:
    detector = own_detector(select_static=select_static)
    posterior = boxcov.fit(detector, [(frame(0), None)], prior_precision=1.0)
    path, limits = tmp_path / "own.onnx", StaticLimits(boxes=90)
    with pytest.raises(BoxcovError) as raised:
        export(detector, posterior, path, frame(0), "exact", limits=limits)
    said = str(raised.value)
    assert "WrappedPyramid has no instances()" in said
    assert "`boxcov calibrate --method mcglm --samples 10`" in said
    assert "samples=10" in said
    assert "one group" not in said
    export(detector, posterior, path, frame(0), samples=10, limits=limits)  # the way out


def test_inputs_without_a_tensor_are_refused(tmp_path) -> None:
    detector = own_detector(select_static=select_static)
    posterior = boxcov.fit(detector, [(frame(0), None)], prior_precision=1.0)
    with pytest.raises(BoxcovError, match="inputs of type list hold no tensor"):
        export(detector, posterior, tmp_path / "t.onnx", ["image.png"])
    with pytest.raises(BoxcovError, match=r"float32 on the CPU, got .*float64 on cpu"):
        export(detector, posterior, tmp_path / "t.onnx", {"image": torch.zeros(1).double()})


def test_two_levels_of_the_guide_are_exact(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "guide" / "your-detector-onnx.md"
    scope: dict[str, Any] = {}
    for block in re.findall(r"```py(?:thon)?\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), scope)
    detector, posterior, image = (scope[name] for name in ("detector", "posterior", "image"))
    expected = ExactGLM(detector, posterior)(image)
    cells = detector.select(detector(image)).where[1]
    assert 0 < int((cells >= 64).sum()) < len(cells)  # boxes of both levels
    check_rows(File(tmp_path / "levels.onnx")(image), expected)

    def by_values(model: Any, raw: dict[str, Any], selection: Selection) -> list[Any]:
        own = replace(selection, where=selection.where[:2])
        return [group for group in scope["instances"](model, raw, own) if len(group[0])]

    given = {name: scope[name] for name in ("select", "decode", "select_static")}
    parts = {"head": "heads", "neck": "coarse", "backbone": "fine"}
    names = {"box_fields": detector.box_fields, "classes": detector.classes, "parts": parts}
    loss = lambda model, raw, targets: raw["values"].square().sum((1, 2))  # noqa: E731
    other = boxcov.wrap(detector.model, **given, **names, loss=loss, instances=by_values)
    posterior = boxcov.fit(other, [(image, None)], prior_precision=1.0)
    with pytest.raises(BoxcovError, match=r"one group, of all rows, .* a Python int in `where`"):
        export(other, posterior, tmp_path / "x.onnx", image, "exact")
