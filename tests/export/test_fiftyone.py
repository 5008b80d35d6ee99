"""FiftyOne is not among the test packages: a stand-in with the documented constructors.

``Detection(label, bounding_box | location, dimensions, rotation, confidence, **attributes)`` and
``Detections(detections=[...])``; the same calls run with FiftyOne itself where it is installed.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from boxcov import BoxcovError
from helpers.export_boxes import in_image, in_space, with_error_model


@pytest.fixture
def fiftyone(monkeypatch: pytest.MonkeyPatch) -> Any:
    try:
        import fiftyone as module
    except ImportError:
        module = ModuleType("fiftyone")
        module.Detection = module.Detections = SimpleNamespace  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fiftyone", module)
    return module


def test_boxes_of_images_are_relative(fiftyone: Any) -> None:
    found = with_error_model(in_image())
    there = found.to_fiftyone((200, 100)).detections
    assert len(there) == 3
    x1, y1, x2, y2 = found.boxes[1].tolist()
    expected = [x1 / 200, y1 / 100, (x2 - x1) / 200, (y2 - y1) / 100]
    assert there[1].bounding_box == pytest.approx(expected)
    assert there[1].label == found.classes[int(found.labels[1])]
    assert there[1].confidence == pytest.approx(float(found.scores[1]))
    assert there[1].risk == pytest.approx(float(found.risk[1]))
    assert there[1].half_width_90_x2 == pytest.approx(float(found.region(0.9)[1, 2]))


def test_boxes_in_space_have_location_and_rotation(fiftyone: Any) -> None:
    found = in_space(calibrated=False)
    box = found.to_fiftyone().detections[2]
    x, y, z, w, length, h, yaw, *_ = found.boxes[2].tolist()
    assert box.location == pytest.approx([x, y, z])
    assert box.dimensions == pytest.approx([length, w, h])
    assert box.rotation == pytest.approx([0, 0, yaw])
    assert box.uncertainty == pytest.approx(float(found.uncertainty[2]))
    assert not hasattr(box, "risk")


def test_what_cannot_be_a_sample_is_refused(fiftyone: Any) -> None:
    with pytest.raises(BoxcovError, match=r"need its size: to_fiftyone\(\(width, height\)\)"):
        in_image().to_fiftyone()
    with pytest.raises(BoxcovError, match=r"a sample: boxes of several .* detections\.frames\(\)"):
        in_space(frames=2).to_fiftyone()
    fields = ("x", "y", "z", "w", "l", "h", "theta", "vx", "vy")
    with pytest.raises(BoxcovError, match="FiftyOne takes boxes of x1 y1 x2 y2 or x y z"):
        in_space(fields=fields).to_fiftyone()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fiftyone", None)
    with pytest.raises(BoxcovError, match="fiftyone is not installed: pip install fiftyone"):
        in_image().to_fiftyone((9, 9))
