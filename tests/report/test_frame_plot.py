from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from boxcov import Detections
from boxcov.box_layout import PLANE, SPACE
from boxcov.data import coco
from boxcov.data.poses import BOX_FIELDS
from boxcov.errors import BoxcovError
from boxcov.outlines import corners, grown_boxes, risk_colors
from boxcov.report.frame_plot import write_plot
from helpers.coco_cases import coco_root, found_in
from helpers.export_boxes import in_image, in_space, with_error_model


def test_boxes_and_objects_are_drawn_where_they_are(tmp_path: Path) -> None:
    frames = coco.frames(coco_root(tmp_path / "set"), size=96)
    with_objects, drawn, plain = [], [], []
    for (image, targets), found in zip(frames, found_in(frames)):
        write_plot(tmp_path / "drawn.png", found, image, targets)
        write_plot(tmp_path / "plain.png", found[:0], image)
        with_objects.append(len(targets[0]["boxes"]) > 0)
        for name, pictures in (("drawn", drawn), ("plain", plain)):
            with Image.open(tmp_path / f"{name}.png") as picture:
                pictures.append(np.asarray(picture.convert("RGB")).astype(int))
    predicted = 0
    for has_objects, one, bare in zip(with_objects, drawn, plain):
        changed = np.abs(one - bare).sum(2) > 60
        predicted += int((changed & (one[:, :, 0] > 180) & (one[:, :, 1] < 90)).sum())
        green = changed & (np.abs(one - (44, 160, 44)).max(2) < 25)  # the colour of objects
        assert int(green.sum()) > 50 if has_objects else int(green.sum()) < 5
    assert predicted > 300
    assert set(with_objects) == {True, False}


def with_risk(found: Detections, risk: list[float]) -> Detections:
    found = with_error_model(found)
    none = torch.zeros_like(found.iou_below)
    return replace(found, no_object=torch.tensor(risk), iou_below=none)


def lines(axes) -> list:
    return [np.stack(line.get_data(), 1) for line in axes.lines]


def colors(axes) -> set[tuple[float, ...]]:
    from matplotlib.colors import to_rgb

    return {tuple(np.round(to_rgb(line.get_color()), 3)) for line in axes.lines}


def test_a_plot_from_above_shows_risk_and_regions() -> None:
    found = with_risk(in_space(4), [0.0, 0.2, 0.45, 0.9])
    points = [torch.randn(50, 5)]
    axes = found.plot(points, [{"boxes": found.boxes[:2], "labels": found.labels[:2]}])
    assert colors(axes) == {tuple(c) for c in np.round(risk_colors(found.risk.numpy()) / 255, 3)}
    assert len(axes.patches) == 2  # objects
    assert len(axes.collections[0].get_offsets()) == 50  # points
    plane = [0, 1, 3, 4, 6]
    boxes, widths = found.boxes[:, plane].numpy(), found.region(0.9)[:, plane].numpy()
    for risk, outline in zip(found.risk.tolist(), corners(grown_boxes(boxes, widths))):
        drawn = any(line.shape == (5, 2) and np.allclose(line, outline) for line in lines(axes))
        assert drawn == (risk < 0.5)  # the last one is probably no object
    assert [text.get_text() for text in axes.texts] == ["0 %", "20 %", "45 %"]


@pytest.mark.parametrize("fields", [PLANE, SPACE, BOX_FIELDS])
def test_objects_may_have_other_fields_than_boxes(fields: tuple[str, ...]) -> None:
    every = in_space(2)
    at = [BOX_FIELDS.index(name) for name in PLANE]
    found = replace(
        every, boxes=every.boxes[:, at], fields=PLANE, covariance=None, predictive=None, meta={}
    )
    objects = every.boxes[:, [BOX_FIELDS.index(name) for name in fields]]
    for boxes in (objects, objects.numpy(), objects.tolist()):
        axes = found.plot(None, [{"boxes": boxes, "labels": every.labels}])
        drawn = [patch.get_xy()[:5] for patch in axes.patches]
        np.testing.assert_allclose(drawn, corners(found.boxes.numpy()), atol=1e-5)
    assert not found.plot(None, [{"boxes": [], "labels": []}]).patches


def test_the_outline_holds_every_box_within_the_region() -> None:
    """Corners of boxes with errors inside the half widths lie inside the grown box."""
    rng = np.random.default_rng(0)
    boxes = np.column_stack(
        [rng.normal(size=(50, 2)), 1 + rng.random((50, 2)), rng.normal(size=50)]
    )
    widths = rng.random((50, 5)) * 0.5
    errors = (2 * rng.random((50, 5)) - 1) * widths * [1, 1, 1, 1, 0]
    x, y, w, length, yaw = grown_boxes(boxes, widths).T
    for k in range(4):
        corner = corners(boxes + errors)[:, k] - np.stack([x, y], 1)
        along = np.cos(yaw) * corner[:, 0] + np.sin(yaw) * corner[:, 1]
        across = -np.sin(yaw) * corner[:, 0] + np.cos(yaw) * corner[:, 1]
        assert (np.abs(along) <= length / 2 + 1e-12).all()
        assert (np.abs(across) <= w / 2 + 1e-12).all()


def test_a_plot_on_an_image_shows_the_image_and_bands() -> None:
    found = with_risk(in_image(2), [0.1, 0.8])
    image = torch.zeros(1, 3, 90, 120)
    image[:, 0] = 255  # blue
    axes = found.plot(image)
    assert axes.images[0].get_array()[0, 0].tolist() == [0, 0, 255]
    assert axes.get_ylim() == (90, 0)  # the y axis points down
    outer = found.boxes[0] + torch.tensor([-1, -1, 1, 1]) * found.region(0.9)[0]
    corner = outer[:2].numpy()
    assert any(np.allclose(line[0], corner) for line in lines(axes))
    assert len(axes.texts) == 1
    plain = in_image(2, calibrated=False).plot()
    assert plain.yaxis_inverted()
    assert plain.get_xlabel() == "x [px]"


def test_what_cannot_be_plotted_is_refused() -> None:
    with pytest.raises(BoxcovError, match=r"a plot: boxes of several .* detections\.frames\(\)"):
        in_space(4, frames=2).plot()
    with pytest.raises(BoxcovError, match="a plot takes boxes of x y w l yaw or x1 y1"):
        in_space(fields=("a", "b", "c", "w", "l", "h", "yaw", "vx", "vy")).plot()
    with pytest.raises(BoxcovError, match="these inputs are no point cloud"):
        in_space().plot(torch.zeros(3, 4, 4))
