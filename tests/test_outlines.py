from __future__ import annotations

import numpy as np
import pytest
import torch

from boxcov import BoxcovError
from boxcov.data.coco.images import to_pixels
from boxcov.outlines import background_of


@pytest.mark.parametrize(
    ("inputs", "shape"),
    [
        ([torch.zeros(7, 5)], (7, 5)),
        (np.zeros((7, 3)), (7, 3)),
        (torch.zeros(1, 3, 4, 6), (4, 6, 3)),
        ([torch.rand(3, 4, 6)], (4, 6, 3)),
        (torch.randn(1, 3, 4, 6), (4, 6, 3)),  # normalised
        (torch.rand(1, 1, 4, 6), (4, 6, 3)),  # grey
        (np.zeros((4, 6, 3), np.uint8), (4, 6, 3)),
    ],
)
def test_points_and_images_are_recognised(inputs: object, shape: tuple[int, ...]) -> None:
    background = background_of(inputs)
    assert background is not None
    assert background.shape == shape


@pytest.mark.parametrize(
    "inputs",
    [
        None,
        [],
        {"pixels": torch.zeros(3, 4, 4)},
        torch.zeros(3),
        torch.zeros(1, 4, 8, 8),
        torch.full((1, 3, 8, 8), torch.nan),
    ],
)
def test_other_inputs_have_no_background(inputs: object) -> None:
    assert background_of(inputs) is None


def test_an_image_without_pixels_is_refused() -> None:
    with pytest.raises(BoxcovError, match=r"shape \(3, h, w\), got \(3, 0, 0\)"):
        to_pixels(torch.zeros(1, 3, 0, 0))


@pytest.mark.parametrize(
    ("values", "pixel"),
    [
        ((7.0, 0.0, 255.0), [255, 0, 7]),
        ((1.0, 0.0, 0.2), [255, 0, 51]),
        ((1.5, -1.0, 0.0), [255, 0, 102]),  # normalised
        ((-1.0, -1.0, -1.0), [0, 0, 0]),
        ((1e30, 0.0, 0.0), [255, 0, 0]),
    ],
)
def test_images_are_red_green_and_blue(values: tuple[float, ...], pixel: list[int]) -> None:
    """Inputs up to 255 are blue, green and red, all others red, green and blue."""
    assert to_pixels(torch.tensor(values).reshape(3, 1, 1)).tolist() == [[pixel]]
