from __future__ import annotations

import json

import pytest
import torch

from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint.detector import CenterPoint
from boxcov.pipeline import check
from boxcov.pipeline.options import CheckCommand
from helpers.command_line import boxcov, small_network


@pytest.fixture(scope="module")
def word(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_network(tmp_path_factory.mktemp("net"))


def test_correct_detector_passes(word: str) -> None:
    done = boxcov(f"check --detector {word} --sweeps 1 --json")
    report = json.loads(done.out)
    assert (done.code, report["ok"], done.err) == (0, True, "")
    assert {finding["name"]: finding["passed"] for finding in report["findings"]}["stages"] is True
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
    assert "checks failed" in done.err


def test_unknown_detector_is_refused() -> None:
    done = boxcov("check --detector nothing:here")
    assert done.code == 1
    assert "no detector 'nothing:here'" in done.err
