from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Detections
from boxcov.outlines import ON_DARK
from boxcov.report.canvas import BACKGROUND, SIDE, draw_from_above, draw_image, reach_of
from helpers.export_boxes import in_image, in_space, with_error_model

LOW, _, HIGH = ON_DARK


def calibrated(found: Detections, no_object: list[float]) -> Detections:
    """The boxes with these risks, and regions of 10 in every field."""
    found = with_error_model(found)
    return replace(
        found,
        no_object=torch.tensor(no_object),
        iou_below=torch.zeros_like(found.iou_below),
        region_widths=torch.full_like(found.region_widths, 10.0),
    )


def one_box(box: list[float], risk: float) -> Detections:
    found = in_image(1) if len(box) == 4 else in_space(1)
    boxes = torch.tensor([box + [0.0] * (len(found.fields) - len(box))])
    return calibrated(replace(found, boxes=boxes), [risk])


def count(picture, color: tuple[int, ...]) -> int:
    return int((np.asarray(picture) == color).all(2).sum())


def test_image_has_its_size_colours_and_region() -> None:
    image = np.zeros((300, 400, 3), np.uint8)
    box = one_box([100.0, 100.0, 200.0, 200.0], 0.0)
    drawn = draw_image(box, image)
    assert drawn.size == (400, 300)
    pixels = np.asarray(drawn).astype(int)
    assert pixels[150, 100].tolist() == list(LOW)
    assert pixels[150, 93].sum() > 0  # inside the region of 10 pixels, outside the box
    assert pixels[150, 85].sum() == 0
    assert not image.any()  # the input is left as it is


def test_boxes_at_risk_are_red_and_have_no_region() -> None:
    box = one_box([100.0, 100.0, 200.0, 200.0], 1.0)
    pixels = np.asarray(draw_image(box, np.zeros((300, 400, 3), np.uint8))).astype(int)
    red, green, blue = pixels[150, 100]
    assert red > 2 * green
    assert red > 2 * blue
    assert pixels[150, 93].sum() == 0


def test_thin_boxes_show_on_a_bright_image() -> None:
    box = one_box([100.0, 100.0, 200.0, 200.0], 1.0)
    pixels = np.asarray(draw_image(box, np.full((300, 400, 3), 255, np.uint8))).astype(int)
    around = pixels[150, 96:105].sum(1)
    assert around.min() < 500  # of 765: a dark rim, not only a pale red line of one pixel
    assert (around < 700).sum() >= 3


def test_from_above_x_is_right_and_y_is_up() -> None:
    box = one_box([20.0, 30.0, 0.0, 4.0, 4.0, 1.0], 0.0)
    drawn = draw_from_above(box, np.zeros((0, 3)), reach=50.0)
    lit = (np.asarray(drawn).astype(int) - BACKGROUND).any(2)
    lit[SIDE - 60 :] = False  # the legend
    rows, columns = np.nonzero(lit)
    middle = SIDE / 2
    assert columns.mean() - middle == pytest.approx(20 / 50 * middle, abs=6)
    assert middle - rows.mean() == pytest.approx(30 / 50 * middle, abs=12)  # with the text above


def test_the_legend_states_the_metres() -> None:
    none, empty = calibrated(in_space(1), [0.0])[:0], np.zeros((0, 3))
    near, far = (np.asarray(draw_from_above(none, empty, reach)) for reach in (50.0, 60.0))
    assert (near[SIDE - 60 :] != far[SIDE - 60 :]).any()


def test_points_and_many_boxes_are_drawn() -> None:
    points = np.random.default_rng(0).uniform(-40, 40, (1000, 4))
    found = calibrated(in_space(5), [0.0, 0.2, 0.4, 0.6, 1.0])
    assert count(draw_from_above(found, points), BACKGROUND) < SIDE**2 - 1000
    assert draw_from_above(found[:0], np.zeros((0, 3))).size == (SIDE, SIDE)


def test_uncalibrated_boxes_are_white() -> None:
    drawn = draw_image(in_image(3), np.zeros((300, 400, 3), np.uint8))
    assert count(drawn, (220, 220, 225)) > 100
    assert not count(drawn, LOW)
    assert not count(drawn, HIGH)


def test_infinite_regions_and_far_boxes_are_drawn() -> None:
    found = one_box([-1e9, 100.0, 1e9, 200.0], 0.1)
    wide = replace(found, region_widths=torch.full_like(found.region_widths, float("inf")))
    assert draw_image(wide, np.zeros((30, 40, 3), np.uint8)).size == (40, 30)


def test_boxes_of_several_frames_are_refused() -> None:
    with pytest.raises(BoxcovError, match="this picture: boxes of several frames, expected one"):
        draw_from_above(in_space(4, frames=2), np.zeros((1, 2)))


def test_boxes_of_other_fields_are_refused() -> None:
    with pytest.raises(BoxcovError, match="this picture takes boxes of x1 y1 x2 y2"):
        draw_image(in_space(1), np.zeros((30, 40, 3), np.uint8))


def test_a_view_holds_most_points() -> None:
    assert reach_of(np.array([[3.0, -44.0], [1.0, 2.0]])) == 50.0


def test_points_without_a_return_do_not_decide_the_view() -> None:
    points = np.array([[3.0, -44.0], [np.nan, np.nan], [1.0, np.inf]])
    assert reach_of(points) == reach_of(points[:1]) == 50.0
    assert reach_of(points[1:]) == reach_of(points[:0])
    found = one_box([1.0, 2.0, 0.0, 2.0, 4.0], 0.1)
    assert draw_from_above(found, points).size == (SIDE, SIDE)
