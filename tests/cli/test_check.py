from __future__ import annotations

from pathlib import Path

import pytest
import torch

from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint.detector import CenterPoint
from boxcov.pipeline import check
from boxcov.pipeline.options import CheckCommand
from helpers.centerpoint_cases import detector_of, pillar_config
from helpers.centerpoint_files import config_text, exported
from helpers.command_line import boxcov, refuse, small_network


@pytest.fixture(scope="module")
def word(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_network(tmp_path_factory.mktemp("net"))


def test_correct_detector_passes(word: str) -> None:
    done = boxcov(f"check --detector {word} --sweeps 1 --json")
    report = done.report
    assert (done.code, report["ok"]) == (0, True)
    # a slow machine shows the progress
    assert [line for line in done.err.splitlines() if not line.startswith("checking: ")] == []
    assert {finding["name"]: finding["passed"] for finding in report["findings"]}["stages"] is True
    compared = report["findings"][-1]  # random weights are not confident
    assert (compared["name"], compared["passed"]) == ("labels: convention", None)
    assert [depth["depth"] for depth in report["depths"]] == ["head", "neck", "backbone", "encoder"]


def test_broken_detector_exits_with_1(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(CenterPoint):
        def loss(self, raw: object, targets: object) -> torch.Tensor:
            return super().loss(raw, targets).mean()

    def named(options: CheckCommand, device: str) -> CenterPoint:
        found = centerpoint.load(options.detector.partition(":")[2])
        found.__class__ = Broken
        return found

    monkeypatch.setattr(check, "load_detector", named)
    done = boxcov(f"check --detector {word} --sweeps 1")
    assert done.code == 1
    assert "  FAIL  loss  " in done.out
    assert "boxcov: 1 check failed" in done.err


def test_unknown_detector_is_refused() -> None:
    assert "no detector 'nothing:here'" in refuse("check --detector nothing:here")


def test_a_checkpoint_is_described_with_evidence(tmp_path: Path) -> None:
    config = pillar_config()
    path = tmp_path / "x.pth"
    state, meta = exported(detector_of(config), "mmdet3d"), {"mmdet3d_version": "0.16.0"}
    torch.save({"state_dict": state, "meta": meta}, path)
    (tmp_path / "config.py").write_text(config_text(config))
    words = f"check --detector centerpoint:{path} --sweeps 1"
    done = boxcov(words)
    assert "give legacy=True for before 1.0 or legacy=False" in done.err
    done = boxcov(f"{words} --no-legacy --config voxel01")
    assert "missing: pts_middle_encoder" in done.err
    done = boxcov(f"{words} --no-legacy --out {tmp_path}/frame.png --json")
    rows = {name: (value, evidence) for name, value, evidence in done.report["checkpoint"]}
    assert rows["framework"] == ("mmdetection3d", "names that start with pts_bbox_head.")
    assert rows["generation"] == ("1.0 or later", "as given")
    assert rows["grid"][0].startswith("0.4 x 0.4 x 8 m; x -6.4 to 6.4")
    assert rows["grid"][1] == str(tmp_path / "config.py")
    assert (tmp_path / "frame.png").read_bytes().startswith(b"\x89PNG")
    names = [finding["name"] for finding in done.report["findings"]]
    looks = ("scores", "on points", "sizes", "orientation", "classes", "grid")
    assert names[-6:] == [f"boxes: {name}" for name in looks]
    text = boxcov(f"{words} --legacy --config {tmp_path}/config.py").out
    assert "  generation  before 1.0  [as given]" in text


def test_config_is_for_checkpoints_of_centerpoint() -> None:
    done = boxcov("check --detector yolox:x.pth --config voxel01")
    assert "--config and --legacy are for checkpoints of CenterPoint, not yolox" in done.err
