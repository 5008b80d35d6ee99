"""The choices and the tables of the studies on labelling, on made-up numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import BoxcovError
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint.loss import encode, frame_losses
from boxcov.evaluate.average_precision import mean_precision
from boxcov.pipeline.train import measure_precision
from helpers.label_boxes import boxes_at, labels_of

pytest.importorskip("scipy", reason="scipy is not installed")


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "studies"))
    import active_learning
    import active_learning_tables
    import label_errors

    yield active_learning, active_learning_tables, label_errors
    for name in ("active_learning", "active_learning_tables", "label_errors", "label_baselines"):
        sys.modules.pop(name, None)


def test_coreset_takes_the_farthest_from_all_known(studies: Any) -> None:
    x = np.array([[0.1], [9.0], [10.0], [5.0]])
    assert studies[0].coreset(x, np.array([[0.0]]), 3) == [2, 3, 1]


def test_rows_need_the_runs_of_all_seeds(studies: Any) -> None:
    study, tables, _ = studies
    s = study.Settings()
    every = study.jobs(s)
    assert len(every) == len(set(every)) == 3 * (7 * 3 + 2)
    table = tables.tables_of(s, {job: result_of(job) for job in every})["labelling-active"]
    assert [row[0] for row in table["rows"]] == list(study.METHODS)
    assert table["notes"][-1] == "No further frame: AP 0.200; 400 random frames: 0.600."
    some = {job: result_of(job) for job in every if job != study.Job(1, "risk, sum", 100)}
    left = tables.tables_of(s, some)["labelling-active"]["rows"]
    assert [row[0] for row in left] == [name for name in study.METHODS if name != "risk, sum"]


def test_gain_is_the_mean_of_paired_differences(studies: Any) -> None:
    study, tables, _ = studies
    s = study.Settings()
    results = {job: result_of(job) for job in study.jobs(s)}
    rows = {row[0]: row for row in tables.tables_of(s, results)["labelling-active"]["rows"]}
    assert rows["random"][1:5] == ["0.250", "0.300", "0.400", None]
    assert rows["risk, sum"][4] == "+0.010 [+0.010, +0.010]"
    assert rows["risk, sum"][5] == "60, 110, 210"


def result_of(job: Any) -> dict[str, Any]:
    """AP of 0.2, 0.001 more per frame, 0.1 more per seed, and 0.01 more by any method."""
    AP = 0.1 + 0.1 * job.seed + 0.001 * job.budget + 0.01 * (job.method != "random")
    picked = {"clear": job.budget, "rain": 0}
    return {"AP": AP, "AP clear": AP, "AP others": AP, "picked": picked, "objects": 9}


def test_line_that_was_cut_off_is_run_again(studies: Any, tmp_path: Path) -> None:
    study = studies[0]
    job = study.Job(0, "random", 50)
    line = json.dumps({"job": vars(job), "AP": 0.5})
    (tmp_path / "results.jsonl").write_text(line + "\n" + line[:20])
    assert [one for one, _ in study.read_results(tmp_path)] == [job]
    again = study.Job(1, "random", 50)
    study.append_result(tmp_path, {"job": vars(again), "AP": 0.6})
    assert [one for one, _ in study.read_results(tmp_path)] == [job, again]


def test_a_lost_first_detector_is_named(studies: Any, tmp_path: Path) -> None:
    study = studies[0]
    (tmp_path / "pool-1.json").write_text("{}")
    place = study.Place(tmp_path, tmp_path, "cpu", study.Settings())
    with pytest.raises(BoxcovError, match=r"start-1\.safetensors: no such file, but pool-1\.json"):
        study.first_detector((place, 1))


def test_sets_are_disjoint_and_mixed_as_the_pool(studies: Any) -> None:
    study = studies[0]
    s = study.Settings()
    names = [f"{kind}-{seed}" for seed in s.seeds for kind in ("start", "pool")] + ["test"]
    chunks = [chunk for name in names for chunk in study.chunks_of(name, s)]
    assert len({(seed, first) for _, _, seed, first, _ in chunks}) == len(chunks)
    shares = [np.array(counts) / sum(counts) for counts in (s.pool, s.test)]
    np.testing.assert_allclose(*shares, atol=0.01)
    assert sum(count for name, *_, count in chunks if name == "pool-0") == 1000


def test_five_percent_of_labels_are_wrong(studies: Any) -> None:
    study = studies[2]
    right = [{"boxes": torch.ones(100, 9), "labels": torch.zeros(100).long()} for _ in range(2)]
    wrong = study.with_errors(right, seed=3, classes=10)
    kind = torch.cat([one["kind"] for one in wrong])
    boxes = torch.cat([one["boxes"] for one in wrong])
    labels = torch.cat([one["labels"] for one in wrong])
    assert [(kind == i).sum().item() for i in range(-1, 4)] == [190, 3, 3, 2, 2]
    moved = (boxes[:, :2] - 1).norm(dim=1)
    assert bool(((moved > 0.49) == (kind == 0)).all())
    assert bool(((boxes[:, 3] != 1) == (kind == 1)).all())
    assert bool(((labels != 0) == (kind == 3)).all())


def test_error_counts_once_among_the_first_k(studies: Any) -> None:
    kind = np.array([-1, 0, 1, -1, 2, 3])
    value, errors = np.array([5.0, 4.0, 3.0, 2.0, 1.0]), np.array([1, 1, -1, 4, 5])
    found = studies[2].found_at_k(value, errors, kind)
    assert found == {"precision": 0.5, "shift": 1.0, "resize": 0.0, "drop": 1.0, "relabel": 0.0}


def test_gain_over_a_baseline_is_paired_by_set(studies: Any) -> None:
    found = [
        {"score": {"precision": 0.2 + x}, "disagreement": {"precision": 0.7 + x}} for x in (0, 0.1)
    ]
    row = studies[2].precision_row(found, "score")
    assert row[1].startswith("0.25 [")
    assert row[2] == "+0.50 [+0.50, +0.50]"
    assert studies[2].precision_row(found, "disagreement")[2] is None


def test_baselines_on_labels_that_agree(studies: Any) -> None:
    """Two boxes with labels, and one without: the score and P(no object) tell them apart."""
    import label_baselines

    found = boxes_at([0.0, 10.0, 20.0])
    truth = labels_of(found[:2])
    rows, values = label_baselines.baselines(found, truth, np.array([0.5, 0.25]))
    assert rows.kind.tolist() == ["place", "place", "no label"]
    focal = -np.log(0.1) * 0.9**2
    np.testing.assert_allclose(values["1 - score"], [0.1, 0.1, 0.9], atol=1e-6)
    np.testing.assert_allclose(values["training loss"], [0.5, 0.25, focal], atol=1e-5)
    np.testing.assert_allclose(values["risk"], [0.0, 0.0, 2.0], atol=1e-6)
    np.testing.assert_allclose(values["residual"], [0.0, 0.0, 2.0], atol=1e-6)
    assert values["size alone"][0] == values["size alone"][1] < 0  # of the same size
    assert values["size alone"][2] == -np.inf


def test_loss_of_labels_sums_to_the_training_loss(studies: Any) -> None:
    """One object per task: the parts of the loss at objects, by the detector itself."""
    detector = centerpoint.load("small")
    (inputs, (target,)) = simulated.frames(seed=1000, count=1)[0]
    first = (target["labels"] == 0).nonzero()[:1, 0]
    one = {name: target[name][first] for name in ("boxes", "labels")}
    with torch.no_grad():
        raw = detector(inputs)
        rules = replace(detector.config.loss, normaliser="none")
        config = replace(detector.config, loss=rules)
        like = raw["tasks"][0]["heatmap"]
        whole = frame_losses(raw["tasks"], encode([one], config, like), config)
        heat = encode([one], config, like).heat
        p = torch.cat([maps["heatmap"] for maps in raw["tasks"]], 1).sigmoid()
        p = p.clamp(1e-4, 1 - 1e-4)
        away = (-(1 - p).log() * p**2 * (1 - heat) ** 4).sum()
    losses = studies[2].label_losses(detector, inputs, one)
    assert losses[0] == pytest.approx(float(whole - away), rel=1e-3)


def test_precision_of_parts_of_the_test_frames(studies: Any, tmp_path: Path) -> None:
    """All, clear and other frames, as by the detector's frames one by one."""
    study = studies[0]
    place = study.Place(tmp_path, tmp_path, "cpu", replace(study.QUICK, test=(2, 1, 0, 0)))
    for chunk in study.chunks_of("test", place.settings):
        study.make_chunk((place, *chunk))
    detector = centerpoint.load("small")
    tables = study.precision(detector, place)
    frames, scenarios = study.load_set(place, "test")
    assert scenarios == ["clear", "clear", "rain"]
    for name, kept in (("mixture", frames), ("clear", frames[:2]), ("others", frames[2:])):
        expected = mean_precision(measure_precision(detector, kept))
        assert mean_precision(tables[name]) == pytest.approx(expected, abs=0.005)
