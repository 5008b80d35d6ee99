from __future__ import annotations

from pathlib import Path

import pytest

from helpers.command_line import small_network, succeed
from helpers.kills import (
    Killed,
    LiveKilled,
    blocks_kept,
    but_for_time,
    frames_kept,
    reproduced,
    runs_kept,
    undated,
)

pytestmark = pytest.mark.usefixtures("one_thread")
POSTERIOR = "posterior.safetensors"


def fitted(folder: Path, frames: int, *more: object, kind: type[Killed] = Killed) -> Killed:
    words = [
        "fit",
        "--detector",
        small_network(folder),
        "--count",
        frames,
        "--sweeps",
        1,
        "--fisher",
        "mc",
        "--checkpoint-every",
        0,
        *more,
    ]
    return kind(folder / POSTERIOR, words, seed=0, kept=frames_kept)


def predicted(folder: Path, frames: int, kind: type[Killed] = Killed) -> Killed:
    word, posterior = small_network(folder), folder / "p.safetensors"
    fit = f"fit --detector {word} --out {posterior} --count 4 --sweeps 1 --fisher mc"
    succeed(fit)
    words = ["predict", "--detector", word, "--posterior", posterior, "--sweeps", 1]
    out = folder / "d.safetensors"
    return kind(out, [*words, "--count", frames], 0, but_for_time, blocks_kept)


def assert_nothing_lost(run: Killed, kills: int, moments: int = 1) -> Killed:
    """Kill until ``moments`` different amounts were stored at a kill; a busy machine needs more."""
    while run.kills < kills or (run.kills < 5 * kills and len(run.counted) < moments):
        run.kill()
    run.finish()
    assert len(run.counted) >= moments
    return run


def record(run: Killed, record_property) -> None:
    """Write what happened into the report of the tests (make test-slow)."""
    stored = f"stored at a kill: {sorted(run.counted.items())}"
    record_property(run.words[3], f"{run.kills} kills, {run.finished} finished runs; {stored}")


@pytest.fixture
def no_processes(monkeypatch) -> None:
    """Runs that are not killed stay in this process: torch's import takes seconds."""
    monkeypatch.setattr(Killed, "own_processes", False)


def test_a_few_kills_lose_nothing(tmp_path, no_processes) -> None:
    """In both passes, with a worker process."""
    assert_nothing_lost(fitted(tmp_path, 6, "--ekfac", "--workers", 1), kills=2)


@pytest.mark.slow
def test_fifty_kills_lose_nothing(tmp_path, record_property) -> None:
    """Kills at random moments; the posterior has the bytes of an uninterrupted run."""
    record(assert_nothing_lost(fitted(tmp_path, 40), kills=50, moments=6), record_property)


@pytest.mark.slow
def test_kills_in_both_passes(tmp_path, record_property) -> None:
    run = assert_nothing_lost(fitted(tmp_path, 20, "--ekfac"), kills=20)
    record(run, record_property)
    assert max(run.counted) > 20  # also in the second pass


def test_kills_of_live_checkpoints_and_blocks(tmp_path, no_processes) -> None:
    for name, start in (("fit", fitted), ("predict", predicted)):
        (tmp_path / name).mkdir()
        run = start(tmp_path / name, 24, kind=LiveKilled)
        while run.kills < 2 or (run.kills < 20 and not max(run.counted)):
            run.kill()  # a busy machine may be killed at its first file more than once
        run.finish()
        assert max(run.counted) > 0  # something was stored at a kill


@pytest.mark.slow
@pytest.mark.parametrize("start", [fitted, predicted])
def test_fifty_kills_of_live_files(tmp_path, record_property, start) -> None:
    """Every kill hits a checkpoint, or a block of predictions, that is being written."""
    run = assert_nothing_lost(start(tmp_path, 160, kind=LiveKilled), kills=50, moments=4)
    record(run, record_property)


@pytest.mark.slow
def test_kills_of_train(tmp_path, record_property) -> None:
    words = ["train", "--config", "small", "--count", 2, "--steps", 6, "--batch", 1, "--sweeps", 1]
    run = Killed(tmp_path / "net.safetensors", [*words, "--test-count", 1], 0)
    record(assert_nothing_lost(run, kills=5), record_property)


@pytest.mark.slow
def test_kills_of_export(tmp_path, record_property) -> None:
    pytest.importorskip("onnxscript")
    word, posterior = small_network(tmp_path), tmp_path / "p.safetensors"
    succeed(f"fit --detector {word} --out {posterior} --count 4 --sweeps 1 --fisher mc")
    (tmp_path / "onnx").mkdir()
    words = ["export", "--detector", word, "--posterior", posterior, "--samples", 2, "--boxes", 9]
    run = Killed(tmp_path / "onnx/net.onnx", words, 0, resume=("--force",))
    record(assert_nothing_lost(run, kills=5), record_property)


@pytest.mark.slow
def test_kills_of_demo(tmp_path, record_property) -> None:
    """It starts again after a kill; every file but the times equals an uninterrupted run."""
    run = Killed(tmp_path / "demo", ["demo"], 0, reproduced, runs_kept, resume=())
    record(assert_nothing_lost(run, kills=3), record_property)


@pytest.mark.slow
def test_kills_of_predict_and_evaluate(tmp_path, record_property) -> None:
    run = assert_nothing_lost(predicted(tmp_path, 80), kills=10, moments=3)
    record(run, record_property)
    succeed(*run.words[3:])
    words = ["evaluate", tmp_path / "d.safetensors", "--replicates", 20]
    run = Killed(tmp_path / "page.html", words, 0, undated, blocks_kept)
    record(assert_nothing_lost(run, kills=10, moments=2), record_property)


@pytest.mark.slow
def test_kills_of_reproduce(tmp_path, record_property) -> None:
    """It resumes without an option; every file but the times equals an uninterrupted run."""
    words = [
        "reproduce",
        "--quick",  # without an error model, which needs a trained network
        "--detector",
        small_network(tmp_path),
        "--count",
        4,
        "--test-count",
        2,
    ]
    run = assert_nothing_lost(
        Killed(
            tmp_path / "reproduction", [*words, "--sweeps", 1], 0, reproduced, runs_kept, resume=()
        ),
        kills=15,
        moments=6,
    )
    record(run, record_property)
