"""Detections with the results of an error model: risk, regions, files, slices."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from boxcov import BoxcovError, Detections
from boxcov.concatenation import concatenate
from helpers.error_models import make_error_model


def plain() -> Detections:
    A = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0))
    return Detections(
        boxes=A[:, 0],
        scores=torch.tensor([0.9, 0.5, 0.3, 0.2]),
        labels=torch.arange(4) % 2,
        frame=torch.arange(4) // 3,
        fields=("x", "y", "yaw"),
        classes=("car", "bus"),
        covariance=A @ A.transpose(1, 2),
        meta={"method": "exact"},
    )


SUMMARY = {
    "estimator": "exact",
    "thresholds": [0.3, 0.4, 0.5],
    "threshold": 0.4,
    "levels": [0.5, 0.9],
    "dof": [3.0, 4.0, 5.0],
}
CALIBRATED = (
    *("signals", "no_object", "iou_below", "flipped", "scale", "predictive"),
    *("region_widths", "joint_widths"),
)


def calibrated() -> Detections:
    """Return four boxes of x y yaw with results that can be checked by hand."""
    m, widths = 4, torch.arange(24.0).reshape(4, 2, 3)
    return replace(
        plain(),
        signals=torch.arange(8.0).reshape(m, 2),
        no_object=torch.tensor([0.0, 0.5, 0.25, 1.0]),
        iou_below=torch.tensor([[0.0, 0.5, 1.0], [0.25, 0.5, 0.5], [0.5, 0.75, 1.0], [0, 0, 0]]),
        flipped=torch.tensor([0.0, 0.1, 0.2, 0.3]),
        scale=torch.ones(m, 3),
        predictive=torch.eye(3).expand(m, 3, 3),
        region_widths=widths,
        joint_widths=2 * widths,
        meta={"method": "exact", "signals": ["peak", "margin"], "error_model": SUMMARY},
    )


def test_risk_is_no_object_or_misplaced() -> None:
    found = calibrated()
    assert found.misplaced.tolist() == [0.5, 0.5, 0.75, 0.0]
    assert found.risk.tolist() == [0.5, 0.75, 0.8125, 1.0]
    assert found.risk_at(0.3).tolist() == [0.0, 0.625, 0.625, 1.0]
    assert found.dof.tolist() == [3.0, 4.0, 5.0]


def test_misplaced_at_thresholds_and_between() -> None:
    found = calibrated()
    for column, threshold in enumerate(SUMMARY["thresholds"]):
        assert torch.equal(found.misplaced_at(threshold), found.iou_below[:, column])
    torch.testing.assert_close(found.misplaced_at(0.325), torch.tensor([0.125, 0.3125, 0.5625, 0]))
    torch.testing.assert_close(found.misplaced_at(0.45), torch.tensor([0.75, 0.5, 0.875, 0]))
    steps = [found.misplaced_at(0.3 + 0.01 * i) for i in range(20)]
    assert all(bool((b >= a).all()) for a, b in pairwise(steps))
    for iou in (0.29, 0.51, float("nan")):
        with pytest.raises(BoxcovError, match=r"iou must lie between 0\.3 and 0\.5"):
            found.misplaced_at(iou)


def test_regions_at_levels_and_the_next_higher_one() -> None:
    found = calibrated()
    for level, row in ((0.1, 0), (0.5, 0), (0.51, 1), (0.9, 1)):
        assert torch.equal(found.region(level), found.region_widths[:, row])
        assert torch.equal(found.region(level, joint=True), found.joint_widths[:, row])
    for level in (0.0, 0.91, 1.0, -1, float("nan")):
        with pytest.raises(BoxcovError, match=r"above 0 and be at most 0\.9, got"):
            found.region(level)


@pytest.mark.parametrize("rows", [2, slice(1, 3), [3, 0], torch.tensor([1, 0, 0, 1]).bool()])
def test_calibrated_boxes_are_sliced_as_a_whole(rows) -> None:
    found = calibrated()
    part = found[rows]
    index = torch.arange(4)[rows if not isinstance(rows, int) else [rows]]
    for name in (*CALIBRATED, "risk", "misplaced"):
        assert torch.equal(getattr(part, name), getattr(found, name)[index])
    assert torch.equal(part.region(0.9), found.region(0.9)[index])


def test_uncalibrated_detections_say_so() -> None:
    found = plain()
    for read in (
        lambda: found.risk,
        lambda: found.misplaced,
        lambda: found.dof,
        lambda: found.region(0.9),
        lambda: found.risk_at(0.4),
        lambda: found.misplaced_at(0.4),
    ):
        with pytest.raises(BoxcovError, match="are uncalibrated: fit an error model with boxcov"):
            read()
    assert not {"risk", "misplaced"} & set(found.numpy())
    assert ", uncalibrated" in repr(found)
    with pytest.raises(BoxcovError, match="these detections have no region_widths"):
        replace(calibrated(), region_widths=None).region(0.9)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("iou_below", (4, 2), r"\(4, 3\)"),
        ("region_widths", (4, 3, 3), r"\(4, 2, 3\)"),
        ("joint_widths", (4, 2), r"\(4, 2, 3\)"),
        ("signals", (4, 3), r"\(4, 2\)"),
        ("no_object", (4, 1), r"\(4,\)"),
        ("flipped", (3,), r"\(4,\)"),
        ("scale", (4, 2), r"\(4, 3\)"),
    ],
)
def test_calibrated_shapes_are_checked(name: str, shape: tuple[int, ...], expected: str) -> None:
    with pytest.raises(BoxcovError, match=f"{name} has shape .* expected {expected}"):
        replace(calibrated(), **{name: torch.zeros(shape)})


@pytest.mark.parametrize(
    "summary",
    [
        None,
        [],
        {},
        {**SUMMARY, "thresholds": [0.4]},
        {**SUMMARY, "thresholds": ["0.3", "0.4", "0.5"]},
        {**SUMMARY, "levels": []},
        {**SUMMARY, "dof": [3.0]},
        {**SUMMARY, "threshold": None},
    ],
    ids=str,
)
def test_results_without_their_error_model_are_refused(tmp_path, summary: object) -> None:
    found = calibrated()
    meta = {"method": "exact", "signals": ["peak", "margin"], "error_model": summary}
    message = r"have no_object, but meta\['error_model'\] does not say the thresholds"
    with pytest.raises(BoxcovError, match=message):
        replace(found, meta=meta)
    about = {"fields": found.fields, "classes": found.classes, "meta": meta}
    path = tmp_path / "d.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in found._tensors()}
    save_file(tensors, path, metadata={"boxcov.detections": json.dumps(about)})
    with pytest.raises(BoxcovError, match=rf"d\.safetensors: these detections {message}"):
        Detections.load(path)


def test_probabilities_come_in_pairs() -> None:
    with pytest.raises(BoxcovError, match="no_object and iou_below belong together"):
        replace(calibrated(), iou_below=None)


def test_calibrated_files_round_trip(tmp_path) -> None:
    for found in (calibrated(), calibrated()[:0], made()):
        found.save(tmp_path / "d.safetensors")
        again = Detections.load(tmp_path / "d.safetensors")
        assert again.meta == found.meta
        for name in (*CALIBRATED, "risk", "misplaced", "dof"):
            expected = getattr(found, name)
            assert expected is None or torch.equal(getattr(again, name), expected)
        assert torch.equal(again.region(0.9, joint=True), found.region(0.9, joint=True))


def made() -> Detections:
    """Return the result of a small error model."""
    return make_error_model(plain().fields, plain().classes).apply(plain())


def test_an_error_model_fills_every_field() -> None:
    found = made()
    assert found.signals is None
    assert all(getattr(found, name) is not None for name in CALIBRATED[1:])
    probabilities = torch.stack([found.no_object, found.misplaced, found.risk, found.flipped])
    assert bool(((probabilities >= 0) & (probabilities <= 1)).all())
    assert bool((found.risk >= found.no_object).all())
    variances = found.predictive.diagonal(dim1=1, dim2=2)
    student = found.scale.square() * found.dof / (found.dof - 2)
    torch.testing.assert_close(variances, student + 0.01**2)  # and the noise


def test_calibrated_parts_are_concatenated() -> None:
    found = calibrated()
    again = concatenate([found[:1], found[1:1], found[1:]])
    for name in (*CALIBRATED, "risk"):
        assert torch.equal(getattr(again, name), getattr(found, name))
    with pytest.raises(BoxcovError, match=r"part 1 has the tensors \['boxes', 'scores'"):
        concatenate([found, plain()])
    other = replace(found, meta={**found.meta, "error_model": {**SUMMARY, "threshold": 0.5}})
    with pytest.raises(BoxcovError, match=r"part 1 has the error model .*'threshold': 0\.5"):
        concatenate([found, other])
    other = replace(found, meta={**found.meta, "signals": ["margin", "peak"]})
    with pytest.raises(BoxcovError, match=r"part 1 has the signals \['margin', 'peak'\]"):
        concatenate([found, other])


def test_calibrated_boxes_as_numpy_and_text() -> None:
    found = calibrated().to("cpu")
    arrays = found.numpy()
    np.testing.assert_array_equal(arrays["risk"], [0.5, 0.75, 0.8125, 1.0])
    np.testing.assert_array_equal(arrays["misplaced"], [0.5, 0.5, 0.75, 0.0])
    assert set(CALIBRATED) <= set(arrays)
    lines = repr(found).splitlines()
    assert len(lines) <= 10
    assert ", calibrated" in lines[0]
    assert lines[3].endswith(", risk 50 %")
    assert len(repr(concatenate([found] * 250)).splitlines()) <= 10
