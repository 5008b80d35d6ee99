"""One's own detector on every command: from a file of functions to calibrated predictions."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from boxcov import BoxcovError, Detections, ExactGLM, Posterior, join_frames
from boxcov.errors import UserCodeError
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.options import DataOptions
from boxcov.pipeline.user_code import load_function
from helpers import own_detector
from helpers.command_line import boxcov, refuse, succeed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: mine.py with detector, frames and reader, and the weights beside it."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(own_detector.__file__, folder / "mine.py")
    own_detector.train(folder / "own_detector.pt")
    return folder


@pytest.fixture(scope="module")
def words(folder: Path) -> str:
    return f"--detector python:{folder}/mine.py:build --data python:{folder}/mine.py:frames"


@pytest.fixture(scope="module")
def posterior(folder: Path, words: str) -> Path:
    succeed(f"fit {words} --count 40 --n-data 256 --out {folder}/p.safetensors")
    return folder / "p.safetensors"


@pytest.fixture(scope="module")
def calibrated(folder: Path, words: str, posterior: Path) -> Path:
    out = folder / "c.safetensors"
    succeed(f"calibrate {words} --posterior {posterior} --count 60 --out {out}")
    return out


@pytest.fixture(scope="module")
def predicted(folder: Path, words: str, calibrated: Path) -> Path:
    out = folder / "exact.safetensors"
    succeed(f"predict {words} --posterior {calibrated} --count 8 --out {out}")
    return out


def test_check_passes(words: str) -> None:
    done = succeed(f"check {words} --json")
    report = {finding["name"]: finding for finding in done.report["findings"]}
    assert report["decode: derivative"]["passed"] is True
    assert report["signals"]["passed"] is True


def test_check_draws_the_boxes_of_any_detector(tmp_path: Path, words: str) -> None:
    done = succeed(f"check {words} --out {tmp_path}/frame.png")
    assert done.out.endswith(f"written to {tmp_path}/frame.png\n")
    assert (tmp_path / "frame.png").read_bytes().startswith(b"\x89PNG")


def test_inputs_that_cannot_be_drawn_are_refused_before_the_work(
    tmp_path: Path, words: str, calibrated: Path
) -> None:
    out = f"--out {tmp_path}/d.safetensors --show {tmp_path}/pictures"
    error = refuse(f"predict {words} --posterior {calibrated} {out}")
    assert "inputs of this frame are neither" in error
    assert list(tmp_path.iterdir()) == []


def test_depth_takes_the_name_of_one_module(folder: Path, words: str) -> None:
    fit = f"fit {words} --count 2 --json --force --out {folder}/depth.safetensors"
    for name in ("sides", "model.sides"):
        done = succeed(f"{fit} --depth {name}")
        assert done.report["layers"] == 1


def test_predictions_are_calibrated(folder: Path, words: str, predicted: Path) -> None:
    found = Detections.load(predicted)
    assert found.risk.shape == found.scores.shape
    assert found.meta["frames"] == 8
    assert found.meta["source"]["split"] == "test"
    detector = load_detector(f"python:{folder}/mine.py:build")
    plain = [detector.detect(own_detector.frames("test")[i][0]) for i in range(8)]
    assert torch.equal(found.boxes, join_frames(plain).boxes)


def test_predictions_made_in_python_are_evaluated(
    folder: Path, calibrated: Path, predicted: Path
) -> None:
    detector = load_detector(f"python:{folder}/mine.py:build")
    model = ExactGLM(detector, Posterior.load(calibrated, detector))
    frames = own_detector.frames("test")
    join_frames([model(frames[i][0]) for i in range(8)]).save(folder / "own.safetensors")

    assert "give --data KIND:WHERE" in refuse(f"evaluate {folder}/own.safetensors --replicates 2")
    data = f"--data python:{folder}/mine.py:frames --replicates 2 --json"
    done = succeed(f"evaluate {folder}/own.safetensors --count 8 {data}")
    rows = {row["method"]: row for row in done.report["rows"]}
    again = boxcov(f"evaluate {predicted} {data}")
    same = {row["method"]: row for row in json.loads(again.out)["rows"]}
    assert rows["own"]["AUROC IoU"] == same["exact"]["AUROC IoU"]
    done = boxcov(f"evaluate {folder}/own.safetensors --count 7 {data}")
    assert "boxes of 8 frames, but " in done.err
    assert "has 7: give the --data, --split and --count that they were predicted on" in done.err


def test_boxes_of_other_frames_are_warned_of(folder: Path, calibrated: Path) -> None:
    detector = load_detector(f"python:{folder}/mine.py:build")
    model = ExactGLM(detector, Posterior.load(calibrated, detector))
    frames, path = own_detector.frames("test"), folder / "unnamed.safetensors"
    join_frames([model(frames[i][0]) for i in range(20)]).save(path)
    words = f"evaluate {path} --count 20 --replicates 2 --data python:{folder}/mine.py:frames"
    succeed(words)  # no warning, which would be an error
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        done = boxcov(f"{words} --split val")
    assert done.code == 0
    (line,) = [line for line in done.err.splitlines() if "other frames" in line]
    assert re.match(rf"boxcov: {path}: \d+ of \d+ boxes match one of the \d+ objects of", line)
    assert "mine.py:frames val, as few as by chance" in line


def test_a_file_of_results_runs_no_code(folder: Path, predicted: Path) -> None:
    """A file of someone else's must not be able to run a function that it names."""
    error = refuse(f"evaluate {predicted} --replicates 2")
    assert "does not run unless you name it: give --data python:" in error


def test_stream_reads_files_of_its_own(folder: Path, calibrated: Path) -> None:
    pictures = folder / "pictures"
    pictures.mkdir()
    image = own_detector.frames("test")[0][0]["image"][0] * 0.3 + 0.3
    torch.save(image, pictures / "0.pt")
    detector = f"--detector python:{folder}/mine.py:build --posterior {calibrated}"
    words = f"stream --source {pictures} {detector}"
    done = boxcov(words)
    assert "give --reader python:FILE.py:FUNCTION" in done.err
    done = succeed(f"{words} --reader python:{folder}/mine.py:read")
    line = done.lines[0]
    assert len(line["risk"]) == len(line["boxes"]) > 0


def test_bench_times_it(words: str) -> None:
    done = succeed(f"bench {words} --count 1 --repeats 1 --samples 2 --json")
    assert {"plain", "exact", "mcglm"} <= {row["method"] for row in done.report}


def test_export_asks_for_an_example(folder: Path, posterior: Path) -> None:
    error = refuse(
        f"export --detector python:{folder}/mine.py:build --posterior {posterior} "
        f"--out {folder}/x.onnx"
    )
    assert "give a frame as --example FILE" in error


def test_from_wrap_to_a_calibrated_file(
    folder: Path, words: str, posterior: Path, calibrated: Path
) -> None:
    """Without instances() the file takes samples, and the message says how."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    words = words.replace(":build", ":build_static")
    done = boxcov(f"check {words} --json")
    report = {finding["name"]: finding for finding in done.report["findings"]}
    assert report["select_static"]["passed"] is True, report["select_static"]
    torch.save(own_detector.frames("test")[0][0]["image"][0] * 0.3 + 0.3, folder / "frame.pt")
    export = f"export {words.split(' --data')[0]} --reader python:{folder}/mine.py:read"
    export += f" --example {folder}/frame.pt --out {folder}/mine.onnx"
    error = refuse(f"{export} --posterior {calibrated}")
    assert "has no instances()" in error
    (advice,) = re.findall(r"`boxcov (calibrate --method mcglm --samples \d+)`", error)
    sampled = folder / "sampled.safetensors"
    succeed(f"{advice} {words} --posterior {posterior} --count 60 --out {sampled}")
    done = succeed(f"{export} --posterior {sampled}")
    assert "covariance by 10 samples" in done.out
    assert "risk 100" in done.out


def test_a_module_is_found_in_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert load_detector("python:mine:build").classes == own_detector.CLASSES


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("python:", "names no function"),
        ("python:here.py", "names no function"),
        ("python:nowhere.py:build", "nowhere.py: no such file"),
        ("python:no.such.module:build", "no module 'no' is installed"),
        ("python:{folder}/mine.py:nothing", "has no function 'nothing'; it has Pyramid, build"),
        ("python:{folder}/mine.py:CLASSES", "has no function 'CLASSES'"),
    ],
)
def test_a_wrong_name_is_explained(name: str, message: str, folder: Path) -> None:
    with pytest.raises(BoxcovError, match=message):
        load_function(name.format(folder=folder))


def test_a_function_of_another_kind_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "other.py"
    file.write_text("def build():\n    return 3\n\ndef frames(split):\n    return [(1, 2, 3)]\n")
    with pytest.raises(BoxcovError, match=r"returns a int, expected a boxcov\.Detector"):
        load_detector(f"python:{file}:build")
    found = load_frames(DataOptions(f"python:{file}:frames"), classes=("a",))
    with pytest.raises(BoxcovError, match=r"frame 0 is a tuple, expected a pair"):
        found[0]
    with pytest.raises(UserCodeError, match=r"other.py:build\(train\) raises TypeError"):
        load_frames(DataOptions(f"python:{file}:build"))


def test_an_error_in_the_file_is_not_hidden(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import nothing_of_this_name\n")
    for _ in range(2):  # a half-run module is not kept
        with pytest.raises(UserCodeError, match="raises ModuleNotFoundError: No module") as caught:
            load_function(f"python:{file}:build")
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)


BROKEN = """
def build():
    return helper()["weights"]

def frames(split):
    return Frames()

class Frames:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return helper()["frame"]

def read(path):
    return helper()["inputs"]

def helper():
    return {}
"""


def test_an_error_in_own_code_is_one_line_below_a_traceback(
    folder: Path, calibrated: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/0.pt").write_text("x")
    mine = f"--detector python:{folder}/mine.py:build --posterior {calibrated}"
    files = f"--source {tmp_path}/files --reader python:{broken}:read"
    out = f"--out {tmp_path}/out.safetensors"
    frames = f"--data python:{broken}:frames"
    for words, said in {
        f"predict {mine} {files} {out}": f"read({tmp_path}/files/0.pt) raises KeyError: 'inputs'",
        f"predict {mine} {frames} {out}": "frames, frame 0 raises KeyError: 'frame'",
        f"predict {mine} {frames} --workers 1 {out}": "frames, frame 0 raises KeyError: 'frame'",
        f"check --detector python:{broken}:build {frames}": "build() raises KeyError: 'weights'",
    }.items():
        error = refuse(words)
        assert error.splitlines()[-1] == f"boxcov: {broken}:{said}"
        assert "Traceback" in error
        assert f'File "{broken}", line' in error
        if "--workers" not in words:
            assert "boxcov/" not in error.replace(str(tmp_path), "")
    done = boxcov(f"stream {mine} {files}")
    line = done.lines[0]
    assert line["error"] == f"{broken}:read({tmp_path}/files/0.pt) raises KeyError: 'inputs'"
    assert done.err.splitlines()[-1].startswith("boxcov: 1 of 1 frames failed")


def test_ranges_of_own_frames(folder: Path) -> None:
    source = DataOptions(f"python:{folder}/mine.py:frames", "val[5:30]", count=4)
    found = load_frames(source, classes=own_detector.CLASSES)
    assert len(found) == 4
    torch.testing.assert_close(
        found[0][0]["image"], own_detector.frames("val")[5][0]["image"], rtol=0, atol=0
    )
    with pytest.raises(BoxcovError, match="there are no frames"):
        load_frames(replace(source, split="val[70:]"), classes=own_detector.CLASSES)
