from __future__ import annotations

import pytest

from command_line import small_network
from kills import Killed


def killed(folder, kills: int, frames: int) -> Killed:
    run = Killed(folder, ["--detector", small_network(folder), "--count", frames, "--sweeps", 1, "--fisher", "mc"], seed=0)
    while run.kills < kills:
        run.kill()
    run.finish()
    assert [path.name for path in folder.iterdir()] == ["net0.safetensors"]  # nothing half written is left
    return run


def test_a_few_kills_lose_nothing(tmp_path) -> None:
    killed(tmp_path, kills=3, frames=12)


@pytest.mark.slow
def test_fifty_kills_lose_nothing(tmp_path, capsys) -> None:
    """At random moments of its start, its frames, its writing and its end; the posterior has the bytes of the run that was let alone."""
    run = killed(tmp_path, kills=50, frames=40)
    with capsys.disabled():
        print(f"\n{run.kills} kills, {run.finished} runs brought to an end; frames kept at a kill: {sorted(run.counted.items())}")
    assert len(run.counted) > 5  # not all at the same place
