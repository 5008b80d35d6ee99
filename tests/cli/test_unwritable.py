"""Outputs that cannot be written: one clear line before the work, and nothing left behind."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from boxcov import BoxcovError
from boxcov.pipeline import stream as streaming
from helpers.command_line import boxcov

# a command that starts to work reports this missing file instead
NOWHERE = ("--detector", "centerpoint:absent.safetensors")
VERBS = {
    "fit": ("fit", *NOWHERE),
    "predict": ("predict", "--method", "nms", *NOWHERE),
    "predict to a folder": ("predict", "--method", "nms", "--format", "kitti", *NOWHERE),
    "evaluate": ("evaluate", "absent.safetensors"),
    "convert": ("convert", "absent.safetensors", "--format", "csv"),
    "calibrate": ("calibrate", "--posterior", __file__, *NOWHERE),
    "export": ("export", "--posterior", __file__, *NOWHERE),
    "train": ("train", "--start-from", "absent.safetensors"),
    "reproduce": ("reproduce", *NOWHERE),
    "demo": ("demo",),
}


def told_before_the_work(verb: str, out: Path, reason: str) -> None:
    done = boxcov(*VERBS[verb], f"--out {out}")
    assert done.code == 1
    *before, line = done.err.splitlines()
    assert not before
    assert line.startswith(f"boxcov: {out}")
    assert f"cannot be written ({reason})" in line


@pytest.mark.parametrize("verb", VERBS)
def test_read_only_folder(tmp_path, verb, monkeypatch) -> None:
    """As for every user but root."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    told_before_the_work(verb, tmp_path / "out", "Read-only file system")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def read_only_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    if (
        os.name != "posix"
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro", "none", folder], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("verb", VERBS)
def test_read_only_disk(read_only_disk, verb) -> None:
    told_before_the_work(verb, read_only_disk / "out", "Read-only file system")


def test_existing_read_only_result_folder(read_only_disk) -> None:
    told_before_the_work("predict to a folder", read_only_disk, "Read-only file system")


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if verb not in ("predict to a folder", "reproduce", "demo")]
)
def test_folder_instead_of_a_file(tmp_path, verb) -> None:
    done = boxcov(*VERBS[verb], f"--out {tmp_path}")
    assert (done.code, done.err) == (
        1,
        f"boxcov: {tmp_path}: is a folder; give the name of a file\n",
    )


@pytest.mark.parametrize("verb", ["predict to a folder", "reproduce", "demo"])
def test_file_instead_of_a_folder(tmp_path, verb) -> None:
    (tmp_path / "out").write_text("mine")
    done = boxcov(*VERBS[verb], f"--out {tmp_path / 'out'}")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert f"{tmp_path / 'out'}" in done.err
    assert (tmp_path / "out").read_text() == "mine"


# a stream writes to stdout


class Full(io.StringIO):
    """A disk with space for one line."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.lines, self.file = 0, (folder / "stdout").open("w")

    def flush(self) -> None:
        self.lines += 1
        if self.lines > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    def fileno(self) -> int:
        return self.file.fileno()


def test_stream_to_a_full_disk_ends_with_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        streaming, "predict_line", lambda model, reader, path: {"frame": str(path), "ms": 1.0}
    )
    out, seen, paths = Full(tmp_path), streaming.Latencies(0), iter(map(Path, "abc"))
    with pytest.raises(
        BoxcovError,
        match=r"^the line of frame 2 cannot be written to stdout \(No space left on device\)",
    ):
        streaming.write_lines(None, None, paths, out, seen)
    assert json.loads(out.getvalue().splitlines()[0]) == {"frame": "a", "ms": 1.0}
    assert next(paths) == Path("c")  # the stream stopped at the error
    out.file.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_stream_to_a_full_device(tmp_path) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    words = [sys.executable, "-m", "boxcov", "stream", str(tmp_path), "--method", "nms"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "boxcov: the line of frame 1 cannot be written to stdout (No space left"
    )
    assert "Traceback" not in done.stderr
