"""The demo on a few frames: the printed numbers match its files and its reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from boxcov import Detections
from boxcov.evaluate.quality import auroc
from boxcov.pipeline import demo, evaluate
from boxcov.pipeline.options import EvaluateCommand
from helpers.command_line import boxcov


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The folder of a demo of two scenarios; a part of an interrupted one lies there."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    (folder / "clear" / "exact.safetensors.parts").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "SCENARIOS", {"clear": "plain", "unseen": "shifted"})
        for name, size in {"FRAMES": 2, "SWEEPS": 2, "REPLICATES": 3}.items():
            patch.setattr(demo, name, size)
        done = boxcov("demo", "--out", folder)
    assert done.code == 0, done.err
    (folder / "printed.txt").write_text(done.out)
    return folder


def test_uses_the_shipped_posterior(out: Path) -> None:
    found = Detections.load(out / "clear" / "exact.safetensors")
    assert found.meta["posterior"] == "small"
    assert found.no_object is not None


def test_numbers_match_the_predictions(out: Path) -> None:
    numbers = json.loads((out / "demo.json").read_text())
    assert list(numbers) == ["clear", "unseen"]
    for name, own in numbers.items():
        files = (out / name / "exact.safetensors",)
        command = EvaluateCommand(predictions=files, replicates=2)
        records = evaluate.run(command)[0].methods[0].records
        bad = records.iou < 0.4
        assert own["boxes"] == len(records)
        assert own["risk"] == pytest.approx(float(records.risk.mean()))
        assert own["AUROC"] == pytest.approx(auroc(bad, records.risk))
        assert own["low risk"]["boxes"] == int((records.risk <= 0.2).sum())
        errors, paired = records.as_axes().errors, records.paired
        inside = np.abs(errors[paired]) <= records.regions[paired, 1]
        known = ~np.isnan(errors[paired])
        assert own["inside"]["0.9"] == pytest.approx(inside[known].mean())
        widths = np.median(records.regions[paired, 1], 0)
        yaw = records.fields.index("yaw")
        assert own["half width"]["yaw"] == pytest.approx(np.degrees(widths[yaw]))
        assert own["cost"] > 0  # a busy machine may time the plain frames slower


def test_printed_text(out: Path) -> None:
    text = (out / "printed.txt").read_text()
    for words in (
        "bad boxes",
        "predicted by the risk",
        "errors inside the 90 % regions",
        "cost, in plain frames",
        f"clear, plain: {out}/clear/report.html",
        f"unseen, shifted: {out}/unseen/report.html",
    ):
        assert words in text
    assert "plain detector" in (out / "clear" / "report.html").read_text()
