"""Checkpoints on full, read-only and missing disks, and damaged checkpoints."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest
import torch

from boxcov import BoxcovError, BoxcovWarning, Checkpoint, FitOptions, fit
from boxcov.detectors.tiny import TinyCenter
from helpers.cut_offs import FRAMES, CutOff, about, bytes_of, cut, edit

# disks


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path, monkeypatch) -> None:
    real, calls = os.fsync, []

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 4:  # two files and two folders
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(
        BoxcovError,
        match=r"c: cannot be written \(No space left on device\): the file holds 2 earlier items",
    ):
        fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", every_seconds=0))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["c"]
    assert about(tmp_path / "c")["next"] == 2
    resumed = fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", resume=True))
    assert bytes_of(resumed, tmp_path) == bytes_of(fit(TinyCenter(), FRAMES), tmp_path)


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 128 KiB; skipped where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.name != "posix"
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k", "none", folder], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full(tiny_disk) -> None:
    with pytest.raises(
        BoxcovError,
        match=r"No space left on device.*the file holds 0 earlier items; free some space",
    ):
        fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tiny_disk / "c", every_seconds=0))
    assert os.listdir(tiny_disk) == []


def test_missing_and_read_only_folders_fail_before_the_work(tmp_path, monkeypatch) -> None:
    frames = CutOff(FRAMES, -1)
    with pytest.raises(
        BoxcovError, match=r"absent/c: cannot be written \(No such file or directory\)"
    ):
        fit(TinyCenter(), frames, checkpoint=Checkpoint(tmp_path / "absent" / "c"))

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(BoxcovError, match=r"c: cannot be written \(Read-only file system\)"):
        fit(TinyCenter(), frames, checkpoint=Checkpoint(tmp_path / "c"))
    assert frames.read == []


def test_a_folder_that_vanishes(tmp_path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with pytest.raises(
        BoxcovError, match=r"gone/c: cannot be written \(No such file or directory\)"
    ):
        fit(
            TinyCenter(),
            FRAMES,
            checkpoint=Checkpoint(folder / "c", every_seconds=0),
            progress=lambda done, total: (folder / "c").unlink() or folder.rmdir(),
        )


def test_partial_files_of_a_killed_run_are_removed(tmp_path) -> None:
    (tmp_path / ".c.abcdefgh").write_bytes(b"half")
    (tmp_path / ".c.something else").write_bytes(b"not ours")
    fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c"))
    assert sorted(os.listdir(tmp_path)) == [".c.something else", "c"]


# damage


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda told, tensors: told.update(format=9), "in format 9, this version reads 1"),
        (
            lambda told, tensors: told.pop("next"),
            "not a checkpoint of a fit, or a damaged one .*remove it to start again",
        ),
        (lambda told, tensors: told.update(frames=-1), "or a damaged"),
        (lambda told, tensors: told.update(frames=0), "sums of no frame"),
        (lambda told, tensors: told.update(loss=float("nan")), "or a damaged"),
        (
            lambda told, tensors: tensors["0.Q"].fill_(float("nan")),
            "0.Q holds a NaN or an infinity",
        ),
        (
            lambda told, tensors: tensors.update({"0.Q": tensors["0.Q"].float()}),
            "expected .*, F64",
        ),
        (
            lambda told, tensors: tensors.update({"0.H": torch.zeros(1, 2, 2).double()}),
            r"0\.H has shape \[1, 2, 2\]",
        ),
        (lambda told, tensors: told["layers"].pop(), "cannot be in a posterior"),
        (
            lambda told, tensors: told["layers"][0]["geometry"].update(groups=0),
            "invalid layer: shape",
        ),
        (
            lambda told, tensors: told["layers"][0].update(weight="other.weight"),
            "the detector has no parameter other.weight",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, change, message) -> None:
    cut(tmp_path / "c")
    edit(tmp_path / "c", change)
    with pytest.raises(BoxcovError, match=message) as caught:
        fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", resume=True))
    assert str(tmp_path / "c") in str(caught.value)


def test_a_second_pass_of_no_frame_is_refused_by_name(tmp_path) -> None:
    fit(
        TinyCenter(),
        FRAMES,
        options=FitOptions(ekfac=True),
        checkpoint=Checkpoint(tmp_path / "c", every_seconds=0),
    )
    edit(tmp_path / "c.second", lambda told, tensors: told.update(frames=0))
    with pytest.raises(
        BoxcovError,
        match=r"c\.second: not a checkpoint of a fit, or a damaged one \(ValueError: sums of",
    ):
        fit(
            TinyCenter(),
            FRAMES,
            options=FitOptions(ekfac=True),
            checkpoint=Checkpoint(tmp_path / "c", resume=True),
        )


def test_frames_skipped_before_the_cut_stay_skipped(tmp_path) -> None:
    frames = list(FRAMES)
    frames[1] = (torch.full_like(frames[1][0], float("nan")), frames[1][1])
    with pytest.warns(BoxcovWarning, match="item 1 holds 4096 NaN"):
        cut(tmp_path / "c", frames=frames, options=FitOptions(nonfinite="skip"))
    resumed = fit(
        TinyCenter(),
        frames,
        options=FitOptions(nonfinite="skip"),
        checkpoint=Checkpoint(tmp_path / "c", resume=True),
    )
    assert (resumed.frames, resumed.skipped, resumed.n_data) == (6, 1, 7)
