from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from boxcov.outlines import ON_DARK
from boxcov.pipeline.show import pictures
from boxcov.report.canvas import POINTS, draw_from_above
from helpers.export_boxes import in_space, with_error_model


def test_gif_keeps_the_colours_of_risks(tmp_path) -> None:
    """Few pixels are amber or red, among many shades of points and regions."""
    found = with_error_model(in_space(60))
    generator = torch.Generator().manual_seed(0)
    boxes = found.boxes.clone()
    boxes[:, :2] = torch.rand(60, 2, generator=generator) * 90 - 45
    risk = torch.linspace(0, 1, 60)
    found = replace(found, boxes=boxes, no_object=risk, iou_below=torch.zeros_like(found.iou_below))
    points = np.random.default_rng(0).normal(0, 20, (40_000, 3))
    with pictures(tmp_path / "x.gif") as show:
        show("0", points, found)
    drawn = draw_from_above(found, points)
    drawn.thumbnail((800, 800))
    written = np.asarray(Image.open(tmp_path / "x.gif").convert("RGB")).astype(int)
    error = np.abs(written - np.asarray(drawn).astype(int)).max(2)
    assert np.quantile(error, 0.999) <= 24
    amber = np.abs(np.asarray(drawn).astype(int) - ON_DARK[1]).max(2) < 8
    assert amber.sum() > 20
    assert np.quantile(error[amber], 0.9) <= 24


def test_points_at_the_border_are_two_dots_wide() -> None:
    """Also the one in the last row and column, which has no neighbour."""
    found = in_space(1)[:0]
    corners = np.array([[-9.999, 9.999, 0.0], [9.999, -9.999, 0.0]])
    pixels = np.asarray(draw_from_above(found, corners, reach=10.0))
    assert pixels[0, 0].tolist() == list(POINTS)
    assert (pixels[-1, -1] > pixels[-1, -3]).all()
