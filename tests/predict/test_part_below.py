"""Variances of the layers that instances() does not run: signals for the error model."""

from __future__ import annotations

import torch

from boxcov import GLM, ExactGLM, fit
from boxcov.detectors.tiny import TinyCenter


def test_the_part_below_the_head_is_that_of_its_layers(tiny: TinyCenter, train_frames, image):
    deep = fit(tiny, train_frames[:8], depth="backbone", n_data=2000, prior_precision=1.0)
    below = deep.restricted([name for name in deep.blocks if not name.startswith("head.")])
    variances = GLM(tiny, below)(image).covariance.diagonal(dim1=1, dim2=2)
    model = ExactGLM(tiny, deep)
    for _ in range(2):  # before and after the route is verified
        found = model.with_signals(image)
        names = found.meta["signals"]
        columns = [names.index(f"variance below instances {name}") for name in tiny.box_fields]
        torch.testing.assert_close(
            found.signals[:, columns].exp(), variances, rtol=1e-3, atol=1e-12
        )
    nothing = model.with_signals(torch.full_like(image, -5.0))
    assert list(nothing.meta["signals"]) == list(names)


def test_a_head_posterior_has_no_part_below(tiny: TinyCenter, posterior, image) -> None:
    names = ExactGLM(tiny, posterior).with_signals(image).meta.get("signals", [])
    assert not [name for name in names if "below instances" in name]


class WithoutInstances(TinyCenter):
    """A detector that offers only what is required."""

    def instances(self, raw, selection, with_logit=False):
        return None

    def stages(self, raw, selection):
        return None


def test_without_instances_the_part_is_the_whole(train_frames, image) -> None:
    detector = WithoutInstances(seed=0).eval()
    deep = fit(detector, train_frames[:2], depth="backbone", n_data=2000, prior_precision=1.0)
    found = ExactGLM(detector, deep).with_signals(image)
    assert len(found)
    names = found.meta["signals"]
    assert not [name for name in names if "head" in name and name.startswith("variance")]
    columns = [names.index(f"variance below instances {name}") for name in detector.box_fields]
    variances = found.covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found.signals[:, columns].exp(), variances, rtol=1e-4, atol=1e-12)


class OtherNames(TinyCenter):
    """A detector whose first part is not called the head."""

    def parts(self):
        return {"top" if name == "head" else name: part for name, part in super().parts().items()}


def test_the_first_part_is_the_head(train_frames, image) -> None:
    detector = OtherNames(seed=0, threshold=0.05, most=3).eval()
    shallow = fit(detector, train_frames[:2], depth="top", n_data=2000, prior_precision=1.0)
    names = ExactGLM(detector, shallow).with_signals(image).meta.get("signals", [])
    assert not [name for name in names if "below instances" in name]
