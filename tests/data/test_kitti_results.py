from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcov import Detections
from boxcov.data import kitti
from boxcov.data.kitti.camera import (
    CAMERA_FIELDS,
    LIDAR_FIELDS,
    to_camera,
)
from boxcov.data.poses import BOX_FIELDS
from boxcov.errors import BoxcovError, BoxcovWarning
from helpers.data_roots import KITTI_LABELS, KITTI_POSE, kitti_root, random_detections, real
from helpers.error_models import make_error_model


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return kitti_root(tmp_path / "set")


def found(frames: kitti.Kitti, number: int, fields: int = 9) -> Detections:
    (target,) = frames[number][1]
    return random_detections(
        target["boxes"][:, :fields], target["labels"], frames.classes, seed=number
    )


@pytest.mark.parametrize("fields", [7, 9])
def test_results_round_trip(root: Path, tmp_path: Path, fields: int) -> None:
    frames = kitti.frames(root)
    kitti.write_results(
        tmp_path / "out", frames, (found(frames, number, fields) for number in range(2))
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "000000.txt",
        "000001.txt",
        "covariance.json",
    ]
    lines = (tmp_path / "out/000000.txt").read_text().splitlines()
    labels = [
        line.split() for line in KITTI_LABELS.splitlines() if line.split()[0] in kitti.CLASSES
    ]
    for line, label in zip(lines, labels, strict=True):
        words = line.split()
        assert len(words) == 16
        assert words[:3] == [label[0], "-1", "-1"]
        assert np.allclose(list(map(float, words[8:14])), list(map(float, label[8:14])), atol=2e-4)
        assert float(words[14]) == pytest.approx(float(label[14]), abs=2e-4)
        assert float(words[3]) == pytest.approx(float(label[3]), abs=0.02)  # alpha
    beside = json.loads((tmp_path / "out/covariance.json").read_text())
    assert beside["meta"] == {
        "covariance_fields": list(CAMERA_FIELDS),
        "covariance_frame": "rectified camera",
        "uncertainty": {"method": "mcglm", "samples": 10},
    }
    for number, back in enumerate(kitti.read_results(tmp_path / "out", frames)):
        given = found(frames, number, fields)
        assert given.covariance is not None
        assert back.covariance is not None
        _, J = to_camera(given.boxes[:, :7].double(), KITTI_POSE)
        expected = J @ given.covariance[:, :7, :7] @ J.transpose(1, 2)
        rows = (
            torch.tensor([row["covariance"] for row in beside["frames"][f"{number:06d}"]])
            .double()
            .reshape(-1, 7, 7)
        )
        assert torch.allclose(rows, expected, rtol=1e-5, atol=1e-7)
        assert beside["frames"]["000000"][0]["uncertainty"] > 0
        assert back.fields == LIDAR_FIELDS
        assert back.meta == given.meta
        assert torch.equal(back.labels, given.labels)
        assert torch.allclose(back.scores, given.scores.double(), atol=1e-6)
        assert torch.allclose(back.boxes, given.boxes[:, :7].double(), atol=2e-3)
        assert torch.allclose(back.covariance, given.covariance[:, :7, :7], rtol=2e-3)


def test_predictive_covariances_are_written_and_read(root: Path, tmp_path: Path) -> None:
    frames = kitti.frames(root)
    given = [
        replace(one, predictive=3 * one.covariance)
        for one in (found(frames, number) for number in range(2))
    ]
    kitti.write_results(tmp_path / "out", frames, given)
    for back in kitti.read_results(tmp_path / "out", frames):
        assert torch.allclose(back.predictive, 3 * back.covariance, rtol=1e-6, atol=1e-12)
    kitti.write_results(tmp_path / "out", frames, [found(frames, number) for number in range(2)])
    assert "predictive" not in (tmp_path / "out/covariance.json").read_text()
    assert all(back.predictive is None for back in kitti.read_results(tmp_path / "out", frames))


def test_the_image_size_is_that_of_the_image(root: Path, tmp_path: Path) -> None:
    frames = kitti.frames(root)[:1]
    (root / "training/image_2/000000.png").write_bytes(
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 600, 200)
    )
    kitti.write_results(tmp_path / "out", frames, [found(frames, 0)])
    right = [
        float(line.split()[6]) for line in (tmp_path / "out/000000.txt").read_text().splitlines()
    ]
    assert max(right) == 599


def test_an_image_size_that_is_assumed_is_said(root: Path, tmp_path: Path) -> None:
    frames = kitti.frames(root)
    (root / "training/image_2/000001.png").unlink()
    with pytest.warns(BoxcovWarning, match="1 of 2 frames .* clipped at 1242 x 375 pixels: unpack"):
        kitti.write_results(tmp_path / "out", frames, [found(frames, item) for item in range(2)])


def test_plain_results_leave_no_old_covariances(root: Path, tmp_path: Path) -> None:
    frames = kitti.frames(root)
    both = [found(frames, number) for number in range(2)]
    kitti.write_results(tmp_path / "out", frames, both)
    kitti.write_results(tmp_path / "out", frames, [replace(d[:0], covariance=None) for d in both])
    assert not (tmp_path / "out/covariance.json").exists()
    assert (tmp_path / "out/000000.txt").read_text() == ""
    assert all(
        len(back) == 0 and back.covariance is None
        for back in kitti.read_results(tmp_path / "out", frames)
    )


def test_results_that_cannot_be_written(root: Path, tmp_path: Path) -> None:
    frames = kitti.frames(root)
    both = [found(frames, number) for number in range(2)]
    nan = both[0].boxes.clone()
    nan[0, 6] = torch.nan
    wrong = {
        "1 frames for 2": both[:1],
        "position or size of 1 of 2 boxes is not finite": [replace(both[0], boxes=nan), both[1]],
        "no class Bus": [replace(both[0], classes=("Bus",) * 3), both[1]],
        "KITTI takes boxes of x y z": [replace(d, fields=("a", *BOX_FIELDS[1:])) for d in both],
    }
    for words, detections in wrong.items():
        with pytest.raises(BoxcovError, match=words):
            kitti.write_results(tmp_path / "out", frames, detections)
        assert not (tmp_path / "out/covariance.json").exists()


def test_inconsistent_result_files_are_refused(root: Path, tmp_path: Path) -> None:
    frames = kitti.frames(root)
    kitti.write_results(tmp_path / "out", frames, [found(frames, number) for number in range(2)])
    path = tmp_path / "out/000000.txt"
    text = path.read_text()
    path.write_text(text.splitlines()[0])
    with pytest.raises(BoxcovError, match="not written together"):
        kitti.read_results(tmp_path / "out", frames)
    path.write_text(text.rsplit(maxsplit=1)[0])
    with pytest.raises(BoxcovError, match="16 columns"):
        kitti.read_results(tmp_path / "out", frames)
    path.write_text(text)
    for content in ("", "[]", '{"meta": {"uncertainty": {}}, "frames": {}}'):
        (tmp_path / "out/covariance.json").write_text(content)
        with pytest.raises(
            BoxcovError, match=re.escape("covariance.json: not a file of covariances")
        ):
            kitti.read_results(tmp_path / "out", frames)


@pytest.mark.filterwarnings("ignore:.* frames have no image")
def test_real_labels_come_back_as_they_were(tmp_path: Path) -> None:
    frames = kitti.frames(real("kitti"), classes=kitti.TYPES)[::10]
    kitti.write_results(tmp_path, frames, [found(frames, number) for number in range(len(frames))])
    for token in frames.tokens:
        official = [
            line.split()
            for line in (frames.folder / f"label_2/{token}.txt").read_text().splitlines()
        ]
        written = [line.split() for line in (tmp_path / f"{token}.txt").read_text().splitlines()]
        for mine, label in zip(written, official, strict=True):
            assert np.allclose(
                list(map(float, mine[8:15])), list(map(float, label[8:15])), atol=1e-3
            )
            # 2D boxes in pixels: this data set projects boxes that are upright in the LiDAR's
            # frame, which is tilted by a degree against the camera's
            assert np.allclose(list(map(float, mine[4:8])), list(map(float, label[4:8])), atol=10)


def test_results_of_an_error_model(root: Path, tmp_path: Path) -> None:
    """A rotated centre has no scale; probabilities, sizes and yaw are read as written."""
    frames = kitti.frames(root)
    error_model = make_error_model(BOX_FIELDS, frames.classes)
    given = [error_model.apply(found(frames, number)) for number in range(2)]
    kitti.write_results(tmp_path / "out", frames, given)
    rows = json.loads((tmp_path / "out/covariance.json").read_text())["frames"]["000000"]
    assert rows[0]["risk"] == pytest.approx(float(given[0].risk[0]), rel=1e-6)
    assert rows[0]["scale"][:3] == pytest.approx(given[0].scale[0, [5, 3, 4]].tolist(), rel=1e-6)
    assert rows[0]["scale"][3:6] == [None] * 3
    for one, back in zip(given, kitti.read_results(tmp_path / "out", frames), strict=True):
        for name in ("no_object", "iou_below", "flipped", "misplaced", "risk"):
            torch.testing.assert_close(
                getattr(back, name), getattr(one, name).double(), rtol=1e-6, atol=1e-8
            )
        torch.testing.assert_close(
            back.scale[:, 3:], one.scale[:, 3:7].double(), rtol=1e-3, atol=0
        )  # the slope of yaw is not 1: the camera is tilted
        assert bool(back.scale[:, :3].isnan().all())
        assert back.dof[3:].tolist() == [4.0] * 4
        assert bool((back.region(0.9) >= one.region(0.9)[:, :7] * (1 - 1e-3)).all())
        expected = one.predictive[:, :7, :7].double()
        off = (back.predictive - expected).flatten(1).norm(dim=1)
        # rotation_y has four digits in the file, and the slope of yaw depends on it
        assert bool((off <= 1e-3 * expected.flatten(1).norm(dim=1)).all())
