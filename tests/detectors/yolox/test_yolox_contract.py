"""YOLOX under the contract: instances on crops, exact covariances, boxes left as they are."""

from __future__ import annotations

import pytest
import torch

from boxcov import GLM, MCGLM, MCI, ExactGLM, NMSSpread, Selection, check, fit
from boxcov.detectors.pyramid import CellIndex
from boxcov.detectors.yolox.selection import grid_of
from helpers.yolox_cases import images, objects, small


@pytest.mark.parametrize("changes", [{}, {"depthwise": False}, {"logit": True}, {"norm": False}])
def test_every_cell_on_its_crop_is_the_same_cell_on_the_map(changes: dict) -> None:
    detector = small(**changes)
    raw = detector(images(2))
    grid = grid_of(raw["features"])
    n = len(grid.row)
    frame, cell = torch.arange(2).repeat_interleave(n), torch.arange(n).repeat(2)
    labels = cell % 3
    selection = Selection(
        frame, torch.ones(2 * n), labels, CellIndex(frame, cell, grid.level[cell])
    )
    boxes = torch.zeros(2 * n, len(detector.box_fields), dtype=torch.float64)
    for index, run in detector.instances(raw, selection):
        boxes[index] = run()
    torch.testing.assert_close(boxes, detector.decode(raw, selection), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("changes", [{}, {"logit": True}, {"norm": False}])
def test_exact_is_one_backward_pass_a_number(changes: dict) -> None:
    detector = small(**changes)
    frames = [(images(seed=i), [objects(12, seed=i)]) for i in range(3)]
    posterior = fit(detector, frames, n_data=100, prior_precision=1.0)
    exact, slow = (
        ExactGLM(detector, posterior)(frames[0][0]),
        GLM(detector, posterior)(frames[0][0]),
    )
    assert len(exact) == detector.config.max_boxes
    torch.testing.assert_close(exact.covariance, slow.covariance, rtol=1e-5, atol=1e-12)


def test_the_posterior_covers_depthwise_layers_of_all_parts() -> None:
    detector = small()
    frames = [(images(2, seed=i), [objects(3, seed=i), objects(1, seed=i + 9)]) for i in range(2)]
    posterior = fit(detector, frames, depth="backbone", prior_precision=1.0)
    convolutions = {
        name.removesuffix(".weight") for name, p in detector.named_parameters() if p.dim() == 4
    }
    assert set(posterior.blocks) == convolutions
    assert posterior.blocks["backbone.backbone.dark2.0.dconv.conv"].layer.geometry.groups == 4
    plain = detector.detect(frames[0][0])
    assert bool((MCI(detector, dropout=0.1, samples=3)(frames[0][0]).uncertainty > 0).all())
    for model in (MCGLM(detector, posterior, samples=4), ExactGLM(detector, posterior, samples=4)):
        found = model(frames[0][0])
        assert all(
            torch.equal(getattr(found, name), getattr(plain, name))
            for name in ("boxes", "scores", "labels", "frame")
        )
        assert bool((found.uncertainty > 0).all())


def test_parts_are_apart_and_complete() -> None:
    detector = small()
    parts = detector.parts()
    assert list(parts) == ["head", "neck", "backbone"]
    modules = [m for part in parts.values() for m in (part if isinstance(part, tuple) else (part,))]
    found = [id(p) for module in modules for p in module.parameters()]
    assert len(found) == len(set(found)) == len(list(detector.parameters()))


def test_a_fisher_without_labels() -> None:
    detector = small()
    posterior = fit(
        detector,
        [(images(seed=i), None) for i in range(3)],
        prior_precision=1.0,
        fisher="mc",
        n_data=100,
    )
    assert bool((ExactGLM(detector, posterior)(images()).uncertainty > 0).all())


def test_the_spread_of_what_nms_removed() -> None:
    detector = small(threshold=0.1, overlap=0.2, max_boxes=50)
    for layer in detector.head.reg_preds:
        layer.bias.data[2:] = 1.0  # large boxes, which overlap
    found = NMSSpread(detector)(images())
    assert torch.equal(found.boxes, detector.detect(images()).boxes)
    assert int((found.uncertainty > 0).sum()) > 2


def test_the_contract_is_kept() -> None:
    report = check(small(), (images(), [objects(3)]), other=(images(seed=4), [objects(2, seed=5)]))
    assert report.ok, str(report)
    assert report["instances"].passed
