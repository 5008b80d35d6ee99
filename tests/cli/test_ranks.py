"""predict and evaluate over several processes write the files of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from boxcov import BoxcovError, Detections
from boxcov.pipeline import predict as prediction
from boxcov.pipeline.frames import silent
from boxcov.pipeline.options import DataOptions, EstimatorOptions, PredictCommand
from helpers.command_line import boxcov, small_posterior, succeed
from helpers.forked import forked
from helpers.kills import undated

pytestmark = pytest.mark.usefixtures("one_thread")
RAIN = DataOptions("simulated:rain", "val", 7, 0, 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> PredictCommand:
    """Options of a run; each test sets the output."""
    folder = tmp_path_factory.mktemp("net")
    word, out = small_posterior(folder)
    return PredictCommand(
        out=folder / "d", detector=word, source=RAIN, estimator=EstimatorOptions("exact", out)
    )


@pytest.fixture(scope="module", autouse=True)
def no_time():
    """Only the times of two runs differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "seconds", lambda device: 0.0)
        yield


@pytest.fixture(scope="module")
def alone(made, tmp_path_factory) -> bytes:
    """The file that one process writes."""
    out = tmp_path_factory.mktemp("alone") / "d.safetensors"
    prediction.run(replace(made, out=out), block=2)
    return out.read_bytes()


@pytest.mark.parametrize("count", [3, 5])
def test_ranks_write_the_file_of_one_process(tmp_path, made, alone, count) -> None:
    """Four blocks: split unevenly, and over more ranks than blocks."""
    out = tmp_path / "d.safetensors"
    ended = forked(count, lambda rank: prediction.run(replace(made, out=out), block=2))
    assert [code for code, _ in ended] == [0] * count, ended
    # only rank 0 prints
    assert [said == "{}" for _, said in ended] == [False] + [True] * (count - 1)
    assert out.read_bytes() == alone
    assert [path.name for path in tmp_path.iterdir()] == ["d.safetensors"]


def test_killed_rank_ends_all_and_leaves_whole_blocks(tmp_path, made, alone) -> None:
    out = tmp_path / "d.safetensors"

    def die(done: int, total: int) -> None:
        if done == 7:  # the last frame, on rank 1
            os.kill(os.getpid(), signal.SIGKILL)

    ended = forked(
        2,
        lambda rank: prediction.run(replace(made, out=out), die if rank == 1 else silent, block=2),
    )
    assert ended[1][0] == -signal.SIGKILL
    assert ended[0][0] == 1
    assert ended[0][1].startswith(
        "BoxcovError: rank 0 of 2: another rank has died or cannot be reached ("
    )
    assert not out.exists()
    parts = tmp_path / "d.safetensors.parts"
    assert sorted(path.name for path in parts.iterdir()) == [
        f"0000000{start}.safetensors" for start in (0, 2, 4)
    ]
    assert sum(map(len, map(Detections.load, parts.iterdir()))) > 0
    refused = forked(2, lambda rank: prediction.run(replace(made, out=out), block=2))
    assert "blocks of an interrupted run" in refused[0][1]
    # any number of ranks can resume
    ended = forked(3, lambda rank: prediction.run(replace(made, out=out, resume=True), block=2))
    assert [code for code, _ in ended] == [0] * 3
    assert out.read_bytes() == alone


def test_errors_name_their_rank(tmp_path, made) -> None:
    def fail(done: int, total: int) -> None:
        raise BoxcovError("a frame is damaged")

    ended = forked(
        2,
        lambda rank: prediction.run(
            replace(made, out=tmp_path / "d"), fail if rank == 1 else None, block=2
        ),
    )
    assert ended[1] == (1, "BoxcovError: rank 1 of 2: a frame is damaged")
    assert not (tmp_path / "d").exists()


def test_folder_that_is_not_shared_is_an_error(tmp_path, made) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    ended = forked(
        2, lambda rank: prediction.run(replace(made, out=tmp_path / str(rank) / "d"), block=2)
    )
    assert (
        "00000002.safetensors: is missing although a process wrote it: "
        "all processes must write to the same folder" in ended[0][1]
    )
    assert not (tmp_path / "0" / "d").exists()


@pytest.fixture(scope="module")
def saved(made, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "exact.safetensors"
    prediction.run(replace(made, out=out, source=DataOptions(count=20, split="test", sweeps=1)))
    return out


def evaluated(saved: Path, page: Path, *more: object):
    return boxcov(f"evaluate {saved} --json --replicates 20 --scenes 2 --out {page}", *more)


def test_evaluate_over_ranks_equals_one_process(tmp_path, saved) -> None:
    page = tmp_path / "page.html"
    one = evaluated(saved, page)
    assert one.code == 0, one.err
    bare = boxcov(f"evaluate {saved} --json --replicates 20").out.replace(
        '"out": null', f'"out": "{page}"'
    )
    assert bare == one.out  # in memory or in blocks
    whole = undated(page)
    for count, workers in ((2, 0), (3, 1)):  # two blocks
        page.unlink()
        ended = forked(
            count, lambda rank, workers=workers: evaluated(saved, page, "--workers", workers).out
        )
        assert [code for code, _ in ended] == [0] * count, ended
        assert ended[0][1] == one.out
        assert {said for _, said in ended[1:]} == {""}
        assert undated(page) == whole
        assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    ended = forked(2, lambda rank: boxcov(f"evaluate {saved} --json").err)
    assert "give --out FILE" in ended[0][1]


def test_interrupted_evaluate_resumes(tmp_path, saved, monkeypatch) -> None:
    from boxcov.pipeline import evaluate as evaluation

    page = tmp_path / "page.html"
    one = evaluated(saved, page)
    whole = undated(page)
    page.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "table", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert evaluated(saved, page).code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["page.html.parts"]
    assert "blocks of an interrupted run: continue it with --resume" in evaluated(saved, page).err
    (tmp_path / "page.html.parts" / "00000016.safetensors").unlink()
    assert evaluated(saved, page, "--resume").out == one.out
    assert undated(page) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    error = evaluated(saved, page, "--resume").err  # the report may be of other predictions
    assert f"{page}: exists: replace it with --force" in error


def test_workers_give_the_same_file(tmp_path, made, alone, monkeypatch) -> None:
    out = tmp_path / "d.safetensors"
    prediction.run(replace(made, out=out, workers=2), block=2)
    assert out.read_bytes() == alone
    out.unlink()
    from boxcov.data.simulated import Simulated

    whole = Simulated.__getitem__

    def deadly(self, number):
        return os.kill(os.getpid(), signal.SIGKILL) if number == 5 else whole(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Simulated, "__getitem__", deadly)
        done = boxcov(
            f"predict --detector {made.detector} --method nms --out {out} "
            "--count 7 --sweeps 1 --workers 1"
        )
    assert done.code == 1
    ended = "boxcov: a worker process ended before it loaded item"
    # item 4 may still have been on its way
    assert done.err.splitlines()[-1].startswith((f"{ended} 5", f"{ended} 4"))
    assert not out.exists()


@pytest.mark.slow
def test_torchrun(tmp_path, made, alone) -> None:
    """The commands themselves, and a rank that is killed from outside."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        "-m",
        "boxcov",
    ]
    words = [
        "predict",
        "--detector",
        made.detector,
        "--posterior",
        str(made.estimator.posterior),
        "--count",
        "40",
        "--sweeps",
        "1",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = tmp_path / "d.safetensors"
    done = subprocess.run(
        [*launch, *words, "--out", str(out)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    succeed(*words, f"--out {tmp_path / 'one'}")
    many, one = Detections.load(out), Detections.load(tmp_path / "one")
    assert (many.boxes == one.boxes).all()
    assert (many.covariance == one.covariance).all()
    page = subprocess.run(
        [*launch, "evaluate", str(out), "--out", str(tmp_path / "page.html")],
        capture_output=True,
        text=True,
        env=env,
    )
    assert page.returncode == 0, page.stderr
    assert page.stdout.count("report: ") == 1
    assert (tmp_path / "page.html").exists()
    long = subprocess.Popen(
        [*launch, *words, "--count", "40000", "--out", str(tmp_path / "long")],
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    parts = tmp_path / "long.parts"
    while len(list(parts.glob("*.safetensors"))) < 3:
        assert long.poll() is None
    ranks = _children(long.pid)
    assert len(ranks) == 3
    os.kill(ranks[1], signal.SIGKILL)
    _, err = long.communicate(timeout=120)
    assert long.returncode != 0
    assert f"exitcode  : -9 (pid: {ranks[1]})" in err  # the message of torchrun
    assert not (tmp_path / "long").exists()


def _children(parent: int) -> list[int]:
    return [
        int(pid)
        for task in Path(f"/proc/{parent}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
