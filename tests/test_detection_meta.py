"""Metadata of a file of detections that a stranger wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from boxcov import BoxcovError, Detections
from boxcov.data import nuscenes
from boxcov.data.covariance_json import covariance_meta
from helpers.command_line import boxcov
from helpers.data_roots import nuscenes_root
from helpers.export_boxes import in_space, with_error_model


def stored(path: Path, **entries: Any) -> Path:
    """Write boxes of 3 frames with these entries of the metadata."""
    found = in_space(7, frames=3)
    about = {"version": "0", "fields": found.fields, "classes": found.classes}
    about["meta"] = {**found.meta, **entries}
    save_file(dict(found._tensors()), path, {"boxcov.detections": json.dumps(about)})
    return path


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"frames": 0}, "meta.frames is 0, but there are boxes in frame 2"),
        ({"frames": -1}, "meta.frames is -1"),
        ({"frames": 10**12}, "meta.frames is 1000000000000, expected a whole number from 0"),
        ({"frames": "3"}, "meta.frames is '3'"),
        ({"frames": True}, "meta.frames is True"),
        ({"frames": 3, "milliseconds": [1.0] * 4}, "meta.milliseconds has more numbers"),
        ({"milliseconds": ["a"]}, r"meta.milliseconds\[0\] is 'a'"),
        ({"milliseconds": 7}, "meta.milliseconds is 7, expected a list"),
        ({"method": ["x"]}, "meta.method is"),
        ({"method": "x" * 10_000}, "meta.method is"),
        ({"samples": {}}, "meta.samples is"),
        ({"source": []}, "meta.source is"),
        ({"source": {"data": ["a"]}}, "meta.source.data is"),
        ({"signals": "abc"}, "meta.signals is 'abc'"),
        ({"signals": [1]}, r"meta.signals\[0\] is 1"),
        ({"own": nested(100)}, "nested more than 32 deep"),
    ],
)
def test_metadata_of_other_types_is_refused(tmp_path, entries, message) -> None:
    path = stored(tmp_path / "d.safetensors", **entries)
    with pytest.raises(BoxcovError, match=rf"d\.safetensors: .*{message}") as caught:
        Detections.load(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("fields", "classes", "message"),
    [
        ([f"f{i}" for i in range(30_000)], ["car"], "30000 fields, at most 64"),
        (["x", "x"], ["car"], "two fields have the same name"),
        (["x"], ["c"] * 40_000, "40000 classes, at most 32768"),
    ],
)
def test_names_of_no_box_have_a_limit(tmp_path, fields, classes, message) -> None:
    """Without boxes the numbers take no bytes, but a table has a column per pair of fields."""
    D, none = len(fields), torch.zeros(0, dtype=torch.long)
    tensors = {"boxes": torch.zeros(0, D), "scores": torch.zeros(0), "labels": none}
    tensors |= {"frame": none.clone(), "covariance": torch.zeros(0, D, D)}
    about = {"fields": fields, "classes": classes, "meta": {}}
    save_file(tensors, tmp_path / "d.safetensors", {"boxcov.detections": json.dumps(about)})
    with pytest.raises(BoxcovError, match=rf"d\.safetensors: .*{message}"):
        Detections.load(tmp_path / "d.safetensors")


@pytest.mark.parametrize(
    "entries",
    [
        {"thresholds": [0.4, 0.4, 0.4]},
        {"thresholds": [0.5, 0.4, 0.3]},
        {"thresholds": [0.3, 0.4, float("nan")]},
        {"threshold": 10**400},
        {"dof": [10**400] * 9},
        {"dof": [-1.0] * 9},
        {"levels": [0.5, 0.9, 9.0]},
    ],
)
def test_summaries_of_no_error_model_are_refused(tmp_path, entries) -> None:
    found = with_error_model(in_space(7, frames=3))
    meta = {**found.meta, "error_model": {**found.meta["error_model"], **entries}}
    about = {"fields": found.fields, "classes": found.classes, "meta": meta}
    tensors = {name: tensor.contiguous() for name, tensor in found._tensors()}
    save_file(tensors, tmp_path / "d.safetensors", {"boxcov.detections": json.dumps(about)})
    with pytest.raises(BoxcovError, match=r"d\.safetensors: .*does not say the thresholds"):
        Detections.load(tmp_path / "d.safetensors")


def test_own_entries_of_the_metadata_stay(tmp_path) -> None:
    own = {"site": {"name": "track 3", "runs": [1, 2]}, "note": None}
    assert Detections.load(stored(tmp_path / "d.safetensors", own=own)).meta["own"] == own


@pytest.mark.parametrize("entry", [np.eye(2), torch.eye(2), {"of": [{1, 2}]}, {(1, 2): 3}])
def test_entries_that_no_file_can_hold_are_named(tmp_path, entry) -> None:
    found = in_space(7, frames=3)
    found = replace(found, meta={**found.meta, "pose": entry})
    message = r"^meta\['pose'\] cannot be written \(.*\): meta may hold texts, numbers"
    with pytest.raises(BoxcovError, match=message):
        found.save(tmp_path / "d.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(BoxcovError, match=message):
        covariance_meta(found, found.fields, "lidar")


def test_frame_numbers_have_a_limit(tmp_path) -> None:
    found = in_space(7, frames=3)
    replace(found, frame=found.frame + (1 << 30)).save(tmp_path / "d.safetensors")
    with pytest.raises(BoxcovError, match=r"d\.safetensors: .*frames from"):
        Detections.load(tmp_path / "d.safetensors")


@pytest.mark.parametrize("command", ["evaluate {} --out {}/r.html", "convert {} --out {}/r"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"data": "simulated:clear", "speed": 3}, "has an unknown entry 'speed'"),
        ({"data": 3}, "meta.source.data is 3, expected a text"),
        ({"data": "simulated:clear", "count": "3"}, "meta.source.count is '3'"),
        ({"data": "simulated:clear", "seed": None}, "meta.source.seed is None"),
        ({"data": "nuscenes:" + "x" * 300, "split": "val"}, "no such folder"),
        ({"data": "kitti:" + "x/" * 1500}, "no such folder"),
        ({"data": "coco:" + "x" * 300}, "no such file: unpack"),
        ({"data": "nuscenes:a\0b", "split": "val"}, "meta.source.data is"),
    ],
)
def test_a_source_of_another_form_is_one_line(tmp_path, command, source, message) -> None:
    path = stored(tmp_path / "d.safetensors", source=source, frames=3)
    words = command.format(path, tmp_path).split()
    done = boxcov(" ".join([*words, *(["--format", "nuscenes"] if "convert" in command else [])]))
    assert done.code != 0
    assert message in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_frames_are_split_in_one_pass() -> None:
    found = in_space(7, frames=3)
    for count in (3, 5):
        parts = found.frames(count)
        assert [len(part) for part in parts] == [3, 2, 2, 0, 0][:count]
        for number, part in enumerate(parts):
            assert torch.equal(part.boxes, found.boxes[found.frame == number])
    with pytest.raises(BoxcovError, match="there are boxes in frame 2, but only 2 frames"):
        found.frames(2)
    assert found[:0].frames() == []


def test_empty_frames_cost_nothing() -> None:
    parts = in_space(7, frames=3).frames(1 << 20)
    assert len(parts) == 1 << 20
    assert parts[3] is parts[-1]


@pytest.mark.parametrize("about", [[], 3, "x", {"method": 3}, {"frames": -2}, {"signals": {}}])
def test_metadata_of_result_files_has_the_same_schema(tmp_path, about) -> None:
    frames = nuscenes.frames(nuscenes_root(tmp_path / "root"))[:1]
    found = replace(in_space(2, frames=1), classes=nuscenes.CLASSES)
    nuscenes.write_results(tmp_path / "r.json", frames, [found])
    content = json.loads((tmp_path / "r.json").read_text())
    content["meta"]["uncertainty"] = about
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(BoxcovError, match=r"r\.json: .*meta"):
        nuscenes.read_results(tmp_path / "r.json")
