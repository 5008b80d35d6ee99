from __future__ import annotations

import numpy as np
import pytest
import torch

from boxcov import GLM, MCGLM, MCI, BoxcovError, Detections, ExactGLM, FitOptions, fit
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter


@pytest.mark.parametrize("method", [MCGLM, GLM, ExactGLM])
def test_every_method_checks_its_covariances(method, tiny, posterior, image, monkeypatch) -> None:
    model = method(tiny, posterior)
    before = model.predict

    def spoiled(point):
        result = before(point)
        assert result.covariance is not None
        result.covariance[0].neg_()
        return result

    assert len(model(image))
    monkeypatch.setattr(model, "predict", spoiled)
    with pytest.raises(BoxcovError, match="is not positive semi-definite"):
        model(image)


def test_a_variance_below_zero_by_rounding_is_zero(tiny, posterior, image, monkeypatch) -> None:
    model = ExactGLM(tiny, posterior)
    before = model.predict

    def rounded(point):
        result = before(point)
        result.covariance[0, 0] = result.covariance[0, :, 0] = 0
        result.covariance[0, 0, 0] = -1e-16 * float(result.uncertainty[0])
        return result

    monkeypatch.setattr(model, "predict", rounded)
    found = model(image)
    assert found.std(found.fields[0]).isfinite().all()
    assert (found.covariance.diagonal(dim1=1, dim2=2) >= 0).all()


# determinism


@pytest.mark.parametrize("method", [MCGLM, MCI, ExactGLM])
def test_numbers_of_numpy_are_those_of_python(method, tiny, posterior, image, tmp_path) -> None:
    given = None if method is MCI else posterior  # None: by dropout
    found = method(tiny, given, samples=4, seed=3)(image)
    same = method(tiny, given, samples=np.int64(4), seed=np.int64(3))(image)
    assert torch.equal(same.covariance, found.covariance)
    same.save(tmp_path / "boxes.safetensors")
    meta = Detections.load(tmp_path / "boxes.safetensors").meta
    assert (meta["samples"], meta["seed"]) == (4, 3)


def test_a_seed_that_torch_does_not_take_is_refused(tiny, posterior) -> None:
    MCGLM(tiny, posterior, seed=2**64 - 1)
    for seed in (3.7, 2**64, -(2**63) - 1):
        for build in (lambda seed: MCGLM(tiny, posterior, seed=seed), lambda s: FitOptions(seed=s)):
            with pytest.raises(BoxcovError, match=r"seed must be a whole number from .*, got"):
                build(seed)


@pytest.mark.parametrize("method", [GLM, MCGLM, ExactGLM])
def test_a_model_without_a_posterior_is_refused(method, tiny) -> None:
    with pytest.raises(BoxcovError, match=r"expected a boxcov\.Posterior, got a NoneType"):
        method(tiny, None)


def test_module_names_may_be_an_iterator(tiny) -> None:
    frames = shapes.frames(count=1)
    assert fit(tiny, frames, depth=iter(["head.shared"])).depth == "head.shared"


def test_a_fit_takes_a_seed_of_numpy(tmp_path) -> None:
    detector, frames = TinyCenter(), shapes.frames(count=2)
    for seed, name in ((3, "a"), (np.int64(3), "b")):
        options = FitOptions(seed=seed, fraction=0.5)
        fit(detector, frames, options=options, fisher="mc").save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_same_seed_same_bytes(tmp_path) -> None:
    """Both the posterior's file and the predictions, on a CPU."""
    frames, image = shapes.frames(count=4), shapes.frames(count=1, seed=7)[0][0]
    written = []
    for run in ("a", "b"):
        detector = TinyCenter(seed=0)
        posterior = fit(
            detector,
            frames,
            prior_precision=1.0,
            options=FitOptions(seed=3),
            fisher="mc",
            n_data=100,
        )
        posterior.save(tmp_path / f"{run}.posterior")
        models = (
            MCGLM(detector, posterior, seed=1),
            ExactGLM(detector, posterior),
            MCI(detector, seed=1),
            GLM(detector, posterior, max_boxes=2),
        )
        for number, model in enumerate(models):
            model(image).save(tmp_path / f"{run}.{number}")
        written.append(
            [(tmp_path / f"{run}.{part}").read_bytes() for part in ("posterior", 0, 1, 2, 3)]
        )
    assert written[0] == written[1]
    other = fit(
        TinyCenter(seed=0),
        frames,
        prior_precision=1.0,
        options=FitOptions(seed=4),
        fisher="mc",
        n_data=100,
    )
    other.save(tmp_path / "c.posterior")
    assert (tmp_path / "c.posterior").read_bytes() != written[0][0]
