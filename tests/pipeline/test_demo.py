"""The demo with a small network: the printed tables match its files and its report."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from boxcov.pipeline import demo, evaluate
from boxcov.pipeline.options import EvaluateCommand
from helpers.command_line import boxcov, small_network

# a 12.8 m network on two frames: few classes occur
pytestmark = pytest.mark.filterwarnings("ignore:the loss of 2 frames has a zero gradient")


@pytest.fixture
def out(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(demo, "DETECTOR", small_network(tmp_path))
    monkeypatch.setattr(demo, "run", partial(demo.run, size=demo.Size(2, 2, 1, 5, 0)))
    return tmp_path / "out"


def test_printed_tables_match_files_and_report(out) -> None:
    done = boxcov("demo", "--out", out, "--json")
    assert done.code == 0, done.err
    printed = json.loads(done.out)
    kept = json.loads((out / "demo.json").read_text())
    assert printed["quality"] == kept["quality"]
    files = tuple(out / f"{name}.safetensors" for name in ("exact", "MC-GLM", "NMS", "MCI"))
    evaluation = evaluate.run(EvaluateCommand(predictions=files, replicates=5))
    assert evaluation.rows == printed["quality"]
    page = (out / "report.html").read_text()
    exact = next(row for row in printed["quality"] if row["method"] == "exact")
    assert f"{exact['AvU IoU']['value']:.2f}" in page
    assert {path.name for path in (out / "figures").iterdir()} >= {
        "curves.png",
        "runtime.png",
        "bev-0.png",
    }


def test_printed_text(out) -> None:
    (out / "exact.safetensors.parts").mkdir(parents=True)  # of a demo that was cut off
    done = boxcov("demo", "--out", out)
    assert done.code == 0, done.err
    for words in (
        "GLM, from 1 boxes",
        "plain detector",
        "MC-GLM, k = 10",
        "1 - score",
        "AUROC",
        f"report: {out}/report.html",
    ):
        assert words in done.out.replace("\n", "") or words in done.out
    off = re.search(r"the same covariance as exact to (\S+)", done.out)
    assert off is not None
    assert float(off.group(1)) < 1e-3


def test_run_time_ratios_and_extrapolated_glm(out) -> None:
    boxcov("demo", "--out", out, "--json")
    rows = {row["method"]: row for row in json.loads((out / "demo.json").read_text())["runtime"]}
    assert rows["plain detector"]["ratio"] == 1
    assert all(
        row["ratio"] == pytest.approx(row["ms"] / rows["plain detector"]["ms"])
        for row in rows.values()
    )
    assert rows["GLM, from 1 boxes"]["ratio"] > rows["exact"]["ratio"]
