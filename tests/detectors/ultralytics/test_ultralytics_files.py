"""Files of Ultralytics, read without running code in them; skipped without ultralytics."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from boxcov import BoxcovError
from boxcov.data.coco import CLASSES
from boxcov.pipeline.detectors import load_detector, match_source
from boxcov.pipeline.frame_files import FrameReader
from boxcov.pipeline.options import DataOptions

try:
    from ultralytics import YOLO
except Exception as error:
    pytest.skip(
        f"ultralytics cannot be imported: {type(error).__name__}: {str(error)[:80]}",
        allow_module_level=True,
    )


def test_a_file_that_ultralytics_wrote(tmp_path: Path) -> None:
    whole = YOLO("yolov8n.yaml", verbose=False)
    whole.model.names = dict(enumerate(CLASSES))
    whole.save(tmp_path / "y.pt")
    detector = load_detector(f"ultralytics:{tmp_path}/y.pt")
    assert detector.classes == CLASSES
    assert not detector.training
    state = whole.model.state_dict()
    found = detector.model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], t.half().float().to(t.dtype)) for key, t in state.items())
    theirs = YOLO(tmp_path / "y.pt").model
    image = torch.randint(0, 256, (1, 3, 64, 96)).float()
    with torch.no_grad():
        assert torch.equal(detector(image)["found"], theirs(image.flip(1) / 255)[0])


def test_images_have_the_size_of_the_training(tmp_path: Path) -> None:
    whole = YOLO("yolov8n.yaml", verbose=False)
    whole.model.args = {"imgsz": 320}
    whole.save(tmp_path / "y.pt")
    detector = load_detector(f"ultralytics:{tmp_path}/y.pt")
    assert match_source(DataOptions("coco:ROOT"), detector).data == "coco:ROOT@320"
    image = torch.zeros(3, 100, 200, dtype=torch.uint8)
    assert FrameReader(detector).image(image).inputs.shape[2:] == (320, 320)
    detector.model.args = {}
    with pytest.raises(BoxcovError, match="give coco:ROOT@640"):
        match_source(DataOptions("coco:ROOT"), detector)


class Evil:
    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    evil = Evil()
    evil.folder = tmp_path / "made"
    torch.save({"model": evil}, tmp_path / "evil.pt")
    with pytest.raises(BoxcovError, match=r"holds more than a network \(posix.mkdir\), and boxcov"):
        load_detector(f"ultralytics:{tmp_path}/evil.pt")
    assert not evil.folder.exists()
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(BoxcovError, match="holds no network under ema or model"):
        load_detector(f"ultralytics:{tmp_path}/other.pt")
    (tmp_path / "damaged.pt").write_bytes(b"no torch file")
    with pytest.raises(BoxcovError, match=r"damaged\.pt"):
        load_detector(f"ultralytics:{tmp_path}/damaged.pt")
