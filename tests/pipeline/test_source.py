"""Data are read as the detector was trained, or the user is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from boxcov import BoxcovError, BoxcovWarning
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.tiny import TinyCenter
from boxcov.detectors.yolox import YOLOX, Config
from boxcov.pipeline.detectors import match_source
from boxcov.pipeline.export import _example_input
from boxcov.pipeline.frame_files import IMAGE_SUFFIXES, FrameReader
from boxcov.pipeline.options import DataOptions, ExportCommand
from helpers.centerpoint_cases import pillar_config


@pytest.mark.parametrize(("width", "size"), [(16, 416), (32, 640)])
def test_images_get_the_size_of_the_network(width: int, size: int) -> None:
    detector = YOLOX(Config(width, 1))
    detector.trained_size = detector.config.size  # as of a released file
    assert match_source(DataOptions("coco:ROOT"), detector).data == f"coco:ROOT@{size}"
    for given in ("coco:ROOT@320", "coco:ROOT@whole", "simulated:clear"):
        assert match_source(DataOptions(given), detector).data == given


def test_the_image_size_of_an_own_yolox_is_asked_for() -> None:
    own = YOLOX(Config.named("nano"))  # 80 classes, but no released file
    with pytest.raises(BoxcovError, match="give coco:ROOT@640"):
        match_source(DataOptions("coco:ROOT"), own)
    with pytest.raises(BoxcovError, match="give --size, in pixels"):
        FrameReader(own)
    assert FrameReader(own, size=64).suffixes == IMAGE_SUFFIXES
    command = ExportCommand(out=Path("x.onnx"))
    with pytest.raises(BoxcovError, match="give --size, in pixels"):
        _example_input(own, command)
    assert _example_input(own, replace(command, size=64))[1].shape == (1, 3, 64, 64)


def test_an_unknown_image_size_is_asked_for() -> None:
    with pytest.raises(BoxcovError, match=r"give coco:ROOT@640 .* or coco:ROOT@whole"):
        match_source(DataOptions("coco:ROOT"), TinyCenter())


def test_images_are_refused_for_a_detector_of_points() -> None:
    with pytest.raises(BoxcovError, match="these are images, and a CenterPoint takes point clouds"):
        match_source(DataOptions("coco:ROOT@640"), CenterPoint(pillar_config()))


def test_another_number_of_sweeps_is_warned_about() -> None:
    three = CenterPoint(replace(pillar_config(), sweeps=3))
    for data in ("nuscenes:ROOT", "simulated:clear"):
        with pytest.warns(BoxcovWarning, match="trained on 3 sweeps .* have 10: give --sweeps 3"):
            match_source(DataOptions(data), three)
    match_source(DataOptions("nuscenes:ROOT", sweeps=3), three)
    match_source(DataOptions("kitti:ROOT"), three)
    match_source(DataOptions("nuscenes:ROOT"), CenterPoint(pillar_config()))  # not known
