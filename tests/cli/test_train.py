from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from boxcov import BoxcovError
from boxcov.detectors import centerpoint
from boxcov.pipeline import train as training
from boxcov.pipeline.frames import load_frames, preload_frames
from boxcov.pipeline.kitti_axes import frame_to_nuscenes
from boxcov.pipeline.options import DataOptions, TrainCommand
from helpers.command_line import boxcov


def test_training_writes_weights_and_report(tmp_path) -> None:
    out = tmp_path / "small.safetensors"
    command = [
        "train",
        "--out",
        str(out),
        "--count",
        "2",
        "--test-count",
        "1",
        "--steps",
        "2",
        "--batch",
        "1",
        "--sweeps",
        "1",
        "--json",
    ]
    for name in ("json", "safetensors.checkpoint", "safetensors"):  # as a kill leaves them
        (tmp_path / f".small.{name}.a1b2c3d4").touch()
    done = subprocess.run(
        [sys.executable, "-m", "boxcov", *command], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    assert report == json.loads(out.with_suffix(".json").read_text())
    assert report["frames"] == 2
    assert set(report["test"]) == {"simulated:clear"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small.json", "small.safetensors"]
    detector = centerpoint.load(out)
    assert sum(p.numel() for p in detector.parameters()) == report["parameters"]


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_resume_replaces_no_finished_training(tmp_path, suffix: str) -> None:
    out = tmp_path / "small.safetensors"
    there = out.with_suffix(suffix)
    there.write_bytes(b"mine")
    done = boxcov(f"train --out {out} --count 2 --steps 2 --sweeps 1 --resume")
    assert done.code == 1
    assert f"{there}: exists: replace it with --force" in done.err
    assert there.read_bytes() == b"mine"


def test_packaged_detector_detects() -> None:
    """It detects cars on unseen seeds, and far fewer objects of unknown shapes."""
    detector = centerpoint.load("small")
    clear, unseen = (
        training.measure_precision(
            detector,
            preload_frames(
                load_frames(DataOptions(f"simulated:{scenario}", count=4, seed=4000)), "cpu"
            ),
        )
        for scenario in ("clear", "unseen")
    )
    assert clear["car"][2.0] > 0.7
    assert clear["car"][2.0] > unseen["car"][2.0] + 0.2


def test_missing_folder_is_an_error_before_the_work(tmp_path) -> None:
    with pytest.raises(BoxcovError, match="there is no folder"):
        training.run(TrainCommand(out=tmp_path / "absent" / "x.safetensors", data="kitti:nothing"))


def test_unknown_data_and_configurations() -> None:
    assert len(load_frames(DataOptions("simulated:fog", count=2))) == 2
    with pytest.raises(BoxcovError, match="no data 'carla:town'"):
        load_frames(DataOptions("carla:town"))
    done = boxcov("train --config pilar --out x.safetensors")
    assert (done.code, "did you mean 'pillar'?" in done.err) == (2, True), done.err
    with pytest.raises(BoxcovError, match=r"split 'train\[a\]'"):
        load_frames(DataOptions("nuscenes:x", split="train[a]"))


def test_kitti_frames_in_nuscenes_axes() -> None:
    boxes = torch.tensor([[10.0, 2.0, -1.0, 1.6, 4.0, 1.5, 0.3, float("nan"), float("nan")]])
    cloud = torch.tensor([[10.0, 2.0, -1.0, 7.0, 0.0]])
    (points,), (target,) = frame_to_nuscenes(
        ([cloud], [{"boxes": boxes, "labels": torch.tensor([0])}])
    )
    assert points[0].tolist() == [-2.0, 10.0, -1.0, 7.0, 0.0]
    assert target["boxes"][0, :3].tolist() == [-2.0, 10.0, -1.0]
    assert float(target["boxes"][0, 6]) == pytest.approx(0.3 + torch.pi / 2)
    assert target["labels"].tolist() == [0]
