from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from boxcov import BoxcovError, Detections
from boxcov.data import coco, kitti, nuscenes
from boxcov.pipeline import output_format
from boxcov.pipeline.kitti_axes import KittiAsNuScenes
from helpers.coco_cases import coco_root
from helpers.command_line import boxcov, refuse, small_network, succeed
from helpers.data_roots import kitti_root, nuscenes_root
from helpers.export_boxes import in_image, in_space


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Detections]:
    found = in_space(7, frames=3)
    found.save(tmp_path / "d.safetensors")
    return tmp_path / "d.safetensors", found


def test_csv_table(stored: tuple[Path, Detections], tmp_path: Path) -> None:
    path, found = stored
    done = boxcov(f"convert {path} --format csv --out {tmp_path / 'd.csv'} --json")
    assert (done.code, done.report["boxes"]) == (0, 7)
    with (tmp_path / "d.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["var_yaw"]) for row in rows] == pytest.approx(
        found.covariance[:, 6, 6].tolist()
    )


@pytest.mark.parametrize(
    ("format", "kind", "boxes"),
    [
        ("ros", "vision_msgs/Detection3DArray", "detections"),
        ("autoware", "autoware_perception_msgs/DetectedObjects", "objects"),
    ],
)
def test_messages(
    stored: tuple[Path, Detections], tmp_path: Path, format: str, kind: str, boxes: str
) -> None:
    path, _ = stored
    done = succeed(
        f"convert {path} --format {format} --out {tmp_path / 'd.json'} --frame-id lidar_top"
    )
    assert "7 boxes in 3 frames" in done.out
    content = json.loads((tmp_path / "d.json").read_text())
    assert (content["type"], content["covariance"]) == (kind, "predictive")
    assert [len(message[boxes]) for message in content["messages"]] == [3, 2, 2]
    assert content["messages"][0]["header"]["frame_id"] == "lidar_top"


def test_messages_of_image_boxes(tmp_path: Path) -> None:
    in_image().save(tmp_path / "d.safetensors")
    succeed(f"convert {tmp_path / 'd.safetensors'} --format ros --out {tmp_path / 'd.json'}")
    assert json.loads((tmp_path / "d.json").read_text())["type"] == "vision_msgs/Detection2DArray"
    done = boxcov(
        f"convert {tmp_path / 'd.safetensors'} --format autoware --out {tmp_path / 'e.json'}"
    )
    assert "the format autoware takes boxes of x y z w l h yaw; these are x1 y1 x2 y2" in done.err


def test_epistemic_covariance_must_be_requested(tmp_path: Path) -> None:
    in_space(calibrated=False).save(tmp_path / "d.safetensors")
    words = (f"convert {tmp_path / 'd.safetensors'} --format ros --out {tmp_path / 'd.json'}",)
    error = refuse(*words)
    assert "the format ros is read by trackers, which need the covariance of the errors" in error
    succeed(*words, "--covariance epistemic")
    assert json.loads((tmp_path / "d.json").read_text())["covariance"] == "epistemic"


def test_predict_refuses_a_format_before_the_work(tmp_path: Path) -> None:
    word = small_network(tmp_path)
    error = refuse(
        f"predict --detector {word} --method nms --count 1 --sweeps 1 "
        f"--format ros --out {tmp_path / 'd.json'}"
    )
    assert "boxcov calibrate" in error
    succeed(
        f"predict --detector {word} --method nms --count 1 --sweeps 1 "
        f"--format csv --out {tmp_path / 'd.csv'}"
    )
    assert (tmp_path / "d.csv").read_text().startswith("frame,label,class,score,x,y,z")


def made_from(found: Detections, data: str, frames: int, classes: tuple[str, ...]) -> Detections:
    return replace(
        found,
        classes=classes,
        meta={
            "method": "exact",
            "frames": frames,
            "source": {"data": data, "split": "train", "count": frames},
        },
    )


def test_nuscenes_results_with_time_stamps(tmp_path: Path) -> None:
    root = nuscenes_root(tmp_path)
    frames = nuscenes.frames(root)
    found = made_from(in_space(7, frames=2), f"nuscenes:{tmp_path / 'moved'}", 2, nuscenes.CLASSES)
    found.save(tmp_path / "d.safetensors")
    words = (f"convert {tmp_path / 'd.safetensors'} --data", f"nuscenes:{root}")
    succeed(*words, f"--format nuscenes --out {tmp_path / 'r.json'}")
    assert list(nuscenes.read_results(tmp_path / "r.json")) == frames.tokens[:2]
    succeed(*words, f"--format ros --out {tmp_path / 'm.json'}")
    stamps = [
        m["header"]["stamp"] for m in json.loads((tmp_path / "m.json").read_text())["messages"]
    ]
    assert [s["sec"] * 10**6 + s["nanosec"] // 1000 for s in stamps] == [
        frames.timestamp(0),
        frames.timestamp(1),
    ]
    assert frames.timestamp(1) > frames.timestamp(0) > 0


def test_last_frame_without_boxes_is_written(tmp_path: Path) -> None:
    root = nuscenes_root(tmp_path)
    found = replace(in_space(4, calibrated=False), classes=nuscenes.CLASSES, meta={})
    found.save(tmp_path / "d.safetensors")
    words = f"convert {tmp_path / 'd.safetensors'} --data nuscenes:{root} --split train --count 2"
    done = succeed(f"{words} --format nuscenes --out {tmp_path / 'r.json'}")
    assert "4 boxes in 2 frames" in done.out
    tokens = nuscenes.frames(root).tokens[:2]
    assert list(nuscenes.read_results(tmp_path / "r.json")) == tokens


def test_messages_of_kitti_use_the_axes_of_kitti(tmp_path: Path) -> None:
    frames = KittiAsNuScenes(kitti.frames(kitti_root(tmp_path))[:1])
    found = in_space(3)
    output_format.write_detections("ros", tmp_path / "m.json", frames, found)
    (message,) = json.loads((tmp_path / "m.json").read_text())["messages"]
    one = message["detections"][0]["results"][0]["pose"]
    x, y, *_ = found.boxes[0].tolist()
    assert (one["pose"]["position"]["x"], one["pose"]["position"]["y"]) == pytest.approx((y, -x))
    assert one["covariance"][0] == pytest.approx(float(found.predictive[0, 1, 1]))
    assert one["covariance"][1] == pytest.approx(-float(found.predictive[0, 1, 0]))


def test_conversions_that_are_refused(stored: tuple[Path, Detections], tmp_path: Path) -> None:
    path, _ = stored
    done = boxcov(f"convert {path} --format kitti --out {tmp_path / 'r'}")
    assert "does not state which frames it was computed on" in done.err
    assert "is the input file" in boxcov(f"convert {path} --format csv --out {path} --force").err
    assert (
        "no such file"
        in boxcov(f"convert {tmp_path / 'none'} --format csv --out {tmp_path / 'x'}").err
    )
    done = boxcov(f"convert {tmp_path / 'none'} --format csv --out {path} --force")  # which exists
    assert "none: no such file" in done.err
    made_from(in_space(3), "simulated:clear", 1, ("car", "pedestrian", "traffic_cone")).save(path)
    assert boxcov(f"convert {path} --format nuscenes --out {tmp_path / 'x'}").code == 1


@pytest.mark.parametrize(("format", "package"), [("parquet", "pyarrow"), ("rerun", "rerun")])
def test_missing_package_is_named_before_the_work(
    monkeypatch: pytest.MonkeyPatch, format: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BoxcovError, match=f"{package} is not installed: pip install {package}"):
        output_format.check_format(format, None, in_space().fields)


def test_coco_aliases_are_written(tmp_path: Path) -> None:
    frames = coco.frames(coco_root(tmp_path / "set"), size=96)
    boxes = in_image(2)
    found = replace(boxes, classes=frames.classes, labels=torch.zeros(2, dtype=torch.long))
    output_format.write_detections("coco", tmp_path / "r.json", frames, found)
    entry = json.loads((tmp_path / "r.json").read_text())[0]
    assert {"covariance", "predictive", "bbox_covar", "covars"} <= set(entry)
