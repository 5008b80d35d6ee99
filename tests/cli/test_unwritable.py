"""Outputs that cannot be written: one clear line before the work, and nothing left behind."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from boxcov import BoxcovError
from boxcov._files.output_file import hold
from boxcov.pipeline import stream as streaming
from helpers.command_line import boxcov, refuse

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


def assert_told_before_the_work(verb: str, out: Path, reason: str) -> None:
    error = refuse(*VERBS[verb], f"--out {out}")
    *before, line = error.splitlines()
    assert not before
    assert line.startswith(f"boxcov: {out}")
    assert f"cannot be written ({reason})" in line


@pytest.mark.parametrize("verb", VERBS)
def test_read_only_folder(tmp_path, verb, monkeypatch) -> None:
    """As for every user but root."""

    def fail(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    monkeypatch.setattr(os, "mkdir", fail)
    assert_told_before_the_work(verb, tmp_path / "out", "Read-only file system")
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
    assert_told_before_the_work(verb, read_only_disk / "out", "Read-only file system")


def test_existing_read_only_result_folder(read_only_disk) -> None:
    assert_told_before_the_work("predict to a folder", read_only_disk, "Read-only file system")


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if verb not in ("predict to a folder", "reproduce", "demo")]
)
def test_folder_instead_of_a_file(tmp_path, verb) -> None:
    done = boxcov(*VERBS[verb], f"--out {tmp_path}")
    assert (done.code, done.err) == (
        1,
        f"boxcov: {tmp_path}: is a folder; give the name of a file\n",
    )


@pytest.mark.parametrize(
    "verb", ["fit", "predict", "evaluate", "convert", "calibrate", "export", "train"]
)
def test_existing_files_stay_without_force(tmp_path, verb) -> None:
    (tmp_path / "out").write_text("mine")
    done = boxcov(*VERBS[verb], f"--out {tmp_path / 'out'}")
    told = f"boxcov: {tmp_path}/out: exists: replace it with --force, or give another name\n"
    assert (done.code, done.err) == (1, told)
    assert (tmp_path / "out").read_text() == "mine"


def test_reports_and_folders_stay_without_force(tmp_path) -> None:
    (tmp_path / "out.json").write_text("mine")
    done = boxcov(*VERBS["train"], f"--out {tmp_path / 'out.safetensors'}")
    assert f"{tmp_path}/out.json: exists: replace it with --force" in done.err
    done = boxcov(*VERBS["predict to a folder"], f"--out {tmp_path}")
    assert f"{tmp_path}: exists: replace it with --force" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("verb", ["predict to a folder", "reproduce", "demo"])
def test_file_instead_of_a_folder(tmp_path, verb) -> None:
    (tmp_path / "out").write_text("mine")
    error = refuse(*VERBS[verb], f"--out {tmp_path / 'out'}")
    assert error.count("\n") == 1
    assert f"{tmp_path / 'out'}" in error
    assert (tmp_path / "out").read_text() == "mine"


# what is not a regular file stays


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "device"])
@pytest.mark.parametrize("verb", ["fit", "predict", "evaluate", "convert", "export", "train"])
def test_special_outputs_are_refused(tmp_path, verb, kind) -> None:
    out = tmp_path / "out"
    (tmp_path / "target").write_text("mine")
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "device":
        out = Path("/dev/null")
    else:
        out.symlink_to(tmp_path / ("target" if kind == "link" else "absent"))
    before = os.lstat(out)
    done = boxcov(*VERBS[verb], f"--out {out}")
    word = {"pipe": "a pipe", "device": "a device"}.get(kind, "a symbolic link")
    assert done.code == 1
    assert f"boxcov: {out}: cannot be written ({word}, not a regular file): give" in done.err
    assert os.lstat(out).st_mode == before.st_mode
    assert (tmp_path / "target").read_text() == "mine"


def test_special_files_of_the_library_stay(tmp_path) -> None:
    from boxcov._files.output_file import atomic_write

    (tmp_path / "x").symlink_to(tmp_path / "absent")
    with pytest.raises(BoxcovError, match="a symbolic link, not a regular file"):
        atomic_write(tmp_path / "x").__enter__()
    assert (tmp_path / "x").is_symlink()


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "pipe"])
@pytest.mark.parametrize("resume", ["", "--resume"])
def test_blocks_are_kept_in_an_own_folder(tmp_path, kind, resume) -> None:
    """A link would have files of another folder replaced and deleted."""
    victim, parts = tmp_path / "victim", tmp_path / "out.parts"
    victim.mkdir()
    (victim / "00000000.safetensors").write_text("mine")
    if kind == "pipe":
        os.mkfifo(parts)
    elif kind == "file":
        parts.write_text("mine")
    else:
        parts.symlink_to(victim if kind == "link" else tmp_path / "absent")
    error = refuse(*VERBS["predict"], resume or "--count 1", f"--out {tmp_path / 'out'}")
    assert f"boxcov: {parts}: not a folder of blocks: remove it" in error
    assert (victim / "00000000.safetensors").read_text() == "mine"


def test_files_of_others_among_the_blocks_stay(tmp_path) -> None:
    from boxcov.pipeline.predict import block_store

    store = block_store(tmp_path / "out")
    store.folder.mkdir()
    for name in ("notes.txt", "mine.safetensors", "00000016.safetensors", ".00000000.x"):
        (store.folder / name).touch()
    store.remove()
    assert sorted(os.listdir(store.folder)) == ["mine.safetensors", "notes.txt"]


def test_the_report_of_a_training_is_checked_first(tmp_path) -> None:
    (tmp_path / "net.json").symlink_to(tmp_path / "absent")
    done = boxcov(*VERBS["train"], f"--out {tmp_path / 'net.safetensors'}")
    assert f"boxcov: {tmp_path / 'net.json'}: cannot be written (a symbolic link" in done.err
    done = boxcov(*VERBS["train"], f"--out {tmp_path / 'x.json'}")  # it would remove the weights
    assert f"boxcov: {tmp_path / 'x.json'}: the report has this name" in done.err


# two processes with one output

HOLDER = """
import sys
from pathlib import Path
from boxcov._files.output_file import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the output."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout.readline() == "held\n"
        yield held
        held.kill()


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict to a folder"])
def test_an_output_that_is_held_is_refused(tmp_path, holder, verb) -> None:
    (tmp_path / ".out.abcd_123").write_text("half")  # the other process is writing it
    error = refuse(*VERBS[verb], f"--out {tmp_path / 'out'}")
    assert error.startswith(f"boxcov: {tmp_path / 'out'}: process {holder.pid} on ")
    assert error.endswith(" is writing it: wait until it ends, or give another name\n")
    assert (tmp_path / ".out.abcd_123").exists()


def test_a_killed_process_holds_nothing(tmp_path, holder) -> None:
    holder.kill()
    holder.wait()
    (tmp_path / ".out.abcd_123").write_text("half")
    done = boxcov(*VERBS["fit"], f"--out {tmp_path / 'out'}")
    assert "absent.safetensors" in done.err  # it began to work
    assert not list(tmp_path.iterdir())  # neither the lock nor the half file


def test_workers_of_a_killed_process_hold_nothing(tmp_path) -> None:
    code = HOLDER.replace(
        '    print("held", flush=True)',
        "    import os, time\n    if not os.fork():\n"
        '        os.write(1, b"forked\\n")\n        time.sleep(60)\n'
        '    os.write(1, b"held\\n")',  # print may write text and end of line one by one
    )
    words = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as held:
        assert {held.stdout.readline() for _ in range(2)} == {"held\n", "forked\n"}
        held.kill()
        held.wait()
        with hold(tmp_path / "out"):  # the fork of the killed process still sleeps
            assert (tmp_path / ".out.lock").exists()
        os.killpg(held.pid, signal.SIGKILL)


def test_a_folder_is_held(tmp_path) -> None:
    code = HOLDER.replace(
        "boxcov._files.output_file import hold", "boxcov.pipeline.paths import hold_folder"
    )
    words = [sys.executable, "-c", code.replace("hold(", "hold_folder("), str(tmp_path / "out")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout.readline() == "held\n"
        done = boxcov(*VERBS["reproduce"], f"--out {tmp_path / 'out'}")
        held.communicate("done\n")
    assert f"process {held.pid} on " in done.err
    assert not list((tmp_path / "out").iterdir())


# commands print to stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", ["say('x')", "say_json({'x': 1})", "say_table(Table('x'))"])
def test_a_full_stdout_is_one_line(words) -> None:
    code = (
        "from rich.table import Table; from boxcov.pipeline.terminal import *; "
        "from boxcov.errors import BoxcovError; import sys\n"
        f"try: {words}\n"
        "except BoxcovError as error: sys.exit(str(error))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    expected = "stdout cannot be written (No space left on device): free some space\n"
    assert done.stderr == expected


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_help_to_a_full_stdout_is_one_line() -> None:
    words = [sys.executable, "-m", "boxcov", "fit", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    expected = "boxcov: stdout cannot be written (No space left on device): free some space\n"
    assert (done.returncode, done.stderr) == (1, expected)


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


def test_stream_to_a_full_disk_ends_with_one_line(tmp_path) -> None:
    def line(path: Path) -> dict[str, object]:
        return {"frame": str(path), "ms": 1.0}

    out, seen, paths = Full(tmp_path), streaming.Latencies(), iter(map(Path, "abc"))
    with pytest.raises(
        BoxcovError,
        match=r"^the line of frame 2: stdout cannot be written \(No space left on device\)",
    ):
        streaming.write_lines(line, paths, out, seen)
    assert json.loads(out.getvalue().splitlines()[0]) == {"frame": "a", "ms": 1.0}
    assert next(paths) == Path("c")  # the stream stopped at the error
    out.file.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_stream_to_a_full_device(tmp_path) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    words = [sys.executable, "-m", "boxcov", "stream", "--source", str(tmp_path), "--method", "nms"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "boxcov: the line of frame 1: stdout cannot be written (No space left"
    )
    assert "Traceback" not in done.stderr
