"""The whole reproduction with the reference detector, interrupted once."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, BoxcovWarning, Detections
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.error_model import network
from boxcov.evaluate.ground_truth import match_detections
from boxcov.evaluate.quality import Partition
from boxcov.evaluate.records import Records
from boxcov.pipeline.options import DataOptions
from boxcov.pipeline.reproduce import workspace as workspace_module
from boxcov.pipeline.reproduce.comparison import Table, measure, quality, runtime
from boxcov.pipeline.reproduce.plan import FORMS, Run, Setting, paper_mcglm
from boxcov.pipeline.reproduce.study import reproduce
from boxcov.pipeline.reproduce.workspace import Start, Workspace, part_of, restrict_posterior

SETTING = Setting(
    out=Path("reproduction"),
    detector="python:tiny:made",
    data="coco:train",
    split="train",
    count=8,
    n_data=200.0,
    test="coco:test",
    test_split="test",
    test_count=6,
    slow=2,
    calibration_count=30,
)
TABLES = [
    *(f"quality-{form}-{which}" for form in FORMS for which in ("all", "paired")),
    "runtime",
    *(f"{name}-{form}" for name in ("depth", "share", "epsilon", "samples") for form in FORMS),
]


@pytest.fixture
def beyond(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The study of tables beyond the paper."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "studies"))
    import beyond_paper

    yield beyond_paper
    sys.modules.pop("beyond_paper", None)


def load_shapes(source: DataOptions, device: str, classes: tuple) -> list:
    seed = {"coco:train": 0, "coco:test": 31, "coco:noisy": 31}[source.data]
    seed += 1000 * (source.split == "val")
    noise = 0.4 if source.data == "coco:noisy" else 0.1
    return list(shapes.frames(count=source.count, seed=seed, noise=noise))


@pytest.fixture
def on_shapes(monkeypatch, tiny) -> None:
    monkeypatch.setattr(workspace_module, "load_detector", lambda word, device: tiny)
    monkeypatch.setattr(workspace_module, "load_frames", load_shapes)


@pytest.fixture
def untrained(monkeypatch) -> None:
    monkeypatch.setattr(
        workspace_module, "load_detector", lambda word, device: TinyCenter(threshold=0.05, most=3)
    )
    monkeypatch.setattr(workspace_module, "load_frames", load_shapes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny) -> Path:
    """A finished reproduction that was interrupted once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace_module, "load_detector", lambda word, device: tiny)
        patch.setattr(workspace_module, "load_frames", load_shapes)
        patch.setattr(network, "EPOCHS", 2)  # what an error model is worth is tested elsewhere
        out = tmp_path_factory.mktemp("reproduction")
        _cut_off_after(out, 9)
        before = {path: path.stat().st_mtime_ns for path in (out / "predictions").iterdir()}
        _quietly(out)
        assert 0 < len(before) < len(list((out / "predictions").iterdir()))
        assert all(path.stat().st_mtime_ns == when for path, when in before.items()), "made twice"
        return out


def _cut_off_after(out: Path, count: int) -> None:
    class Killed(Exception):
        pass

    made = []

    def started(what: str):
        def progress(done: int, total: int | None) -> None:
            made.append(what)
            if len(set(made)) > count:
                raise Killed

        return progress

    with pytest.raises(Killed):
        _quietly(out, started)


def _quietly(out: Path, *started: Start) -> None:
    """Without the warnings about the paper's finite differences."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoxcovWarning)
        reproduce(Workspace(out, SETTING, *started))


@pytest.mark.usefixtures("untrained")
def test_finished_runs_are_not_repeated(tmp_path) -> None:
    made = []
    for _ in range(2):
        workspace = Workspace(tmp_path, SETTING, lambda what: lambda *_: made.append(what))
        workspace.detections(Run("mci"))
    assert made == ["mci-k10-test"] * SETTING.test_count


@pytest.mark.usefixtures("untrained")
def test_interrupted_fit_resumes_and_leaves_nothing(tmp_path) -> None:
    class Cut(Exception):
        pass

    done = []

    def started(what: str):
        def progress(number: int, total: int | None) -> None:
            done.append(number)
            if len(done) == 3:
                raise Cut

        return progress

    Workspace(tmp_path / "whole", SETTING).posterior()
    out = tmp_path / "cut"
    with pytest.raises(Cut):
        Workspace(out, SETTING, started).posterior()
    assert [path.name for path in (out / "posteriors").iterdir()] == ["1.safetensors.checkpoint"]
    (out / "posteriors" / ".1.safetensors.abcd_123").write_text("half")
    Workspace(out, SETTING, started).posterior()
    assert done == [1, 2, 3, 4]
    assert [path.name for path in (out / "posteriors").iterdir()] == ["1.safetensors"]
    assert (out / "posteriors" / "1.safetensors").read_bytes() == (
        tmp_path / "whole" / "posteriors" / "1.safetensors"
    ).read_bytes()


def test_every_table_has_finite_numbers(folder) -> None:
    assert sorted(path.stem for path in (folder / "tables").glob("*.json")) == sorted(TABLES)
    for name in TABLES:
        table = json.loads((folder / "tables" / f"{name}.json").read_text())
        assert table["rows"], name
        for row in table["rows"]:
            assert all(isfinite(value) for value in row.values() if isinstance(value, float)), (
                name,
                row,
            )
            if name.endswith("-all") or name == "runtime":
                ours = {key: value for key, value in row.items() if not key.endswith("paper")}
                assert None not in ours.values(), (name, row)


def test_text_report_and_figures_are_written(folder) -> None:
    text = (folder / "reproduction.md").read_text()
    assert all(
        json.loads((folder / "tables" / f"{name}.json").read_text())["title"] in text
        for name in TABLES
    )
    assert (folder / "report.html").stat().st_size > 10_000
    assert {"curves.png", "calibration.png"} <= {
        path.name for path in (folder / "figures").iterdir()
    }


@pytest.mark.usefixtures("on_shapes")
def test_tables_come_from_the_files(folder) -> None:
    workspace = Workspace(folder, SETTING)
    path = workspace.path(paper_mcglm("prior"))
    before, content = quality(workspace, "prior")[0], path.read_bytes()
    found = Detections.load(path)
    try:
        torch.manual_seed(0)
        replace(found, covariance=found.covariance[torch.randperm(len(found))]).save(path)
        after = quality(workspace, "prior")[0]
    finally:
        path.write_bytes(content)
    changed = {row["method"] for row, other in zip(before.rows, after.rows) if row != other}
    assert changed == {"MC-GLM"}


@pytest.mark.usefixtures("on_shapes")
def test_risk_is_in_the_quality_tables(folder) -> None:
    workspace = Workspace(folder, SETTING)
    exact, calibrated = (
        workspace.detections(Run("exact", "prior", calibrated=which)) for which in (False, True)
    )
    assert torch.equal(exact.boxes, calibrated.boxes)
    assert calibrated.meta["error_model"]["estimator"] == "exact"
    table = quality(workspace, "prior")[0]
    rows = {(row["method"], row["error"]): row for row in table.rows}
    risk = match_detections(calibrated, workspace.truth("test"), SETTING.threshold)
    expected = measure(risk.with_uncertainty(risk.risk))["IoU"]
    assert rows["risk", "IoU"]["AvU"] == pytest.approx(expected["AvU"]["value"])
    assert rows["risk", "IoU"]["AUROC"] == pytest.approx(expected["AUROC"]["value"])


@pytest.mark.usefixtures("on_shapes")
def test_glm_and_exact_agree(folder) -> None:
    note = quality(Workspace(folder, SETTING), "prior")[0].notes[1]
    boxes = len(Detections.load(Workspace(folder, SETTING).path(Run("glm", "prior"))))
    assert boxes == SETTING.slow
    assert f"on the {boxes} boxes" in note
    assert float(note.split("agrees to ")[1].split()[0]) < 1e-3


@pytest.mark.usefixtures("on_shapes")
def test_runtime_without_boxes_in_the_first_frame(folder) -> None:
    workspace = Workspace(folder, SETTING)
    path = workspace.path(Run("glm", "paper"))
    content = path.read_bytes()
    try:
        Detections.load(path)[[]].save(path)
        rows = {row["method"]: row for row in runtime(workspace).rows}
    finally:
        path.write_bytes(content)
    assert isnan(rows["GLM"]["ms"])
    assert isfinite(rows["exact"]["ms"])


@pytest.mark.usefixtures("on_shapes")
def test_another_setting_is_refused(folder) -> None:
    with pytest.raises(
        BoxcovError,
        match=r"with other options \(test_count was 6, now 7\): choose another folder",
    ):
        Workspace(folder, replace(SETTING, test_count=7))


def test_setting_without_results_is_replaced(tmp_path) -> None:
    """A mistyped option must not block the folder."""
    Workspace(tmp_path, replace(SETTING, test_count=7))
    Workspace(tmp_path, SETTING)
    (tmp_path / "posteriors" / "1.safetensors.checkpoint").touch()
    with pytest.raises(BoxcovError, match="made with other options"):
        Workspace(tmp_path, replace(SETTING, test_count=7))


@pytest.mark.usefixtures("on_shapes")
def test_posterior_of_each_run(folder, tiny) -> None:
    whole = Workspace(folder, SETTING).posterior()
    sizes = [
        len(restrict_posterior(whole, Run("mcglm", "prior", depth), tiny).blocks)
        for depth in ("head", "neck", "backbone")
    ]
    assert sizes[0] < sizes[1] < sizes[2] == len(whole.blocks)
    alone = restrict_posterior(whole, Run("mcglm", "paper", "neck", alone=True), tiny)
    assert {part_of(name, tiny) for name in alone.blocks} == {"neck"}
    assert alone.form == "paper"
    counted = restrict_posterior(whole, Run("exact", "prior", share=0.1, counted=True), tiny)
    assert counted.n_data == pytest.approx(0.1 * SETTING.n_data)


def test_markdown_of_a_table_aligns_numbers() -> None:
    table = Table("t", "A table", [{"method": "GLM", "ms": 10636.0}])
    lines = ["**A table**", "", "| method | ms |", "| --- | ---: |", "| GLM | 10636 |"]
    assert table.markdown() == "\n".join(lines)


def test_cells_of_a_table_are_rounded() -> None:
    values = (0.4, 12.34, 10636.2, 3, None, "H", 3.2e9)
    rows = [{str(i): value for i, value in enumerate(values)}]
    cells = Table("t", "", rows).markdown().splitlines()[-1]
    assert cells == "| 0.40 | 12.3 | 10636 | 3 |  | H | 3.2e+09 |"


@pytest.mark.usefixtures("on_shapes")
def test_tables_beyond_the_paper_have_finite_numbers(folder, beyond) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoxcovWarning)
        tables = beyond.analyse(Workspace(folder, SETTING), ["coco:noisy"])
    assert [table.name for table in tables] == ["chance-paper", "why", "data", "shift"]
    text = (folder / "beyond.md").read_text()
    for table in tables:
        numbers = [value for row in table.rows for value in row.values()]
        assert all(isfinite(value) for value in numbers if isinstance(value, float))
        assert table.title in text


def test_noise_of_ten_samples_is_that_of_a_wishart_matrix(beyond) -> None:
    zeros = np.zeros(5000)
    arrays = (zeros[:, None], zeros, zeros, zeros, zeros, zeros[:, None], zeros, zeros)
    records = Records(("x",), ("car",), *arrays, covariance=np.full((5000, 1, 1), 4.0))
    traces = beyond.noisy_trace(records, 10, np.random.default_rng(0))
    assert abs(traces.mean() - 4) < 0.1
    assert abs(traces.std() - 4 * (2 / 9) ** 0.5) < 0.1


@pytest.mark.parametrize("seed", range(20))
def test_shares_equal_those_of_the_partition(seed, beyond) -> None:
    counts = Partition(*(int(n) for n in np.random.default_rng(seed).integers(1, 1000, 4)))
    metrics = counts.metrics()
    found = beyond.shares(metrics["AvU"], metrics["P(A|C)"], metrics["P(U|I)"])
    assert pytest.approx((metrics["P(U)"], metrics["P(A)"])) == (found.P_U, found.P_A)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_after_rounding(seed, beyond) -> None:
    rng = np.random.default_rng(seed)
    counts = Partition(*(int(n) for n in rng.integers(100, 1000, 4)))
    metrics = counts.metrics()
    low, high = beyond.bounds(*(round(metrics[name], 2) for name in ("AvU", "P(A|C)", "P(U|I)")))
    assert low.P_U - 1e-3 <= metrics["P(U)"] <= high.P_U + 1e-3
    assert low.P_A - 1e-3 <= metrics["P(A)"] <= high.P_A + 1e-3
