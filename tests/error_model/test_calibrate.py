"""``boxcov.calibrate`` from end to end on the small detector."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from boxcov import MCGLM, BoxcovError, Detections, ExactGLM, Posterior, calibrate, fit
from boxcov.concatenation import concatenate
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.error_model.calibrate import fit_error_model
from boxcov.error_model.labelled_frames import predict_frames
from boxcov.error_model.model_file import error_model_text, read_error_model
from boxcov.error_model.network import TrainingOptions
from boxcov.evaluate.ground_truth import match_detections
from boxcov.evaluate.quality import auroc
from boxcov.evaluate.records import Records
from boxcov.predict.predictor import Predictor
from helpers.clipped_cases import as_detections, clipped_boxes

ABOUT = {"estimator": "exact", "fingerprint": "", "options": TrainingOptions(widths=(0,))}


def test_boxes_and_covariances_stay_bit_for_bit(
    small: TinyCenter, small_posterior: Posterior, calibrated: Predictor, image: torch.Tensor
) -> None:
    state = deepcopy(small.state_dict())
    plain, found = ExactGLM(small, small_posterior)(image), calibrated(image)
    for name in ("boxes", "scores", "labels", "frame", "covariance"):
        assert torch.equal(getattr(plain, name), getattr(found, name)), name
    assert plain.no_object is None
    assert plain.meta["error_model"] is None  # says that it is uncalibrated
    assert found.meta["error_model"] == calibrated.error_model.summary()
    assert all(torch.equal(value, state[name]) for name, value in small.state_dict().items())
    assert not small.training
    assert not any(module._forward_hooks for module in small.modules())


def test_results_are_in_range(calibrated: Predictor, image: torch.Tensor) -> None:
    found = calibrated(image)
    for p in (found.no_object, found.misplaced, found.risk, found.flipped):
        assert bool(((p >= 0) & (p <= 1)).all())
    assert bool((found.iou_below.diff(dim=1) >= 0).all())
    torch.testing.assert_close(
        found.risk, found.no_object + (1 - found.no_object) * found.misplaced
    )
    assert bool((found.scale > 0).all())
    assert bool((found.dof > 2).all())
    assert float(torch.linalg.eigvalsh(found.predictive.double()).min()) > 0
    noise = calibrated.error_model.noise[found.labels].square()
    variances = found.scale.square() * found.dof / (found.dof - 2) + noise
    torch.testing.assert_close(found.predictive.diagonal(dim1=1, dim2=2), variances)
    assert bool((found.region(0.5) <= found.region(0.9)).all())
    assert bool((found.region(0.9) <= found.region(0.9, joint=True)).all())


def test_risk_beats_the_score_on_new_frames(calibrated: Predictor) -> None:
    frames = list(shapes.frames(count=80, seed=12))
    found, truth = predict_frames(calibrated, frames)
    found = calibrated.error_model.apply(found)
    records = match_detections(found, truth, threshold=-1.0)
    bad = records.iou < 0.4
    assert auroc(bad, found.risk.numpy()) > auroc(bad, 1 - records.scores) + 0.02
    assert abs(float(found.risk.mean()) - bad.mean()) < 0.06
    errors = np.abs(records.as_axes().errors[records.paired])
    inside = errors <= found.region(0.9).numpy()[records.paired]
    assert 0.84 <= inside.mean() <= 0.96


def test_a_file_with_one_noise_for_all_classes_loads(
    calibrated: Predictor, image: torch.Tensor
) -> None:
    model = calibrated.error_model
    one = torch.linspace(0.1, 0.5, len(model.fields))
    old = read_error_model(error_model_text(model), {**model.tensors(), "noise": one})
    again = read_error_model(error_model_text(old), old.tensors())
    found = again.apply(calibrated.with_signals(image))
    expected = found.scale.square() * found.dof / (found.dof - 2) + one.square()
    torch.testing.assert_close(found.predictive.diagonal(dim1=1, dim2=2), expected)


def test_a_file_gives_the_same_numbers(
    small: TinyCenter, calibrated: Predictor, image: torch.Tensor, tmp_path: Path
) -> None:
    calibrated.posterior.save(tmp_path / "posterior.safetensors")
    posterior = Posterior.load(tmp_path / "posterior.safetensors", small)
    first, second = calibrated(image).numpy(), ExactGLM(small, posterior)(image).numpy()
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
    assert repr(posterior.error_model) == repr(calibrated.error_model)


@pytest.mark.parametrize("dof", [3.0, 20.0])
def test_the_degrees_of_freedom_are_those_of_the_errors(dof: float) -> None:
    records = clipped_boxes(4000, share=0.0, dof=dof)
    found = as_detections(records)
    model = fit_error_model(
        found, records, estimator="", fingerprint="", options=TrainingOptions((8,))
    )
    ratio = float(model.dof.log().mean()) - np.log(dof)
    assert abs(ratio) < 0.3
    sd = np.sqrt(np.diagonal(records.predictive, axis1=1, axis2=2))  # the scales of the t errors
    assert float(np.log(model.apply(found).scale.numpy() / sd).mean()) == pytest.approx(0, abs=0.06)


def test_an_error_model_of_something_else_is_refused(
    small: TinyCenter, calibrated: Predictor
) -> None:
    model, posterior = calibrated.error_model, calibrated.posterior
    with pytest.raises(BoxcovError, match="covariances of exact, not mcglm, 4 samples"):
        MCGLM(small, posterior, samples=4)
    for change, message in (
        ({"fingerprint": "0" * 64}, "for weights 000000000000, not"),
        ({"fields": ("x", "y")}, "for box fields x y, not x y w l yaw"),
        ({"classes": ("cat",)}, "for classes cat, not car, pedestrian"),
    ):
        with pytest.raises(BoxcovError, match=message):
            ExactGLM(small, posterior.with_error_model(replace(model, **change)))


def test_missing_signals_are_named(calibrated: Predictor, image: torch.Tensor) -> None:
    found = calibrated.with_signals(image)
    names = [name for name in found.meta["signals"] if name != "class margin"]
    index = [found.meta["signals"].index(name) for name in names]
    fewer = replace(found, signals=found.signals[:, index], meta={**found.meta, "signals": names})
    with pytest.raises(BoxcovError, match="needs signal class margin, which these detections lack"):
        calibrated.error_model.apply(fewer)


def damages() -> dict[str, Any]:
    def cut(name: str) -> Any:
        return lambda t: t.__setitem__(name, t[name][:-1].contiguous())

    def fill(name: str, value: float) -> Any:
        return lambda t: t[name].fill_(value)

    names = ("centre", "dof", "correlation", "quantiles", "joint", "groups", "network.0")
    return {
        **{f"{name} cut": cut(f"error_model.{name}") for name in names},
        "spread 0": fill("error_model.spread", 0.0),
        "unit negative": fill("error_model.unit", -1.0),
        "dof 1": fill("error_model.dof", 1.0),
        "weights NaN": fill("error_model.network.1", float("nan")),
        "group 99": fill("error_model.groups", 99),
        "no centre": lambda t: t.pop("error_model.centre"),
        "no weights": lambda t: t.pop("error_model.network.0"),
        "quantile NaN": fill("error_model.quantiles", float("nan")),
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_file_is_refused(
    small: TinyCenter, calibrated: Predictor, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "posterior.safetensors"
    calibrated.posterior.save(path)
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    damages()[damage](tensors)
    save_file(tensors, path, about)
    with pytest.raises(BoxcovError, match="damaged"):
        Posterior.load(path, small)


@pytest.mark.parametrize("name", ["fingerprint", "estimator"])
def test_names_of_another_type_are_refused(
    small: TinyCenter, calibrated: Predictor, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "posterior.safetensors"
    calibrated.posterior.save(path)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["boxcov.posterior"])
    about["error_model"] = json.dumps({**json.loads(about["error_model"]), name: 7})
    save_file(load_file(path), path, {"boxcov.posterior": json.dumps(about)})
    with pytest.raises(BoxcovError, match=rf"posterior\.safetensors: {name} is 7, expected a text"):
        Posterior.load(path, small)


def test_too_few_boxes_are_refused(collected: Any) -> None:
    found, records = collected
    first = found.frame < 6
    with pytest.raises(BoxcovError, match=r"too few .*: \d+ of \d+, with boxes in \d frames"):
        fit_error_model(found[first], records[first.numpy()], **ABOUT)
    alone = replace(records, iou=0 * records.iou, l2=np.nan * records.l2)
    with pytest.raises(BoxcovError, match=r"none of \d+ boxes in .* units, axes and class indices"):
        fit_error_model(found, alone, **ABOUT)
    with pytest.raises(BoxcovError, match=r"\d+ boxes, but records of"):
        fit_error_model(found[first], records, **ABOUT)
    boxes = found.boxes.clone()
    boxes[3, 0] = torch.nan
    with pytest.raises(BoxcovError, match="some boxes are not finite: remove those rows"):
        fit_error_model(replace(found, boxes=boxes), records, **ABOUT)


@pytest.mark.usefixtures("short")
def test_rows_of_boxes_and_records_agree(collected: Any) -> None:
    found, records = collected
    np.testing.assert_allclose(records.boxes, found.boxes.numpy(), rtol=1e-6)
    assert records.frame.tolist() == found.frame.tolist()


class WithSignals(TinyCenter):
    value = 1.0

    def signals(self, raw: Any, selection: Any) -> dict[str, torch.Tensor]:
        return {"peak": self.value * selection.scores, "flat": torch.ones_like(selection.scores)}


@pytest.mark.usefixtures("short")
def test_signals_that_are_nan_are_refused_by_name(
    small: TinyCenter, calibration_frames: list, image: torch.Tensor
) -> None:
    detector = WithSignals(width=8)
    detector.load_state_dict(small.state_dict())
    detector.eval()
    model = ExactGLM(detector, fit(detector, calibration_frames[:8]))
    calibrated = calibrate(model, calibration_frames)
    assert "signal peak" in calibrated.error_model.inputs
    assert "signal flat" not in calibrated.error_model.inputs  # a constant
    assert bool(calibrated(image).risk.isfinite().all())
    WithSignals.value = float("nan")
    try:
        with pytest.raises(BoxcovError, match="cannot use signal peak: NaN or infinite"):
            calibrated(image)
        with pytest.raises(BoxcovError, match="cannot use signal peak: NaN or infinite"):
            calibrate(model, calibration_frames)
    finally:
        WithSignals.value = 1.0


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_detector_in_half_precision(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list, dtype: torch.dtype
) -> None:
    detector = deepcopy(small).to(dtype)
    frames = [(image.to(dtype), targets) for image, targets in calibration_frames[:40]]
    own = fit(detector, frames[:8])
    found = calibrate(ExactGLM(detector, own), frames)(frames[0][0])
    assert found.boxes.dtype == dtype
    assert found.risk.dtype == torch.float32
    assert bool(found.risk.isfinite().all())


@pytest.mark.usefixtures("short")
def test_grad_mode_and_autocast_do_not_matter(collected: Any) -> None:
    plain = fit_error_model(*collected, **ABOUT)
    found = collected[0]
    expected = plain.apply(found).risk
    with torch.inference_mode():
        model = fit_error_model(*collected, **ABOUT)
        assert torch.equal(model.apply(found).risk, expected)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model = fit_error_model(*collected, **ABOUT)
        assert torch.equal(model.apply(found).risk, expected)


@pytest.fixture(scope="module")
def with_velocity(collected: Any) -> tuple[Detections, Records]:
    """The same boxes with one more field, whose errors are known in no box."""
    found, records = collected
    n = len(found)
    covariance = torch.eye(6).repeat(n, 1, 1)
    covariance[:, :5, :5] = found.covariance
    more = torch.cat([found.boxes, torch.ones(n, 1)], 1)
    fields = (*found.fields, "vx")
    unknown = np.full((n, 1), np.nan)
    return (
        replace(found, boxes=more, fields=fields, covariance=covariance),
        replace(
            records,
            fields=fields,
            boxes=more.double().numpy(),
            truth=np.concatenate([records.truth, unknown], 1),
            covariance=None,
        ),
    )


def test_a_field_with_unknown_errors_is_nan(with_velocity: tuple[Detections, Records]) -> None:
    found, records = with_velocity
    model = fit_error_model(found, records, **ABOUT)
    again = read_error_model(error_model_text(model), model.tensors())  # may be stored
    known = again.apply(found)
    assert bool(known.scale[:, 5].isnan().all())
    assert bool(known.scale[:, :5].isfinite().all())
    assert bool(known.region(0.9)[:, 5].isnan().all())
    assert bool(known.region(0.9)[:, :5].isfinite().all())
    assert bool(known.region(0.9, joint=True)[:, :5].isfinite().all())
    assert bool(known.predictive[:, 5].isnan().all())
    assert bool(known.predictive[:, :5, :5].isfinite().all())
    assert bool(known.risk.isfinite().all())


@pytest.mark.usefixtures("short")
def test_rows_may_be_permuted_and_cut(collected: Any) -> None:
    found, records = collected
    model = fit_error_model(found, records, **ABOUT)
    whole = model.apply(found)
    one = concatenate([model.apply(part) for part in found.frames()])
    torch.testing.assert_close(one.risk, whole.risk, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.predictive, whole.predictive, rtol=1e-3, atol=1e-5)
