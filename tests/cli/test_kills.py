from __future__ import annotations

from pathlib import Path

import pytest

from helpers.command_line import boxcov, small_network
from helpers.kills import (
    Killed,
    blocks_kept,
    but_for_time,
    frames_kept,
    reproduced,
    runs_kept,
    undated,
)

POSTERIOR = "posterior.safetensors"


def fitted(folder: Path, frames: int, *more: object) -> Killed:
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
    return Killed(folder / POSTERIOR, words, seed=0, kept=frames_kept)


def killed(run: Killed, kills: int) -> Killed:
    while run.kills < kills:
        run.kill()
    run.finish()
    return run


def told(run: Killed, capsys) -> None:
    with capsys.disabled():
        print(
            f"\n{run.words[3]}: {run.kills} kills, {run.finished} runs brought to an end; kept at a kill: {sorted(run.counted.items())}"
        )


def test_a_few_kills_lose_nothing(tmp_path) -> None:
    """Of both passes, with a process that reads ahead."""
    killed(fitted(tmp_path, 6, "--ekfac", "--workers", 1), kills=3)


@pytest.mark.slow
def test_fifty_kills_lose_nothing(tmp_path, capsys) -> None:
    """At random moments of its start, its frames, its writing and its end; the posterior has the bytes of the run that was let alone."""
    run = killed(fitted(tmp_path, 40), kills=50)
    told(run, capsys)
    assert len(run.counted) > 5  # not all at the same place


@pytest.mark.slow
def test_kills_in_both_passes(tmp_path, capsys) -> None:
    run = killed(fitted(tmp_path, 20, "--ekfac"), kills=20)
    told(run, capsys)
    assert max(run.counted) > 20  # in the second one, too


@pytest.mark.slow
def test_kills_of_predict_and_evaluate(tmp_path, capsys) -> None:
    word, posterior = small_network(tmp_path), tmp_path / "p.safetensors"
    assert (
        boxcov(
            "fit",
            "--detector",
            word,
            "--out",
            posterior,
            "--count",
            4,
            "--sweeps",
            1,
            "--fisher",
            "mc",
        ).code
        == 0
    )
    words = ["predict", "--detector", word, "--posterior", posterior, "--count", 80, "--sweeps", 1]
    run = killed(Killed(tmp_path / "d.safetensors", words, 0, but_for_time, blocks_kept), kills=10)
    told(run, capsys)
    assert len(run.counted) > 2
    assert boxcov(*words, "--out", tmp_path / "d.safetensors").code == 0
    words = ["evaluate", tmp_path / "d.safetensors", "--replicates", 20]
    run = killed(Killed(tmp_path / "page.html", words, 0, undated, blocks_kept), kills=10)
    told(run, capsys)
    assert len(run.counted) > 1


@pytest.mark.slow
def test_kills_of_reproduce(tmp_path, capsys) -> None:
    """Fits, runs, tables, figures and page; it goes on by itself, and every file is that of the run that was let alone, but for the milliseconds."""
    words = [
        "reproduce",
        "--detector",
        small_network(tmp_path),
        "--count",
        4,
        "--test-count",
        2,
        "--shift",
        "simulated:rain",
        "--shift-count",
        1,
    ]
    run = killed(
        Killed(
            tmp_path / "reproduction", [*words, "--sweeps", 1], 0, reproduced, runs_kept, resume=()
        ),
        kills=15,
    )
    told(run, capsys)
    assert len(run.counted) > 5
