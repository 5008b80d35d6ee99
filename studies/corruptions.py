"""Image corruptions at five strengths: Gaussian blur, white noise, fog and darkness.

They are simpler than those of ImageNet-C. They apply to images of bytes before letterboxing, and
depend only on the image and the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.errors import BoxcovError

Kind = Literal["blur", "noise", "fog", "darkness"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_BLUR = (1.0, 2.0, 3.5, 5.0, 8.0)  # sigma in pixels of an image 640 pixels long
_NOISE = (10.0, 20.0, 35.0, 55.0, 85.0)  # sigma in levels of 255
_FOG = (0.25, 0.4, 0.55, 0.7, 0.85)  # largest share of grey
_DARKNESS = (0.6, 0.4, 0.25, 0.14, 0.07)  # factor of the brightness
_VEIL = 225.0  # the grey of fog


@dataclass(frozen=True)
class Corruption:
    """A corruption of images (3, h, w) of bytes, with a ``strength`` from 1 to 5.

    >>> image = torch.full((3, 20, 30), 100, dtype=torch.uint8)
    >>> Corruption("darkness", 2)(image)[0, 0, 0]
    tensor(40, dtype=torch.uint8)
    """

    kind: Kind
    strength: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.strength not in range(1, 6):
            raise BoxcovError(
                f"no corruption {self.kind!r} of strength {self.strength}: choose from "
                f"{', '.join(KINDS)}, each from 1 to 5"
            )

    def __call__(self, image: Tensor) -> Tensor:
        x, step = image.float(), self.strength - 1
        if self.kind == "blur":
            changed = gaussian_blur(x, _BLUR[step] * max(x.shape[1:]) / 640)
        elif self.kind == "darkness":
            changed = x * _DARKNESS[step]
        else:
            # another seed for every image
            seed = self.seed + int(image.sum(dtype=torch.int64))
            generator = torch.Generator().manual_seed(seed)
            if self.kind == "noise":
                changed = x + _NOISE[step] * torch.randn(x.shape, generator=generator)
            else:
                share = _FOG[step] * (0.6 + 0.4 * clouds(x.shape[1], x.shape[2], generator))
                changed = x + share * (_VEIL - x)
        return changed.round().clamp(0, 255).to(torch.uint8)


def gaussian_blur(image: Tensor, sigma: float) -> Tensor:
    """Return an image (3, h, w) after a Gaussian blur, with replicated borders.

    >>> gaussian_blur(torch.eye(9).expand(3, 9, 9), 1.0)[0, 4, 4] < 0.5
    tensor(True)
    """
    reach = max(ceil(3 * sigma), 1)
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    kernel = (kernel / kernel.sum()).to(image)
    x = F.pad(image.unsqueeze(1), (reach, reach, reach, reach), mode="replicate")
    x = F.conv2d(F.conv2d(x, kernel.reshape(1, 1, 1, -1)), kernel.reshape(1, 1, -1, 1))
    return x[:, 0]


def clouds(height: int, width: int, generator: torch.Generator) -> Tensor:
    """Return smooth noise (height, width) from 0 to 1: five octaves, the coarsest strongest.

    >>> noise = clouds(40, 60, torch.Generator().manual_seed(0))
    >>> float(noise.min()), float(noise.max())
    (0.0, 1.0)
    """
    total = torch.zeros(1, 1, height, width)
    for octave in range(5):
        cells = 2 ** (octave + 1)
        cell_values = torch.rand(1, 1, cells, cells, generator=generator)
        total += (
            F.interpolate(cell_values, (height, width), mode="bilinear", align_corners=True)
            / 2**octave
        )
    low, high = total.amin(), total.amax()
    return ((total - low) / (high - low).clamp(min=1e-6))[0, 0]
