"""Files of a data set that a stranger wrote: images, point clouds, labels and names."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch

from boxcov import BoxcovError
from boxcov.data import coco, kitti, nuscenes, points
from boxcov.data.points import count_points, points_in_boxes, read_points
from helpers.coco_cases import coco_root
from helpers.data_roots import VERSION, kitti_root, nuscenes_root
from helpers.hostile_images import many_scans, solid_png

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"


def test_an_eps_named_jpg_starts_no_program(tmp_path, monkeypatch) -> None:
    (tmp_path / "x.jpg").write_bytes(EPS)
    for name in ("gs", "gswin32c", "gswin64c"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(BoxcovError, match=r"x\.jpg: not a JPEG, PNG, BMP or WebP image"):
        coco.read_image(tmp_path / "x.jpg")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("name", ["x.tif", "x.gif", "x.tga", "x.ppm", "x.dds"])
def test_other_image_formats_are_refused(tmp_path, name) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / name)
    with pytest.raises(BoxcovError, match=r"x\.\w+: not a JPEG, PNG, BMP or WebP image"):
        coco.read_image(tmp_path / name)


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.bmp", "x.webp"])
def test_the_four_image_formats_are_read(tmp_path, name) -> None:
    from PIL import Image

    Image.new("RGB", (9, 8), (250, 0, 0)).save(tmp_path / name)
    assert coco.read_image(tmp_path / name).shape == (3, 8, 9)


def png(path: Path, width: int, height: int) -> Path:
    path.write_bytes(solid_png(width, height))
    return path


def test_an_image_of_too_many_pixels_is_refused(tmp_path) -> None:
    with pytest.raises(BoxcovError, match=r"x\.png: 7000 x 6000 pixels, at most 40 million"):
        coco.read_image(png(tmp_path / "x.png", 7000, 6000))


def test_a_jpeg_of_many_scans_is_refused(tmp_path) -> None:
    """Each scan of 59 bytes takes a pass over all pixels: half a megabyte takes minutes."""
    path = tmp_path / "x.jpg"
    path.write_bytes(many_scans(80, 20))
    assert coco.read_image(path).shape == (3, 20, 80)  # about 10 scans
    path.write_bytes(many_scans(80, 20, more=100))
    with pytest.raises(BoxcovError, match=r"x\.jpg: a JPEG of 10\d scans, at most 100 are read"):
        coco.read_image(path)


def test_every_decoder_error_names_the_file(tmp_path, monkeypatch) -> None:
    from PIL import Image

    path = png(tmp_path / "x.png", 5, 4)
    for error in (struct.error("short"), IndexError("index"), ZeroDivisionError(), MemoryError()):

        def fail(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(Image, "open", fail)
        with pytest.raises(BoxcovError, match=r"x\.png: not a JPEG, PNG, BMP or WebP image"):
            coco.read_image(path)


@pytest.mark.parametrize("read", [coco.read_image, lambda path: read_points(path, 4)])
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path, read) -> None:
    os.mkfifo(tmp_path / "x.png")
    (tmp_path / "y.png").symlink_to("/dev/zero")
    for name in ("x.png", "y.png"):
        with pytest.raises(BoxcovError, match=rf"{name}: .*not a regular file"):
            read(tmp_path / name)


def test_points_are_counted_in_bounded_memory() -> None:
    torch.manual_seed(0)
    cloud, boxes = 20 * torch.randn(3000, 4), torch.rand(700, 7) * torch.tensor([20.0] * 6 + [6])
    assert torch.equal(count_points(cloud, boxes), points_in_boxes(cloud, boxes).sum(1))
    assert count_points(cloud, boxes[:0]).shape == (0,)


def test_a_frame_of_too_many_labels_is_refused(tmp_path) -> None:
    root = kitti_root(tmp_path, frames=1)
    path = next(root.glob("training/label_2/*.txt"))
    path.write_text("Car 0 0 0 1 2 3 4 1.5 1.8 4.2 0 1.6 20 0.1\n" * 10_001)
    with pytest.raises(BoxcovError, match=r"\.txt: 10001 objects in one frame, at most 10000"):
        kitti.frames(root)[0]


def test_a_sample_of_too_many_objects_is_refused(tmp_path, monkeypatch) -> None:
    root = nuscenes_root(tmp_path)
    nuscenes.frames(root)
    monkeypatch.setattr(points, "MAX_OBJECTS", 1)
    with pytest.raises(BoxcovError, match=r"sample_annotation\.json: \d+ objects in one frame"):
        nuscenes.frames(root)


def edit_table(root: Path, table: str, row: int, **entries: object) -> None:
    path = root / VERSION / f"{table}.json"
    rows = json.loads(path.read_text())
    rows[row].update(entries)
    path.write_text(json.dumps(rows))


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", "x" * 5000, "x" * (1 << 20)])
def test_odd_file_names_of_nuscenes_are_refused(tmp_path, name) -> None:
    root = nuscenes_root(tmp_path)
    edit_table(root, "sample_data", 0, filename=name)
    with pytest.raises(BoxcovError, match=r"sample_data\.json: .*filename is") as caught:
        list(nuscenes.frames(root))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["a\0b.jpg", "a\ud800b.jpg", "x" * 5000, {"a": 1}])
def test_odd_file_names_of_coco_are_refused(tmp_path, name) -> None:
    root = coco_root(tmp_path)
    path = next(root.glob("annotations/*.json"))
    content = json.loads(path.read_text())
    content["images"][0]["file_name"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(BoxcovError, match=r"\.json: .*file_name is") as caught:
        coco.frames(root, size=32)
    assert len(str(caught.value)) < 1000


def test_links_in_a_data_set_are_followed(tmp_path) -> None:
    """Data sets are put together from links to other disks; names in tables cannot leave."""
    root = nuscenes_root(tmp_path / "root")
    frames = nuscenes.frames(root, sweeps=1)
    path = root / frames.table_index.readings.file[frames.table_index.key[0]].decode()
    before = frames[0][0][0]
    path.rename(tmp_path / "elsewhere.bin")
    path.symlink_to(tmp_path / "elsewhere.bin")
    assert torch.equal(frames[0][0][0], before)


@pytest.mark.parametrize("root", ["x" * 300, "a\0b", "a/" * 3000])
def test_odd_roots_are_no_such_folder(root) -> None:
    for frames in (nuscenes.frames, kitti.frames, coco.frames):
        with pytest.raises(BoxcovError, match=r"no such f|not JSON"):
            frames(root)
