from __future__ import annotations

import json
import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boxcov.data import batched, nuscenes
from boxcov.data.nuscenes import tables
from boxcov.data.points import points_in_boxes
from boxcov.errors import BoxcovError, BoxcovWarning
from helpers.data_roots import (
    CAR_SPEED,
    KEY_TIMES,
    LANDMARKS,
    VERSION,
    car_centre,
    edited,
    nuscenes_root,
    real,
    sensor,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return nuscenes_root(tmp_path / "set")


# reading


def test_frames_of_a_split_are_ordered_by_time(root: Path) -> None:
    frames = nuscenes.frames(root)
    assert frames.tokens == [f"sample-{number}" for number in range(4)]
    assert [target["token"] for _, (target,) in frames] == frames.tokens
    assert frames[1:3].tokens == frames.tokens[1:3]
    assert frames[-1][1][0]["token"] == "sample-3"
    with pytest.raises(IndexError):
        frames[4]
    with pytest.raises(IndexError):
        frames[:2][2]


def test_sweeps_line_up_in_the_key_frames_sensor_frame(root: Path) -> None:
    (points,), _ = nuscenes.frames(root, sweeps=4)[1]
    assert points.dtype == torch.float32
    dt = points[:, 4].unique()
    assert torch.allclose(dt, torch.tensor([0.0, 0.05, 0.10, 0.15]), atol=1e-6)
    R, t = sensor(KEY_TIMES[1])
    expected = torch.from_numpy(R.inv().apply(LANDMARKS - t)).float()
    for age in dt:
        cloud = points[points[:, 4] == age]
        own = cloud[:, 3] == len(LANDMARKS)
        assert int(own.sum()) == (1 if age == 0 else 0)  # the car itself goes from the sweeps only
        assert torch.equal(cloud[~own, 3], torch.arange(len(LANDMARKS), dtype=torch.float32))
        assert torch.allclose(cloud[~own, :3], expected, atol=5e-5)


def test_at_the_start_of_a_scene_there_are_fewer_sweeps(root: Path) -> None:
    frames = nuscenes.frames(root, sweeps=10)
    assert [len(points[:, 4].unique()) for (points,), _ in frames] == [1, 6, 10, 10]


def test_sweeps_that_the_tables_lack_are_warned_about(root: Path) -> None:
    def without_sweeps(rows: list[dict[str, Any]]) -> None:
        rows[:] = [row for row in rows if row["is_key_frame"]]
        lidar = [row for row in rows if row["calibrated_sensor_token"] == "mount-lidar"]
        for before, row in pairwise(lidar):
            row["prev"] = before["token"]

    edited(root, "sample_data", without_sweeps)
    assert len(nuscenes.frames(root, sweeps=1)) == 4
    with pytest.warns(BoxcovWarning, match=r"3 sweeps go back .* the tables lack .* sweeps=1"):
        nuscenes.frames(root, sweeps=3)


def test_boxes_are_in_the_sensor_frame(root: Path) -> None:
    frames = nuscenes.frames(root)
    for number, time in enumerate(KEY_TIMES):
        (target,) = frames[number][1]
        names = [nuscenes.CLASSES[label] for label in target["labels"]]
        assert names == ["car", "barrier"] + ["pedestrian"] * (number == 0)
        assert target["points"].tolist() == [10 * number] * len(names)
        R, t = sensor(time)
        x = R.inv().apply(car_centre(time) - t)
        front = R.inv().apply([np.cos(np.radians(-18)), np.sin(np.radians(-18)), 0])
        expected = [*x, 1.9, 4.5, 1.6, np.arctan2(front[1], front[0])]
        assert torch.allclose(
            target["boxes"][0, :7], torch.tensor(expected, dtype=torch.float32), atol=1e-5
        )


def test_velocities_are_differences_of_neighbours_or_nan(root: Path) -> None:
    frames = nuscenes.frames(root)
    for number, time in enumerate(KEY_TIMES):
        car, barrier, *walker = frames[number][1][0]["boxes"]
        R, _ = sensor(time)
        expected = torch.tensor(R.inv().apply([*CAR_SPEED, 0.0])[:2], dtype=torch.float32)
        if number == 3:  # 2.2 s from its only neighbour
            assert bool(car[7:].isnan().all())
        else:  # at sample 2 the neighbours are 2.7 s apart, one on each side
            assert torch.allclose(car[7:], expected, atol=1e-5)
            assert torch.allclose(barrier[7:], torch.zeros(2), atol=1e-6)
        assert all(bool(box[7:].isnan().all()) for box in walker)


def test_frames_pickle_and_batch(root: Path) -> None:
    frames = nuscenes.frames(root, sweeps=2)
    again = pickle.loads(pickle.dumps(frames))
    assert torch.equal(again[2][0][0], frames[2][0][0])
    inputs, targets = batched(frames, 3)[0]
    assert len(inputs) == 3
    assert [target["token"] for target in targets] == frames.tokens[:3]


def test_small_chunks_read_the_same_rows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(tables.Table(root / VERSION, "sample_annotation"))
    for size in (1, 7, 100):
        monkeypatch.setattr(tables, "_CHUNK", size)
        assert list(tables.Table(root / VERSION, "sample_annotation")) == whole


def test_a_set_without_annotations_has_no_boxes(root: Path) -> None:
    (root / VERSION / "sample_annotation.json").write_text("[]")
    (target,) = nuscenes.frames(root)[0][1]
    assert target["boxes"].shape == (0, 9)
    assert target["labels"].shape == target["points"].shape == (0,)


def test_scenes_that_the_tables_lack_are_counted(root: Path) -> None:
    with pytest.warns(BoxcovWarning) as caught:
        assert len(nuscenes.frames(root)) == 4
    said = str(caught.pop(BoxcovWarning).message)
    assert not caught.list
    assert said.startswith(f"{root / VERSION}: the tables have 1 of the 700 scenes of the split 't")
    assert "without scene-0002, scene-0004, scene-0005 and 696 more: frames of the oth" in said
    assert said.endswith("unpack the complete metadata archive of v1.0-trainval")
    scenes = [{"token": n, "name": n} for n in nuscenes.scene_names("val")]
    (root / VERSION / "scene.json").write_text(
        json.dumps([{"token": "scene", "name": "scene-0001"}, *scenes])
    )
    with pytest.warns(BoxcovWarning, match="have 0 of the 150 scenes of the split 'val'"):
        assert len(nuscenes.frames(root, split="val")) == 0  # listed, but without samples


# errors


def assert_fails(root: Path, *words: str, version: str = VERSION, split: str = "train") -> None:
    """Reading every frame fails with one message that holds these words."""
    with pytest.raises(BoxcovError) as caught:
        list(nuscenes.frames(root, version=version, split=split))
    for word in words:
        assert word in str(caught.value)


def test_missing_folders_and_unknown_splits(root: Path) -> None:
    assert_fails(root / "nowhere", "nowhere", "no such folder")
    assert_fails(root, "v1.0-mini", "v1.0-trainval", version="v1.0-mini")
    assert_fails(root, "'training'", "train, val, test, mini_train, mini_val", split="training")
    assert_fails(root, "scene.json", "'test'", split="test")
    for sweeps in (0, 2.5):
        with pytest.raises(BoxcovError, match="sweeps must be a whole number of at least 1"):
            nuscenes.frames(root, sweeps=sweeps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "table",
    [
        "scene",
        "sample",
        "sensor",
        "calibrated_sensor",
        "sample_data",
        "ego_pose",
        "category",
        "instance",
    ],
)
@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such table"), ("", "empty"), ("{}", "no JSON list"), ("[1]", "entry 0")],
)
def test_missing_and_damaged_tables(
    root: Path, table: str, content: str | None, words: str
) -> None:
    path = root / VERSION / f"{table}.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert_fails(root, str(path), words)


@pytest.mark.parametrize("cut", [0.5, 0.999])
def test_truncated_tables_are_refused(root: Path, cut: float) -> None:
    path = root / VERSION / "sample_annotation.json"
    text = path.read_text()
    path.write_text(text[: int(cut * len(text))])
    assert_fails(root, str(path), "damaged", "rows")


def test_endless_rows_are_not_read_into_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_CHUNK", 100)
    monkeypatch.setattr(tables, "_LONGEST", 1000)
    path = root / VERSION / "scene.json"
    path.write_text('[{"token": "' + "x" * 10**6)
    assert_fails(root, str(path), "damaged")


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("scene", "name"),
        ("sample", "timestamp"),
        ("sample_data", "prev"),
        ("ego_pose", "rotation"),
        ("sample_annotation", "size"),
    ],
)
def test_a_table_that_lacks_a_key(root: Path, table: str, key: str) -> None:
    path = edited(root, table, lambda rows: rows[0].pop(key))
    assert_fails(root, str(path), f"has no {key!r}", "token")


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("sample", "timestamp", "noon"),
        ("sample", "timestamp", float("nan")),
        ("sample", "timestamp", 10**30),
        ("sample_data", "is_key_frame", "yes"),
        ("sample_data", "filename", 3),
        ("ego_pose", "translation", [1.0, 2.0]),
        ("ego_pose", "translation", [1.0, 2.0, float("nan")]),
        ("ego_pose", "translation", [1.0, 2.0, 10**400]),
        ("ego_pose", "rotation", [0.0, 0.0, 0.0, 0.0]),
        ("sample_annotation", "size", [1.0, 0.0, 1.0]),
        ("sample_annotation", "num_lidar_pts", 1.5),
    ],
)
def test_table_entries_of_wrong_type_are_refused(
    root: Path, table: str, key: str, value: object
) -> None:
    path = edited(root, table, lambda rows: rows[0].update({key: value}))
    assert_fails(root, str(path), key, "expected")


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("sample", "scene_token"),
        ("calibrated_sensor", "sensor_token"),
        ("sample_data", "calibrated_sensor_token"),
        ("sample_data", "sample_token"),
        ("sample_data", "ego_pose_token"),
        ("sample_data", "prev"),
        ("instance", "category_token"),
        ("sample_annotation", "sample_token"),
        ("sample_annotation", "instance_token"),
        ("sample_annotation", "next"),
    ],
)
def test_dangling_tokens(root: Path, table: str, key: str) -> None:
    edited(root, table, lambda rows: rows[0].update({key: "lost"}))
    assert_fails(root, VERSION, "'lost'")


def test_missing_key_frames_and_cyclic_chains_are_refused(root: Path) -> None:
    path = edited(root, "sample_data", lambda rows: rows[0].update(is_key_frame=False))
    assert_fails(root, str(path), "'sample-0'", "no key frame")
    edited(root, "sample_data", lambda rows: rows[0].update(is_key_frame=True, prev="turn 1.00"))
    assert_fails(root, str(path), "later sweep")


@pytest.mark.parametrize(
    "name", ["../../secret.bin", "/etc/passwd", "samples/../../x", "..\\x", "C:/x", ""]
)
def test_file_names_may_not_leave_the_root(root: Path, name: str) -> None:
    path = edited(root, "sample_data", lambda rows: rows[0].update(filename=name))
    assert_fails(root, str(path), repr(name), "refused")


def test_damaged_point_files(root: Path) -> None:
    path = root / "samples/LIDAR_TOP/0.50.pcd.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-6])
    assert_fails(root, str(path), f"{len(data) - 6} bytes", "20 bytes")
    path.write_bytes(b"")
    assert_fails(root, str(path), "empty")
    path.unlink()
    assert_fails(root, str(path), "no such file")


def test_nan_points_are_dropped_with_a_warning(root: Path) -> None:
    path = root / "samples/LIDAR_TOP/0.00.pcd.bin"
    points = np.fromfile(path, dtype=np.float32).reshape(-1, 5)
    points[3, 1], points[5, 3], points[7, 0] = np.nan, np.inf, -np.inf
    points.tofile(path)
    frames = nuscenes.frames(root)
    with pytest.warns(BoxcovWarning, match=re.escape(f"{path}: 3 of 51 points")):
        (cloud,), _ = frames[0]
    assert len(cloud) == 48
    assert bool(cloud.isfinite().all())


# on real frames


def test_real_frames_and_boxes() -> None:
    frames = nuscenes.frames(real("nuscenes"), sweeps=1)
    boxes = same = 0
    for (points,), (target,) in frames:
        boxes += len(target["boxes"])
        same += int((points_in_boxes(points, target["boxes"]).sum(1) == target["points"]).sum())
    assert len(frames) == 40
    assert boxes == 2049
    assert same >= 0.98 * boxes


def test_real_sweeps_line_up() -> None:
    """Points of all sweeps lie in a barrier's box: barriers stand still, the car drives 10 m/s."""
    counts: dict[int, int] = {}
    for (points,), (target,) in nuscenes.frames(real("nuscenes"), sweeps=3)[1::4]:
        barriers = target["boxes"][target["labels"] == nuscenes.CLASSES.index("barrier")]
        hits = points_in_boxes(points, barriers).any(0)
        for turn, dt in enumerate(points[:, 4].unique()):
            counts[turn] = counts.get(turn, 0) + int(hits[points[:, 4] == dt].sum())
    assert counts[0] > 1000
    assert counts[1] == pytest.approx(counts[0], rel=0.02)
    assert counts[2] == pytest.approx(counts[0], rel=0.02)
