"""Images as inputs of a detector: blue, green, red, letterboxed to a square."""

from __future__ import annotations

from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov._files.input_file import read_bytes, shorten
from boxcov.errors import BoxcovError, import_package

PADDING = 114.0  # the grey around a letterboxed image
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # for some others Pillow starts programs
MAX_PIXELS = 40_000_000
MAX_BYTES = 1 << 28
MAX_SCANS = 100  # of a progressive JPEG, which has about 10; each passes over the whole image


def read_image(path: str | Path) -> Tensor:
    """Return an image (3, h, w) of bytes: blue, green and red.

    JPEG, PNG, BMP and WebP are read, also grey, transparent or 16-bit images, up to 40 million
    pixels. An image is turned as its EXIF data say, as viewers and OpenCV do.
    """
    Image, orient = import_package("PIL.Image"), import_package("PIL.ImageOps").exif_transpose
    try:
        data = read_bytes(path, MAX_BYTES)
        scans = data.count(b"\xff\xda") if data.startswith(b"\xff\xd8") else 0
        if scans > MAX_SCANS:
            raise BoxcovError(f"{path}: a JPEG of {scans} scans, at most {MAX_SCANS} are read")
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            check_pixels(image.width, image.height, f"{path}: ")
            image.load()
            rgb = _to_rgb(orient(image))
    except FileNotFoundError:
        raise BoxcovError(f"{path}: no such file: unpack the images there") from None
    except BoxcovError:
        raise
    except Exception as error:  # Pillow's decoders raise many types on damaged files
        # an unidentified image says no more than the address of a buffer
        is_known = not isinstance(error, Image.UnidentifiedImageError)
        why = f" ({type(error).__name__}: {shorten(error, 400)})" if is_known else ""
        raise BoxcovError(
            f"{path}: not a JPEG, PNG, BMP or WebP image, or a damaged one{why}: copy it again, or "
            "remove it"
        ) from None
    return torch.from_numpy(np.ascontiguousarray(rgb[:, :, ::-1])).permute(2, 0, 1).contiguous()


def check_pixels(width: int, height: int, where: str = "") -> None:
    """Raise if an image has more pixels than boxcov reads."""
    if width * height > MAX_PIXELS:
        raise BoxcovError(
            f"{where}{width} x {height} pixels, at most {MAX_PIXELS // 1_000_000} million are read"
        )


def to_pixels(image: Any) -> Any:
    """Return an input image as bytes (h, w, 3): red, green, blue; None if it has NaN or infinities.

    image: (3, h, w) or (1, 3, h, w), either blue, green, red up to 255, as the frames of boxcov, or
        red, green, blue up to 1, as those of torchvision; grey (1, h, w); or bytes (h, w, 3), as
        they are. Other values are those of a normalised image, red, green, blue: the least one
        becomes 0, the largest one 255.
    """
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[-1] == 3:
        return image
    image = torch.as_tensor(image).detach().cpu()
    image = image[0] if image.dim() == 4 else image
    if image.dim() == 3 and len(image) == 1:  # grey
        image = image.expand(3, -1, -1)
    if image.dim() != 3 or len(image) != 3 or not image.numel():
        raise BoxcovError(f"an image has shape (3, h, w), got {tuple(image.shape)}")
    low, high = float(image.min()), float(image.max())
    if not isfinite(high - low):
        return None
    if low < 0 or high > 255 or 1 < high <= 2:
        rgb = (image.double() - low) * (255 / max(high - low, 1e-6))
    else:
        rgb = image * 255 if high <= 1 else image.flip(0)
    return rgb.round().byte().permute(1, 2, 0).contiguous().numpy()


def _to_rgb(image: Any) -> Any:
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
    resized = F.interpolate(image.unsqueeze(0).float(), (rows, columns), mode="bilinear")
    square[:, :rows, :columns] = resized[0].round()
    return square, scale
