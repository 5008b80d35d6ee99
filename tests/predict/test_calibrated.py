from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import boxcov
from boxcov import BoxcovError, BoxcovWarning, Calibration, Posterior
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.posterior.file import _KEY
from boxcov.predict.predictor import Predictor
from helpers.calibration_cases import make_calibration

FIELDS = TinyCenter.box_fields
CLASSES = TinyCenter().classes


def calibration(estimator: str = "exact", fields=FIELDS, classes=CLASSES) -> Calibration:
    return make_calibration(fields, classes, estimator)


@pytest.fixture(scope="module")
def made() -> tuple[TinyCenter, Posterior, torch.Tensor]:
    frames = shapes.frames(count=2)
    detector = TinyCenter(threshold=0.05, most=4)
    return detector, boxcov.fit(detector, frames, prior_precision=1e4), frames[0][0]


def model(name: str, detector: TinyCenter, posterior: Posterior, calibrated: bool) -> Predictor:
    if name == "exact":
        return boxcov.ExactGLM(detector, posterior, calibrated=calibrated)
    if name == "glm":
        return boxcov.GLM(detector, posterior, calibrated=calibrated)
    if name == "mcglm":
        return boxcov.MCGLM(detector, posterior, samples=10, calibrated=calibrated)
    return boxcov.MCI(detector, posterior, samples=10, calibrated=calibrated)


ESTIMATORS = {
    "exact": "exact",
    "glm": "exact",
    "mcglm": "mcglm, 10 samples",
    "mci": "mci, 10 samples",
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_calibrating_keeps_boxes_and_covariance_bit_for_bit(made, name: str) -> None:
    detector, posterior, inputs = made
    fitted = calibration(ESTIMATORS[name])
    plain = model(name, detector, posterior, False)(inputs)
    found = model(name, detector, posterior.with_calibration(fitted), True)(inputs)
    for array in ("boxes", "scores", "labels", "frame", "covariance"):
        assert torch.equal(getattr(found, array), getattr(plain, array)), array
    assert plain.predictive is None
    given = [getattr(found, array).double().numpy() for array in ("covariance", "boxes", "scores")]
    expected = fitted.predictive(*given, found.labels.numpy())
    np.testing.assert_allclose(found.predictive.numpy(), expected, rtol=1e-5)
    assert found.meta["calibration"] == {"kind": "score", "estimator": ESTIMATORS[name]}
    assert "calibration" not in plain.meta


def test_no_boxes_give_an_empty_predictive_covariance() -> None:
    frames = shapes.frames(count=2)
    detector = TinyCenter(threshold=1.1)
    found = boxcov.ExactGLM(
        detector,
        boxcov.fit(detector, frames, depth=["head.shared.0"], prior_precision=1.0).with_calibration(
            calibration()
        ),
        calibrated=True,
    )(frames[0][0])
    assert found.predictive.shape == (0, 5, 5)


def test_another_estimator_warns_once(made) -> None:
    detector, posterior, inputs = made
    other = boxcov.MCGLM(
        detector, posterior.with_calibration(calibration("exact")), samples=7, calibrated=True
    )
    with pytest.warns(
        BoxcovWarning, match="fitted to covariances of exact, these are of mcglm, 7 samples"
    ):
        other(inputs)
    other(inputs)  # warnings are errors in this suite


def test_missing_or_foreign_calibrations_are_refused(made) -> None:
    detector, posterior, _ = made
    for name in ESTIMATORS:
        with pytest.raises(
            BoxcovError, match="the posterior has no calibration: fit one with `boxcov calibrate`"
        ):
            model(name, detector, posterior, True)
    with pytest.raises(BoxcovError, match="for the box fields x, y, the detector has x, y, w"):
        boxcov.ExactGLM(
            detector, posterior.with_calibration(calibration(fields=("x", "y"))), calibrated=True
        )
    with pytest.raises(BoxcovError, match="for the classes car, moon"):
        boxcov.ExactGLM(
            detector,
            posterior.with_calibration(calibration(classes=("car", "moon"))),
            calibrated=True,
        )
    with pytest.raises(BoxcovError, match="which MC dropout does not have"):
        boxcov.MCI(detector, calibrated=True)


def test_a_posterior_file_carries_the_calibration(made, tmp_path) -> None:
    detector, posterior, _ = made
    fitted = calibration()
    posterior.save(tmp_path / "plain.safetensors")
    assert Posterior.load(tmp_path / "plain.safetensors", detector).calibration is None
    assert b"calibration" not in (tmp_path / "plain.safetensors").read_bytes()
    posterior.with_calibration(fitted).save(tmp_path / "p.safetensors")
    again = Posterior.load(tmp_path / "p.safetensors", detector)
    assert again.calibration == fitted
    again.with_calibration(None).save(tmp_path / "p.safetensors")
    assert Posterior.load(tmp_path / "p.safetensors", detector).calibration is None


def rewrite_header(path, change) -> None:
    with safe_open(path, framework="pt") as file:
        about = change(file.metadata()[_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata={_KEY: about})


def test_a_damaged_calibration_is_named(made, tmp_path) -> None:
    detector, posterior, _ = made
    path = tmp_path / "p.safetensors"
    posterior.with_calibration(calibration()).save(path)
    rewrite_header(path, lambda text: text.replace('"log_residual"', '"log_rezidual"'))
    with pytest.raises(
        BoxcovError,
        match=r"p\.safetensors: not a calibration, or damaged \(missing: log_residual\)",
    ):
        Posterior.load(path, detector)


def test_calibrations_of_removed_kinds_are_left_out(made, tmp_path) -> None:
    """The posterior itself is fine, and ``boxcov calibrate`` must be able to read it."""
    detector, posterior, _ = made
    path = tmp_path / "p.safetensors"
    posterior.with_calibration(calibration()).save(path)
    rewrite_header(path, lambda text: text.replace('"kind": "score"', '"kind": "affine"'))
    with pytest.warns(BoxcovWarning, match=r"'affine' is no longer supported .* run `boxcov calib"):
        loaded = Posterior.load(path, detector)
    assert loaded.calibration is None
    with pytest.raises(BoxcovError, match="the posterior has no calibration"):
        boxcov.ExactGLM(detector, loaded, calibrated=True)


def test_changing_the_variances_drops_the_calibration(made) -> None:
    _, posterior, _ = made
    carrying = posterior.with_calibration(calibration())
    assert carrying.to("cpu").calibration is carrying.calibration
    for other in (
        carrying.with_prior(2.0),
        carrying.paper(1e-3),
        carrying.restricted(list(carrying.blocks)[:1]),
    ):
        assert other.calibration is None
