from __future__ import annotations

import json
from pathlib import Path

import pytest

from boxcov import BoxcovError, BoxcovWarning
from boxcov.data import nuscenes
from boxcov.pipeline.frames import frame_names, load_frames, load_labelled_frames
from boxcov.pipeline.options import DataOptions, PredictedData
from boxcov.pipeline.source import (
    default_split,
    shares_frames,
    source_of_detections,
    split_image_size,
    warn_of_other_inputs,
)
from helpers.data_roots import VERSION, edited, kitti_root, nuscenes_root


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    """A folder with v1.0-mini alone, of one scene of mini_val."""
    root = nuscenes_root(tmp_path)
    (root / VERSION).rename(root / "v1.0-mini")
    table = root / "v1.0-mini" / "scene.json"
    scenes = json.loads(table.read_text())
    scenes[0]["name"] = "scene-0103"
    table.write_text(json.dumps(scenes))
    return root


def test_splits_of_nuscenes_mini_are_found(mini: Path) -> None:
    data = f"nuscenes:{mini}"
    assert default_split(data, "predict") == default_split(data, "calibrate") == "mini_val"
    assert len(load_frames(DataOptions(data, "mini_val"))) == 4
    with pytest.raises(BoxcovError, match="none of its 2 scenes is of the split 'mini_train'"):
        load_frames(DataOptions(data))
    with pytest.raises(BoxcovError, match=r"it holds v1\.0-mini: its splits are mini_train and"):
        load_frames(DataOptions(data, "val"))


def test_whole_nuscenes_keeps_its_splits(tmp_path: Path) -> None:
    root = nuscenes_root(tmp_path)
    assert default_split(f"nuscenes:{root}", "predict") == "val"
    assert len(load_frames(DataOptions(f"nuscenes:{root}"))) == len(nuscenes.frames(root))


@pytest.mark.filterwarnings("ignore::boxcov.errors.BoxcovWarning")
def test_frames_have_the_names_of_their_files(tmp_path: Path) -> None:
    data, roads = kitti_root(tmp_path / "kitti"), nuscenes_root(tmp_path / "nuscenes")
    files = sorted(str(path) for path in (data / "training" / "velodyne").iterdir())
    assert frame_names(load_frames(DataOptions(f"kitti:{data}"))) == files
    assert frame_names(load_frames(DataOptions(f"kitti:{data}", "training[1:]"))) == files[1:]
    frames = load_frames(DataOptions(f"nuscenes:{roads}"))
    assert frame_names(frames) == [target["token"] for _, (target,) in frames]
    assert frame_names(load_frames(DataOptions("simulated:clear", count=2))) is None
    assert frame_names([]) is None


def test_commands_that_need_labels_refuse_splits_without(tmp_path: Path) -> None:
    data = kitti_root(tmp_path / "kitti")
    for path in (data / "training" / "label_2").iterdir():
        path.unlink()
    (data / "training" / "label_2").rmdir()
    (data / "training").rename(data / "testing")
    roads = nuscenes_root(tmp_path / "nuscenes")
    edited(roads, "sample_annotation", list.clear)
    for source in (DataOptions(f"kitti:{data}", "testing"), DataOptions(f"nuscenes:{roads}")):
        assert len(load_frames(source)) > 0
        with pytest.raises(BoxcovError, match="the frames have no labels, which this command"):
            load_labelled_frames(source)


def test_boxes_are_compared_with_images_of_their_size() -> None:
    """A data set that has moved would otherwise be read at another size than the boxes."""
    path, meta = Path("d.safetensors"), {"source": {"data": "coco:old@640", "split": "val2017"}}
    assert source_of_detections(path, meta, PredictedData("coco:new")).data == "coco:new@640"
    assert source_of_detections(path, meta, PredictedData("coco:new@640")).data == "coco:new@640"
    with pytest.raises(BoxcovError, match="boxes on images @640, not @416: remove @416"):
        source_of_detections(path, meta, PredictedData("coco:new@416"))
    with pytest.raises(BoxcovError, match=r"does not state the size .* coco:new@640"):
        source_of_detections(path, {}, PredictedData("coco:new"))
    assert source_of_detections(path, {}, PredictedData("coco:new@64")).data == "coco:new@64"


def test_the_image_size_is_what_follows_the_last_at() -> None:
    assert split_image_size("data/coco") == ("data/coco", "")
    assert split_image_size("data@home/coco@640") == ("data@home/coco", "640")


@pytest.mark.parametrize(
    ("split", "count", "shares"),
    [
        ("val2017", 80, True),
        ("val2017", 6, True),
        ("val2017[39:]", 41, True),
        ("val2017[40:]", 40, False),
        ("train2017", 80, False),
    ],
)
def test_parts_of_a_split_with_common_frames(split: str, count: int, shares: bool) -> None:
    source = DataOptions("coco:my photos", split, seed=1)
    assert shares_frames("coco:my photos val2017[:40] seed 0", 40, source, count) is shares
    for odd in ("coco:others val2017[:40] seed 0", "coco:my photos val2017[:x] seed 0"):
        assert not shares_frames(odd, 40, source, count)


def test_simulated_frames_of_0_1_are_clear_ones() -> None:
    meta = {"source": {"data": "simulated", "split": "test", "count": 3, "seed": 0, "sweeps": 10}}
    source = source_of_detections(Path("boxes"), meta, PredictedData())
    assert source == DataOptions("simulated:clear", "test", 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("coco:new@640", "frames of coco:ROOT@640, but .* of coco:ROOT@416, .* give --data coco"),
        ("simulated:rain", "frames of --sweeps 1, but .* of --sweeps 10, .*: give --sweeps 10"),
    ],
)
def test_frames_of_another_size_than_the_fit_are_warned_about(data: str, message: str) -> None:
    source = DataOptions(data, sweeps=1)
    same = "coco:old@416" if data.startswith("coco") else "simulated:clear"
    with pytest.warns(BoxcovWarning, match=message):
        warn_of_other_inputs({"data": same, "sweeps": "10"}, source)
    # the same frames, other kinds of frames, and a posterior that was made in Python
    warn_of_other_inputs({"data": same, "sweeps": "10"}, DataOptions(same, sweeps=10))
    warn_of_other_inputs({"data": "kitti:old", "sweeps": "10"}, source)
    warn_of_other_inputs({}, source)
