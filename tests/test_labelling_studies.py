"""The choices and the tables of the studies on labelling, on made-up numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="scipy is not installed")


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "studies"))
    import active_learning
    import active_learning_tables

    yield active_learning, active_learning_tables
    for name in ("active_learning", "active_learning_tables"):
        sys.modules.pop(name, None)


def test_coreset_takes_the_farthest_from_all_known(studies: Any) -> None:
    x = np.array([[0.1], [9.0], [10.0], [5.0]])
    assert studies[0].coreset(x, np.array([[0.0]]), 3) == [2, 3, 1]


def test_first_table_needs_the_first_jobs_only(studies: Any) -> None:
    study, tables = studies
    s = study.Settings()
    every = study.jobs(s)
    assert len(every) == len(set(every)) == 3 * (6 * 3 + 2 + 4 * 3)
    results = {job: result_of(job) for job in every[: 6 * 9]}
    found = tables.tables_of(s, results)
    assert len(found["labelling-active"]["rows"]) == len(study.METHODS)
    assert found["labelling-aggregate"]["rows"] == []


def test_gain_is_the_mean_of_paired_differences(studies: Any) -> None:
    study, tables = studies
    s = study.Settings()
    results = {job: result_of(job) for job in study.jobs(s)}
    rows = {row[0]: row for row in tables.tables_of(s, results)["labelling-active"]["rows"]}
    assert rows["random"][1:5] == ["0.250", "0.300", "0.400", None]
    assert rows["risk, sum"][4] == "+0.010 [+0.010, +0.010]"
    assert rows["risk, sum"][5:8] == ["60", "110", "210"]


def result_of(job: Any) -> dict[str, Any]:
    """AP of 0.2, 0.001 more per frame, 0.1 more per seed, and 0.01 more by any method."""
    AP = 0.1 + 0.1 * job.seed + 0.001 * job.budget + 0.01 * (job.method != "random")
    picked = {"clear": job.budget, "rain": 0}
    return {"AP": AP, "AP clear": AP, "AP others": AP, "picked": picked, "objects": 9}


def test_line_that_was_cut_off_is_run_again(studies: Any, tmp_path: Path) -> None:
    study = studies[0]
    job = study.Job(0, "random", "", 50)
    line = json.dumps({"job": vars(job), "AP": 0.5})
    (tmp_path / "results.jsonl").write_text(line + "\n" + line[:20])
    assert [one for one, _ in study.read_results(tmp_path)] == [job]


def test_sets_are_disjoint_and_mixed_as_the_pool(studies: Any) -> None:
    study = studies[0]
    s = study.Settings()
    names = [f"{kind}-{seed}" for seed in s.seeds for kind in ("start", "pool")] + ["test"]
    chunks = [chunk for name in names for chunk in study.chunks_of(name, s)]
    assert len({(seed, first) for _, _, seed, first, _ in chunks}) == len(chunks)
    shares = [np.array(counts) / sum(counts) for counts in (s.pool, s.test)]
    np.testing.assert_allclose(*shares, atol=0.01)
    assert sum(count for name, *_, count in chunks if name == "pool-0") == 1000
