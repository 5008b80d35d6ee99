"""Small synthetic images for tests and examples: boxes with a bright front, seen from above."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from boxcov._torch.process_state import item_seed
from boxcov.data.poses import into_axes
from boxcov.data.sequence import FrameSequence
from boxcov.errors import BoxcovError, check_seed, check_whole

PIXELS = 64
METRES = 32.0  # the side of a scene
CLASSES = ("car", "pedestrian")
_SIDE = int(METRES // 6)  # squares of 6 m along one side, each with room for one object
_SIZES = torch.tensor([[1.9, 4.6], [0.9, 1.1]])  # w, l

Frame = tuple[Tensor, list[dict[str, Tensor]]]


class Shapes(FrameSequence):
    """Scenes with boxes; made by ``frames``. A frame depends on the seed and its index only."""

    def __init__(self, count: int, *, seed: int, noise: float, objects: int) -> None:
        super().__init__(count)
        self.seed, self.noise, self.objects = check_seed(seed), noise, objects

    def load(self, index: int) -> Frame:
        generator = torch.Generator().manual_seed(item_seed(self.seed, index))
        boxes, labels = _scene(self.objects, generator)
        image = render(boxes) + self.noise * torch.randn(PIXELS, PIXELS, generator=generator)
        return image[None, None], [{"boxes": boxes, "labels": labels}]


def frames(count: int = 100, seed: int = 0, noise: float = 0.1, objects: int = 6) -> Shapes:
    """Return ``count`` scenes of 32 m x 32 m with up to ``objects`` objects, 25 at most.

    A frame is ``(inputs, targets)``: an image (1, 1, 64, 64) whose pixels have noise of this
    standard deviation, and a list of one dict with ``boxes`` (n, 5) x y w l yaw in metres and
    ``labels`` (n,).

    >>> inputs, targets = frames(count=3)[0]
    >>> inputs.shape, targets[0]["boxes"].shape[1]
    (torch.Size([1, 1, 64, 64]), 5)
    """
    check_whole("count", count, 0)
    check_whole("objects", objects, 0)
    if objects > _SIDE**2:
        raise BoxcovError(f"a scene has room for {_SIDE**2} objects, got {objects}")
    return Shapes(count, seed=seed, noise=noise, objects=objects)


def render(boxes: Tensor) -> Tensor:
    """Return the image (64, 64) of boxes (n, 5): 1 inside, 2 at the front, with soft edges."""
    centres = (torch.arange(PIXELS) + 0.5) * METRES / PIXELS
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    image = torch.zeros(PIXELS, PIXELS)
    for bx, by, w, length, yaw in boxes.tolist():
        along, across = into_axes(x - bx, y - by, torch.tensor(yaw))
        soft = METRES / PIXELS
        inside = ((length / 2 - along.abs()) / soft + 0.5).clamp(0, 1)
        inside = inside * ((w / 2 - across.abs()) / soft + 0.5).clamp(0, 1)
        front = ((along - length / 4) / soft + 0.5).clamp(0, 1)
        image = torch.maximum(image, inside * (1 + front))
    return image


def _scene(objects: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    n = int(torch.randint(objects // 2, objects + 1, (), generator=generator)) if objects else 0
    labels = torch.randint(0, 2, (n,), generator=generator)
    # at most one object per square, so that they do not overlap
    squares = torch.randperm(_SIDE**2, generator=generator)[:n]
    middle = torch.stack([squares % _SIDE, squares // _SIDE], 1) * 6.0 + 3.0
    centres = middle + 2.4 * torch.rand(n, 2, generator=generator) - 0.2
    sizes = _SIZES[labels] * (1 + 0.12 * torch.randn(n, 2, generator=generator)).clamp(0.7, 1.4)
    yaw = (2 * torch.rand(n, 1, generator=generator) - 1) * pi
    return torch.cat([centres, sizes, yaw], 1), labels
