"""The corruptions of images that the studies of shifts use."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from boxcov.data import coco
from boxcov.errors import BoxcovError
from helpers.coco_cases import coco_root

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))
try:
    from corruptions import KINDS, Corruption, Kind, clouds, gaussian_blur
finally:
    sys.path.pop(0)

IMAGE = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 240, 320), dtype=np.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_stronger_corruptions_differ_more(kind: Kind) -> None:
    smooth = gaussian_blur(IMAGE.float(), 2.0).round().to(torch.uint8)
    off = [
        float((Corruption(kind, s)(smooth).float() - smooth.float()).square().mean())
        for s in range(1, 6)
    ]
    assert off == sorted(off)
    assert off[0] > 0
    changed = Corruption(kind, 3)(smooth)
    assert (changed.shape, changed.dtype) == (smooth.shape, torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_corruption_depends_on_seed_and_image_only(kind: Kind) -> None:
    first = Corruption(kind, 3)(IMAGE)
    assert torch.equal(first, Corruption(kind, 3)(IMAGE))
    random = kind in ("noise", "fog")
    assert torch.equal(first, Corruption(kind, 3, seed=1)(IMAGE)) != random
    torch.manual_seed(0)
    state = torch.get_rng_state()
    Corruption(kind, 3)(IMAGE)
    assert torch.equal(state, torch.get_rng_state())


def test_blur_is_scipy_s() -> None:
    expected = gaussian_filter(IMAGE.double().numpy(), (0, 2.0, 2.0), mode="nearest", radius=6)
    np.testing.assert_allclose(gaussian_blur(IMAGE.double(), 2.0).numpy(), expected, rtol=1e-6)


def test_noise_and_darkness_have_the_given_strength() -> None:
    grey = torch.full((3, 200, 200), 128, dtype=torch.uint8)
    assert float(Corruption("noise", 2)(grey).float().std()) == pytest.approx(20, rel=0.02)
    assert bool((Corruption("darkness", 5)(grey) == round(128 * 0.07)).all())
    foggy = Corruption("fog", 5)(torch.zeros(3, 100, 100, dtype=torch.uint8)).float()
    assert float(foggy.max()) == round(0.85 * 225)
    assert float(foggy.min()) == round(0.6 * 0.85 * 225)


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (7, 3)])
def test_the_smallest_images(size: tuple[int, int]) -> None:
    image = torch.full((3, *size), 200, dtype=torch.uint8)
    for kind in KINDS:
        assert Corruption(kind, 5)(image).shape == image.shape
    made = clouds(*size, torch.Generator())
    assert bool(made.isfinite().all())


def test_strengths_out_of_range() -> None:
    for strength in (0, 6):
        with pytest.raises(BoxcovError, match=f"no corruption 'fog' of strength {strength}"):
            Corruption("fog", strength)


def test_frames_can_be_changed(tmp_path: Path) -> None:
    frames = coco.frames(coco_root(tmp_path / "set"), size=64)
    dark = frames.changed(Corruption("darkness", 5))
    (plain, targets), (image, others) = frames[0], dark[0]
    assert float(image[:, :, :32].mean()) < 0.1 * float(plain[:, :, :32].mean())
    assert bool((image[:, :, 32:] == 114).all())  # what is beside the image stays
    assert torch.equal(targets[0]["boxes"], others[0]["boxes"])
    assert torch.equal(dark[1:][0][0], dark[1][0])
