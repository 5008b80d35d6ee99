from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Detections
from boxcov.export.supervision import RegionAnnotator, from_supervision
from helpers.export_boxes import in_image, in_space, with_error_model


@pytest.fixture(scope="module")
def sv() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it prefers OpenCV
        return pytest.importorskip("supervision")


def test_boxes_come_back_as_they_were(sv: Any) -> None:
    found = with_error_model(in_image(6))
    there = found.to_supervision()
    assert isinstance(there, sv.Detections)
    np.testing.assert_array_equal(there.xyxy, found.boxes)
    np.testing.assert_array_equal(there.data["risk"], found.risk)
    assert there.data["class_name"].tolist() == [found.classes[i] for i in found.labels]
    back = Detections.from_supervision(there)
    for name, tensor in found._tensors():
        assert torch.equal(getattr(back, name), tensor), name
    assert (back.fields, back.classes, back.meta) == (found.fields, found.classes, found.meta)


def test_sides_in_another_order_are_found_by_name(sv: Any) -> None:
    found = in_image(3)
    order = [2, 3, 0, 1]
    turned = replace(
        found,
        boxes=found.boxes[:, order],
        fields=("x2", "y2", "x1", "y1"),
        covariance=None,
        predictive=None,
    )
    np.testing.assert_array_equal(turned.to_supervision().xyxy, found.boxes)
    scenes = [np.zeros((200, 200, 3), np.uint8) for _ in range(2)]
    for scene, one in zip(scenes, (found, turned)):
        RegionAnnotator().annotate(scene, one.to_supervision())
    np.testing.assert_array_equal(*scenes)


def test_a_filter_of_supervision_filters_everything(sv: Any) -> None:
    found = with_error_model(in_image(6))
    there = found.to_supervision()
    kept = Detections.from_supervision(there[there.data["risk"] > float(found.risk.median())])
    expected = found[found.risk > found.risk.median()]
    assert 0 < len(kept) == len(expected) < 6
    assert torch.equal(kept.region(0.9), expected.region(0.9))
    assert torch.equal(kept.covariance, expected.covariance)


def test_boxes_of_another_origin_have_no_covariance(sv: Any) -> None:
    plain = sv.Detections(
        xyxy=np.array([[1, 2, 3, 4], [0, 0, 9, 9]]),
        confidence=np.array([0.5, 0.25]),
        class_id=np.array([2, 0]),
        data={"class_name": np.array(["dog", "cat"])},
    )
    found = from_supervision(plain)
    assert found.covariance is None
    assert found.boxes.tolist() == [[1, 2, 3, 4], [0, 0, 9, 9]]
    assert [found.classes[i] for i in found.labels] == ["dog", "cat"]
    assert len(from_supervision(sv.Detections.empty())) == 0


def test_a_long_class_name_does_not_fill_the_memory(sv: Any) -> None:
    """numpy gives every name the width of the longest."""
    found = replace(in_image(5), classes=("x" * 4096, "dog"))
    names = found.to_supervision().data["class_name"]
    assert names.itemsize <= 4 * 60
    assert names.tolist()[1] == "dog"
    assert Detections.from_supervision(found.to_supervision()).classes == found.classes


@pytest.mark.parametrize("number", [10**9, -1])
def test_a_class_id_of_no_class_is_refused(sv: Any, number: int) -> None:
    plain = sv.Detections(xyxy=np.array([[1.0, 2, 3, 4]]), class_id=np.array([number]))
    with pytest.raises(BoxcovError, match=f"class_id from {number} to {number}"):
        from_supervision(plain)


def one_box(risk: float) -> Detections:
    found = with_error_model(in_image(1))
    widths = torch.full_like(found.region_widths, 4.0)
    return replace(
        found,
        boxes=torch.tensor([[20.0, 10.0, 60.0, 40.0]], dtype=torch.float64),
        no_object=torch.tensor([risk]),
        iou_below=torch.zeros_like(found.iou_below),
        region_widths=widths,
    )


def test_the_annotator_draws_box_and_region(sv: Any) -> None:
    scene = np.zeros((60, 80, 3), np.uint8)
    drawn = RegionAnnotator(thickness=1).annotate(scene, one_box(1.0).to_supervision())
    assert drawn is scene  # as the annotators of supervision
    rows = np.flatnonzero(scene[:, 40].any(1)).tolist()
    assert rows == [6, 10, 14, 36, 40, 44]  # outer, box, inner; inner, box, outer
    blue, green, red = scene[10, 40].tolist()
    assert red > 200 > 100 > max(blue, green)
    calm = RegionAnnotator().annotate(np.zeros_like(scene), one_box(0.0).to_supervision())
    assert calm[10, 40, 0] > 200 > calm[10, 40, 2]


def test_the_annotator_takes_pillow_and_plain_boxes(sv: Any) -> None:
    from PIL import Image

    picture = Image.new("RGB", (80, 60))
    drawn = RegionAnnotator().annotate(picture, one_box(1.0).to_supervision())
    assert drawn.getpixel((40, 10))[0] > 200
    assert picture.getpixel((40, 10)) == (0, 0, 0)
    plain = sv.Detections(xyxy=np.array([[-5.0, -5.0, 500.0, 500.0], [2, 2, 9, 9]]))
    scene = np.zeros((60, 80, 3), np.uint8)
    assert RegionAnnotator().annotate(scene, plain)[2, 5, 0] > 0


def test_boxes_in_space_are_refused() -> None:
    pytest.importorskip("supervision")
    with pytest.raises(BoxcovError, match="supervision takes boxes of x1 y1 x2 y2; these are x y"):
        in_space().to_supervision()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "supervision", None)
    with pytest.raises(BoxcovError, match="supervision is not installed: pip install supervision"):
        in_image().to_supervision()
