"""Under torch.autocast: the plain boxes and full-precision algebra, or a clear error."""

import pytest
import torch

from boxcov import GLM, MCGLM, BoxcovError, ExactGLM, fit
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter


def test_autocast_gives_the_plain_boxes_or_a_clear_error() -> None:
    frame, detector = shapes.frames(count=1)[0], TinyCenter(threshold=0.05, most=3).eval()
    posterior = fit(detector, [frame], prior_precision=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        plain = detector.detect(frame[0])
        for model in (GLM(detector, posterior), ExactGLM(detector, posterior)):
            found = model(frame[0])
            assert torch.equal(found.boxes, plain.boxes)
            assert found.covariance.dtype == torch.float32
        with pytest.raises(
            BoxcovError, match=r"does not work under torch\.autocast: call the model outside of it"
        ):
            MCGLM(detector, posterior)(frame[0])


def test_autocast_does_not_change_the_algebra() -> None:
    detector = TinyCenter().eval()
    posterior = fit(detector, shapes.frames(count=1), prior_precision=1.0)
    gradients = {
        name: torch.randn(2, 5, *p.shape)
        for name, p in detector.named_parameters()
        if name in posterior.parameters
    }
    expected = posterior.quadratic(gradients), posterior.sample(2, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(posterior.quadratic(gradients), expected[0])
        again = posterior.sample(2, torch.Generator().manual_seed(0))
    assert all(torch.equal(again[name], eta) for name, eta in expected[1].items())
