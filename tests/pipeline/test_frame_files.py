from __future__ import annotations

import os
import shutil
import warnings
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from boxcov import BoxcovError, BoxcovWarning, Detections
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.torchvision import TorchvisionDetector
from boxcov.detectors.transformers.detector import QueryDetector
from boxcov.detectors.ultralytics import Yolo
from boxcov.pipeline.frame_files import FrameReader, paths_from_lines, paths_in_folder, scale_boxes
from boxcov.pipeline.options import FileOptions
from helpers.error_models import make_error_model

IMAGE = torch.randint(0, 255, (3, 48, 96), generator=torch.Generator().manual_seed(0)).byte()


def without_network(kind: type, **attributes: object) -> nn.Module:
    """A detector of this kind that only its reader looks at."""
    whole = type(kind.__name__, (kind,), {})
    whole.__abstractmethods__ = frozenset()
    detector = whole.__new__(whole)
    nn.Module.__init__(detector)
    for name, value in attributes.items():
        setattr(detector, name, value)
    return detector


@pytest.mark.parametrize("images", ["rgb", "coco"])
def test_torchvision_gets_whole_images_in_its_colours(images: str) -> None:
    frame = FrameReader(without_network(TorchvisionDetector, images=images)).image(IMAGE)
    expected = IMAGE.flip(0) / 255 if images == "rgb" else IMAGE.float()
    assert torch.equal(frame.inputs, expected[None])
    assert frame.restore is None
    assert torch.equal(torch.tensor(frame.background), IMAGE.flip(0).permute(1, 2, 0))


@pytest.mark.parametrize(("size", "side"), [(None, 640), (96, 96)])
def test_ultralytics_gets_letterboxed_images(size: int | None, side: int) -> None:
    model = SimpleNamespace(args={"imgsz": 640})
    frame = FrameReader(without_network(Yolo, coco=False, model=model), size=size).image(IMAGE)
    assert frame.inputs.shape == (1, 3, side, side)
    assert float(frame.inputs.max()) <= 1
    assert (frame.restore is None) == (side == 96)


def test_transformers_need_their_image_processor() -> None:
    frame = FrameReader(without_network(QueryDetector, images=object())).image(IMAGE)
    assert torch.equal(frame.inputs, IMAGE.float()[None])
    with pytest.raises(BoxcovError, match="does not know the input files of a QueryDetector: give"):
        FrameReader(without_network(QueryDetector, images=None))


def test_files_of_one_sweep_are_warned_about() -> None:
    detector = without_network(CenterPoint, config=SimpleNamespace(sweeps=10))
    with pytest.warns(BoxcovWarning, match="trained on 10 sweeps .* have 1: join 10 into each"):
        FrameReader.of(detector, FileOptions())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FrameReader.of(detector, FileOptions(points="plain"))
        detector.config.sweeps = None
        FrameReader.of(detector, FileOptions())


def test_size_of_another_layout_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "kitti.bin"
    np.zeros((7, 4), dtype="<f4").tofile(path)
    detector = without_network(CenterPoint, config=SimpleNamespace(sweeps=None), classes=())
    reader = FrameReader.of(detector, FileOptions())
    with pytest.raises(BoxcovError, match=r"another format; give the layout .* --points"):
        reader(path)


def test_everything_in_pixels_is_scaled() -> None:
    fields, m = ("x1", "y1", "x2", "y2"), 2
    ones = torch.ones(m, 4, 4)
    found = Detections(
        *(torch.ones(m, 4), torch.ones(m), torch.zeros(m, dtype=torch.long)),
        *(torch.zeros(m, dtype=torch.long), fields, ("cat",)),
        covariance=torch.eye(4) + ones,
        score_variance=torch.ones(m),
        score_covariance=torch.ones(m, 4),
    )
    found = make_error_model(fields, ("cat",)).apply(found)
    scaled = scale_boxes(found, 2.0)
    for name in ("boxes", "scale", "region_widths", "joint_widths", "score_covariance"):
        assert torch.equal(getattr(scaled, name), 2 * getattr(found, name)), name
    for name in ("covariance", "predictive"):
        assert torch.equal(getattr(scaled, name), 4 * getattr(found, name)), name
    for name in ("scores", "risk", "score_variance"):
        assert torch.equal(getattr(scaled, name), getattr(found, name)), name


def test_paths_come_one_per_line() -> None:
    lines = StringIO("a.bin\n\nb.bin\n")
    assert [str(path) for path in paths_from_lines(lines)] == ["a.bin", "b.bin"]


def test_paths_need_not_be_utf_8() -> None:
    lines = TextIOWrapper(BytesIO(b"a\xff.bin\n"), encoding="utf-8")
    assert [os.fsencode(path) for path in paths_from_lines(lines)] == [b"a\xff.bin"]


def test_watched_folder_that_vanishes_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "frames"
    folder.mkdir()
    (folder / "a.png").touch()
    found = paths_in_folder(folder, (".png",), watch=True, poll=0.01)
    assert next(found) == folder / "a.png"
    shutil.rmtree(folder)
    with pytest.raises(BoxcovError, match=f"{folder}: no such file"):
        next(found)
