"""Wider regions in unusual frames: the bound, the factors, and calibrate(stress=...)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Detections, ExactGLM, Posterior, calibrate
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.error_model import network
from boxcov.error_model.inputs import frame_certainty
from boxcov.error_model.regions import LEVELS
from boxcov.error_model.unusual_frames import GATE, certainty_bound, fit_widening
from boxcov.predict.predictor import Predictor
from boxcov.result_check import check_result
from helpers.error_models import make_error_model

FIELDS = ("x", "y", "yaw")
MODEL = make_error_model(FIELDS, ("car",))


def boxes(scores: torch.Tensor, per_frame: int = 10) -> Detections:
    """Detections of frames with some boxes each."""
    m = len(scores)
    covariance = torch.eye(3).expand(m, 3, 3)
    frame, zeros = torch.arange(m) // per_frame, torch.zeros(m, dtype=torch.long)
    return Detections(torch.randn(m, 3), scores, zeros, frame, FIELDS, ("car",), covariance)


def faded(frames: list, factor: float) -> list:
    return [(factor * inputs, targets) for inputs, targets in frames]


def test_certainty_by_hand() -> None:
    certainty = frame_certainty(boxes(torch.tensor([0.9, 0.1, 0.5]), per_frame=2))
    assert certainty.tolist() == pytest.approx([0.82, 0.82, 0.5])


def test_certainty_is_the_same_for_many_boxes() -> None:
    torch.manual_seed(0)
    found = boxes(torch.rand(3000))
    parts = [frame_certainty(part) for part in found.frames()]
    torch.testing.assert_close(frame_certainty(found), torch.cat(parts))


@pytest.mark.parametrize(("frames", "rank"), [(19, 1), (39, 2), (99, 5)])
def test_the_bound_is_an_order_statistic(frames: int, rank: int) -> None:
    torch.manual_seed(1)
    found = boxes(torch.rand(10 * frames))
    every = frame_certainty(found)[::10].sort().values
    assert float(certainty_bound(found)) == pytest.approx(float(every[rank - 1]))
    assert GATE == 0.05


def test_few_frames_are_never_unusual() -> None:
    assert float(certainty_bound(boxes(torch.rand(180)))) == -float("inf")


def stress_case(n: int = 4000) -> tuple[Detections, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Boxes with errors three times as large as the model says, half of them in unusual frames."""
    torch.manual_seed(2)
    scores = torch.where(torch.arange(n) % 20 < 10, 0.2, 0.8) + 0.05 * torch.rand(n)
    found = MODEL.apply(boxes(scores))
    errors = 3 * found.region(0.9) * torch.randn(n, 3).abs() / 1.645
    return found, errors, torch.rand(n), torch.rand(n) < 0.8


def test_factors_make_stress_regions_hold() -> None:
    found, errors, iou, paired = stress_case()
    widening = fit_widening(torch.tensor(0.5), found, errors, iou, paired)
    wide = widening(found)
    unusual = frame_certainty(found) < 0.5
    for name in ("region_widths", "joint_widths", "scale", "predictive", "no_object", "iou_below"):
        same = getattr(wide, name)[~unusual], getattr(found, name)[~unusual]
        assert torch.equal(*same), name
    rows = unusual & paired
    for level in (0.5, 0.9, 0.95):
        inside = errors[rows] <= wide.region(level)[rows]
        assert inside.float().mean(0).tolist() == pytest.approx([level] * 3, abs=2e-3)
        joint = (errors[rows] <= wide.region(level, joint=True)[rows]).all(1)
        assert float(joint.float().mean()) == pytest.approx(level, abs=2e-3)
    factor = widening.factors[LEVELS.index(0.6827)]
    torch.testing.assert_close(wide.scale[unusual], found.scale[unusual] * factor)
    sd = found.predictive.diagonal(dim1=1, dim2=2)[unusual].sqrt() * factor
    torch.testing.assert_close(wide.predictive.diagonal(dim1=1, dim2=2)[unusual].sqrt(), sd)


def test_too_few_stress_boxes_give_infinite_regions() -> None:
    found, errors, iou, paired = stress_case(160)
    unusual = frame_certainty(found) < 0.5
    assert 50 <= int((unusual & paired).sum()) < 99  # a level of 0.99 needs 99 boxes
    errors[:, 2] = torch.nan  # no labels of the yaw
    found.region_widths[:, :, 0] = 0.0
    widening = fit_widening(torch.tensor(0.5), found, errors, iou, paired)
    wide = widening(found)
    assert bool(widening.factors[:-1, 1].isfinite().all())
    assert bool(wide.region(0.99)[unusual].isinf().all())
    assert bool(wide.region(0.99, joint=True)[unusual].isinf().all())
    assert bool(wide.region(0.5)[unusual][:, [0, 2]].isinf().all())  # no factor is large enough
    assert torch.equal(wide.scale[:, 2], found.scale[:, 2])
    assert torch.equal(wide.region_widths[~unusual], found.region_widths[~unusual])
    check_result(wide, "widened")


def test_risk_of_unusual_frames_is_calibrated_and_higher() -> None:
    found, errors, _, paired = stress_case(20000)
    rng = np.random.default_rng(0)
    truth = (1.0 + 0.7 * torch.logit(found.iou_below)).sigmoid()  # (n, T), the true probabilities
    u = torch.as_tensor(rng.random(len(found)))[:, None]
    # the IoU whose indicators have these probabilities, between the thresholds
    index = (u > truth).sum(1)
    iou = torch.tensor([0.2, 0.35, 0.45, 0.9], dtype=torch.float64)[index]
    widening = fit_widening(torch.tensor(0.5), found, errors, iou, paired)
    assert widening.iou_below.tolist() == pytest.approx([1.0, 0.7], abs=0.1)
    wide = widening(found)
    assert bool((wide.risk >= found.risk).all())
    assert bool((wide.iou_below.diff(dim=1) >= 0).all())


def test_stress_frames_like_the_usual_ones_are_refused() -> None:
    found, errors, iou, paired = stress_case(100)
    with pytest.raises(BoxcovError, match=r"only 0 boxes with an object .* give more or harder"):
        fit_widening(torch.tensor(0.1), found, errors, iou, paired)


@pytest.fixture(scope="module")
def widened(small: TinyCenter, small_posterior: Posterior, calibration_frames: list) -> Predictor:
    before = network.EPOCHS
    network.EPOCHS = 4
    try:
        stress = faded(list(shapes.frames(count=60, seed=13)), 0.45)
        return calibrate(ExactGLM(small, small_posterior), calibration_frames, stress=stress)
    finally:
        network.EPOCHS = before


def test_calibrate_widens_where_frames_are_unusual(widened: Predictor) -> None:
    model = widened.error_model
    plain = replace(model, widening=None)
    inputs = faded(list(shapes.frames(count=10, seed=14)), 0.45)
    ratios, risks = [], []
    for image, _ in inputs:
        found = widened.with_signals(image)
        ratios.append(model.apply(found).region(0.9) / plain.apply(found).region(0.9))
        risks.append(model.apply(found).risk - plain.apply(found).risk)
    assert float(torch.cat(ratios).mean()) > 1.05
    assert float(torch.cat(risks).min()) >= 0


def test_a_file_keeps_the_widening(widened: Predictor, small: TinyCenter, tmp_path: Path) -> None:
    widened.posterior.save(tmp_path / "w.safetensors")
    loaded = Posterior.load(tmp_path / "w.safetensors", small)
    image = 0.45 * shapes.frames(count=1, seed=15)[0][0]
    one, two = widened(image), ExactGLM(small, loaded)(image)
    assert torch.equal(one.region(0.9), two.region(0.9))
    own = vars(loaded.error_model.widening)
    assert all(torch.equal(t, own[n]) for n, t in vars(widened.error_model.widening).items())


@pytest.mark.parametrize("factor", [0.5, float("nan")])
def test_factors_below_one_are_refused(
    widened: Predictor, small: TinyCenter, tmp_path: Path, factor: float
) -> None:
    model = widened.error_model
    factors = torch.full_like(model.widening.factors, factor)
    bad = replace(model, widening=replace(model.widening, factors=factors))
    widened.posterior.with_error_model(bad).save(tmp_path / "w.safetensors")
    with pytest.raises(BoxcovError, match=r"widening\.factors of the error model is out of range"):
        Posterior.load(tmp_path / "w.safetensors", small)
