"""The control posterior that uses no data."""

from __future__ import annotations

import pytest
import torch

from boxcov import GLM, BoxcovError, ExactGLM, fit
from boxcov.detectors.tiny import TinyCenter
from oracles.dense import box_jacobian, relative


@pytest.fixture(scope="module")
def control(tiny, train_frames):
    return fit(tiny, train_frames[:2], prior_precision=1.0, fisher="identity").weight_scaled(
        tiny, scale=0.3
    )


def test_standard_deviations_are_the_weights_root_mean_squares(tiny, control, posterior) -> None:
    weights = dict(tiny.named_parameters())
    for name, block in control.blocks.items():
        rms = float(weights[block.layer.weight].detach().square().mean().sqrt())
        assert torch.allclose(control.variances(name).sqrt(), torch.tensor(0.3 * rms), rtol=1e-5)
    # independent of the fitted factors and the number of frames
    fitted = posterior.weight_scaled(tiny, scale=0.3)
    assert fitted.fisher == "identity"
    assert (
        relative(
            fitted.covariance("head.branches.size.3"), control.covariance("head.branches.size.3")
        )
        < 1e-4
    )


def test_box_covariances_are_those_of_independent_weights(tiny, control, image) -> None:
    J = box_jacobian(tiny, image)
    squares = {
        layer.weight: tiny.get_parameter(layer.weight).square().mean()
        for layer in (b.layer for b in control.blocks.values())
    }
    expected = 0
    for block in control.blocks.values():
        for name in (block.layer.weight, block.layer.bias):
            if name is not None:
                rows = J[name].flatten(2)
                expected = expected + 0.09 * squares[
                    block.layer.weight
                ].detach() * rows @ rows.transpose(1, 2)
    assert relative(ExactGLM(tiny, control)(image).covariance, expected) < 1e-4
    assert relative(GLM(tiny, control)(image).covariance, expected) < 1e-4


def test_bad_controls(control, train_frames) -> None:
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(BoxcovError, match="scale must be above 0 and finite"):
            control.weight_scaled(TinyCenter(), scale)
    with pytest.raises(BoxcovError, match="made for weights with the fingerprint"):
        control.weight_scaled(TinyCenter(seed=4))
    empty = TinyCenter()
    torch.nn.init.zeros_(empty.head.shared[0].weight)
    posterior = fit(empty, train_frames[:1], prior_precision=1.0, fisher="identity")
    with pytest.raises(
        BoxcovError, match=r"all weights of head\.shared\.0 are 0.*exclude=\['head\.shared\.0'\]"
    ):
        posterior.weight_scaled(empty)
