"""Images that are of another format than their name says, or larger than their bytes."""

from __future__ import annotations

import random
import struct
import warnings
import zlib
from io import BytesIO

from PIL import Image

FORMATS = (
    *("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "EPS", "PPM", "TGA", "PCX", "ICO", "DDS", "SGI"),
    *("IM", "MSP", "SPIDER", "ICNS", "JPEG2000", "AVIF", "PDF", "BLP", "DIB", "MPO"),
)
_PLACES = {"PNG": (16, ">II"), "BMP": (18, "<ii"), "WEBP": (26, "<HH"), "GIF": (6, "<HH")}
_SIDES = (0, 1, 9000, 13_300, 20_000, 65_535, 2**20, 2**31 - 1)


def hostile_image(draw: random.Random) -> bytes:
    """Return an image of a random format, with a size that may be a lie or beyond all limits."""
    kind, mode = draw.choice(FORMATS), draw.choice(["RGB", "RGB", "L", "P", "1", "I;16", "RGBA"])
    side = draw.choice([1, 7, 64])
    if draw.random() < 0.15:
        return solid_png(draw.choice([7000, 13_300]), draw.choice([6000, 13_300]))
    if draw.random() < 0.05:
        return many_scans(6000, 6000, more=draw.choice([10, 90, 9000]))
    content = _saved(kind, mode, side)
    if kind in _PLACES and draw.random() < 0.6:
        content = _with_size(content, kind, draw)
    return content


def _saved(kind: str, mode: str, side: int) -> bytes:
    out = BytesIO()
    for attempt in (mode, "RGB", "1", "P"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                Image.new(attempt, (side, side)).save(out, kind)
            return out.getvalue()
        except (OSError, ValueError, KeyError, TypeError):  # a format without this mode
            out = BytesIO()
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"


def _with_size(content: bytes, kind: str, draw: random.Random) -> bytes:
    start, form = _PLACES[kind]
    most = 2 ** (8 * struct.calcsize(form) // 2 - 1) - 1
    size = struct.pack(form, *(min(draw.choice(_SIDES), most) for _ in range(2)))
    content = content[:start] + size + content[start + len(size) :]
    if kind == "PNG":  # Pillow checks the sum of the header
        content = content[:29] + struct.pack(">I", zlib.crc32(content[12:29])) + content[33:]
    return content


def many_scans(width: int, height: int, more: int = 0) -> bytes:
    """Return a progressive JPEG with ``more`` copies of its shortest scan."""
    out = BytesIO()
    Image.new("L", (width, height)).save(out, "JPEG", progressive=True)
    head, *scans = out.getvalue()[:-2].split(b"\xff\xda")
    scans += [min(scans[1:], key=len)] * more
    return b"\xff\xda".join([head, *scans]) + b"\xff\xd9"


def solid_png(width: int, height: int) -> bytes:
    """Return a PNG of one colour, made without holding its pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    rows = zlib.compressobj(1)
    data = b"".join(rows.compress(bytes(1 + width)) for _ in range(height)) + rows.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks
