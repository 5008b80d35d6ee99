"""Pictures of detections by Pillow: boxes coloured by risk with their regions, on an image or from
above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from boxcov._files.plain_text import short_name
from boxcov.box_layout import IMAGE, PLANE, find_layout
from boxcov.box_layout import columns as layout_columns
from boxcov.concatenation import check_single_frame
from boxcov.detections import Detections, to_array
from boxcov.outlines import (
    DOUBTFUL,
    grown_boxes,
    outlines_from_above,
    risk_colors,
    side_bands,
    upright,
)

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

Array = NDArray[Any]
UNCALIBRATED = (220, 220, 225)
BACKGROUND, POINTS, SHADOW = (19, 21, 23), (118, 128, 142), (0, 0, 0)
LEVEL = 0.9  # of the regions
SIDE = 960  # pixels of a picture from above


def draw_image(found: Detections, image: Array) -> Image:
    """Return an image (h, w, 3), red green blue, with its boxes ``x1 y1 x2 y2`` and their regions.

    A shaded outline is the box with every side moved outwards to the end of its 90 % region.
    Uncalibrated boxes are white and have no region.
    """
    from PIL import Image

    columns = _columns(found, IMAGE)
    picture = Image.fromarray(np.ascontiguousarray(image, np.uint8))
    height, width = image.shape[:2]
    boxes = found.numpy()["boxes"][:, columns].astype(float)
    limit = np.array([width, height, width, height])  # a line far outside would take long to draw
    inner = upright(boxes.clip(-limit, 2 * limit))
    outside, _ = side_bands(boxes, _widths(found)[:, columns])
    outer = upright(outside.clip(-limit, 2 * limit))
    names = [short_name(found.classes[label]) for label in found.labels]
    texts = [f"{name} {note}" for name, note in zip(names, _notes(found))]
    _draw(picture, found, inner, outer, texts)
    return picture


def draw_from_above(found: Detections, points: Array, reach: float | None = None) -> Image:
    """Return points (N, 2 or more) and boxes ``x y w l yaw`` from above, x to the right.

    A shaded outline is the box grown by the 90 % half widths of its position, width and length. The
    line from the centre shows the heading. Uncalibrated boxes are white and have no region.

    reach: metres from the sensor to the border, None: ``reach_of(points)``.
    """
    from PIL import Image

    columns = _columns(found, PLANE)
    reach = reach_of(points) if reach is None else reach
    seen = points[(np.abs(points[:, :2]) < reach).all(1), :2]
    across, up = _to_pixels(seen, reach).astype(int).T
    dots = np.zeros((2 * SIDE + 1, 2 * SIDE + 1), np.uint8)  # twice the size, against stairs
    for right, down in ((0, 0), (1, 0), (0, 1), (1, 1)):
        dots[up + down, across + right] = 1
    picture = Image.fromarray(dots[:-1, :-1])
    picture.putpalette((*BACKGROUND, *POINTS))
    picture = picture.convert("RGB")
    boxes = found.numpy()["boxes"][:, columns].astype(float)
    grown = grown_boxes(boxes, _widths(found)[:, columns])
    lines = [outlines_from_above(every).clip(-9e3, 9e3) for every in (boxes, grown)]
    inner, outer = (_to_pixels(line, reach) for line in lines)
    _draw(picture, found, inner, outer, _notes(found), f"; {reach:g} m to each side")
    return picture.reduce(2)


def reach_of(points: Array) -> float:
    """Return the metres, in tens, within which 98 of 100 points lie; NaN marks no return."""
    distance = np.abs(points[:, :2]).max(1)
    distance = distance[np.isfinite(distance)]
    if not len(distance):
        return 50.0
    return float(np.ceil(np.quantile(distance, 0.98) / 10 + 1e-9) * 10)


def _columns(found: Detections, names: tuple[str, ...]) -> list[int]:
    find_layout(found.fields, (names,), "this picture")
    check_single_frame(found, "this picture")
    return layout_columns(found.fields, names)


def _widths(found: Detections) -> Array:
    """Return the half widths (m, D) of the regions; 0 where there is none to draw."""
    if found.region_widths is None or found.no_object is None:
        return np.zeros(found.boxes.shape)
    widths = to_array(found.region(LEVEL).double())
    doubtful = to_array(found.risk) > DOUBTFUL
    sound = np.isfinite(widths).all(1) & ~doubtful
    return np.where(sound[:, None], widths, 0.0)


def _notes(found: Detections) -> list[str]:
    """Return the risk of each box, or its score if it is uncalibrated."""
    if found.no_object is None:
        return [f"{score:.2f}" for score in found.scores.tolist()]
    return [f"{100 * risk:.0f} %" for risk in found.risk.tolist()]


def _to_pixels(places: Array, reach: float) -> Array:
    """Return metres x y as pixels of a picture of twice ``SIDE``; y goes up."""
    return (places * [1, -1] + reach) * (SIDE / reach)


def _draw(
    picture: Image,
    found: Detections,
    inner: Array,
    outer: Array,
    texts: Sequence[str],
    scale: str = "",
) -> None:
    """Draw outlines (m, k, 2) that end around the box, the safest on top, and a legend."""
    from PIL import ImageDraw, ImageFont

    draw = ImageDraw.Draw(picture, "RGBA")
    line = max(3, round(max(picture.size) / 400))
    font: Any = ImageFont.load_default(max(15, round(max(picture.size) / 75)))
    risk = np.zeros(len(found))
    colors = np.tile(np.array(UNCALIBRATED, np.uint8), (len(found), 1))
    if found.no_object is not None:
        risk = to_array(found.risk.double())
        colors = risk_colors(risk, is_dark=True)
    for i in np.argsort(-risk, kind="stable"):
        color = tuple(colors[i].tolist())
        path = [tuple(place) for place in inner[i]]
        if risk[i] > DOUBTFUL:
            draw.line(path, (*SHADOW, 110), line // 2 + 2)  # so that it shows on a bright image
            draw.line(path, (*color, 200), line // 2)
            continue
        if (inner[i] != outer[i]).any():
            draw.polygon([tuple(p) for p in outer[i][-4:]], (*color, 40), (*color, 200), 1)
        draw.line(path, SHADOW, line + 2, joint="curve")
        draw.line(path, color, line, joint="curve")
        at = (float(inner[i][:, 0].min()), float(inner[i][:, 1].min()) - font.size * 1.3)
        draw.text(at, texts[i], color, font, stroke_width=line // 2, stroke_fill=SHADOW)
    _draw_legend(draw, picture.size[1], font, found.no_object is not None, scale)


def _draw_legend(draw: ImageDraw, height: int, font: Any, is_calibrated: bool, scale: str) -> None:
    size = float(font.size)
    left, top = size, height - 2 * size
    if is_calibrated:
        for part, color in enumerate(risk_colors(np.linspace(0, 1, 32), is_dark=True).tolist()):
            box = (left + part * size / 4, top, left + (part + 1) * size / 4, top + size)
            draw.rectangle(box, tuple(color))
        left += 8.5 * size
    regions = f"risk 0 to 100 %; shaded: {100 * LEVEL:.0f} % region"
    text = (regions if is_calibrated else "uncalibrated: scores") + scale
    draw.text((left, top - size / 8), text, UNCALIBRATED, font, stroke_width=2, stroke_fill=SHADOW)
