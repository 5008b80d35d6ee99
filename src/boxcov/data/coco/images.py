"""Images as inputs of a detector: blue, green, red, letterboxed to a square."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov.errors import BoxcovError

PADDING = 114.0  # the grey around a letterboxed image


def read_image(path: str | Path) -> Tensor:
    """Return an image (3, h, w) of bytes: blue, green and red.

    All formats of Pillow are read, also grey, transparent or 16-bit images.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (5, 4), (255, 0, 7)).save(f"{folder}/x.png")
    ...     read_image(f"{folder}/x.png")[:, 0, 0]
    tensor([  7,   0, 255], dtype=torch.uint8)
    """
    try:
        from PIL import Image
    except ImportError:
        raise BoxcovError(
            "images are read with Pillow, which is not installed: pip install 'boxcov[coco]'"
        ) from None
    try:
        with Image.open(path) as image:
            image.load()
            rgb = _bytes(image)
    except FileNotFoundError:
        raise BoxcovError(f"{path}: no such file: unpack the images there") from None
    # what Pillow raises on damaged files; SyntaxError means a broken PNG
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise BoxcovError(
            f"{path}: not an image, or a damaged one ({type(error).__name__}: {error})"
        ) from None
    return torch.from_numpy(np.ascontiguousarray(rgb[:, :, ::-1])).permute(2, 0, 1).contiguous()


def _bytes(image: Any) -> Any:
    """Return red, green and blue (h, w, 3); transparency is ignored."""
    if image.mode.startswith("I"):  # 16-bit grey: the upper eight bits
        grey = np.asarray(image).astype(np.int64).clip(0, 65535) >> 8
        return np.repeat(grey.astype(np.uint8)[:, :, None], 3, 2)
    return np.asarray(image.convert("RGB"))


def letterbox(image: Tensor, size: int) -> tuple[Tensor, float]:
    """Return an image (3, h, w) of bytes, scaled to fit a grey square (3, size, size) of floats.

    The image is at the upper left. Also return the scale: pixels of the square per pixel of the
    image. Bilinear without antialiasing, rounded to whole numbers, as in YOLOX's training.

    >>> square, scale = letterbox(torch.zeros(3, 50, 100, dtype=torch.uint8), 64)
    >>> scale, square[0, :, 0].tolist().index(114.0)
    (0.64, 32)
    """
    _, height, width = image.shape
    scale = min(size / height, size / width)
    rows, columns = max(int(height * scale), 1), max(int(width * scale), 1)
    square = torch.full((3, size, size), PADDING)
    resized = F.interpolate(
        image.unsqueeze(0).float(),
        (rows, columns),
        mode="bilinear",
        align_corners=False,
        antialias=False,
    )
    square[:, :rows, :columns] = resized[0].round()
    return square, scale
