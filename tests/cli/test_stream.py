"""boxcov stream through the command line, on generated files."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import MCGLM, Detections, ExactGLM, Posterior, fit
from boxcov.data.coco.images import letterbox, read_image
from boxcov.pipeline import stream as streaming
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frame_files import FrameReader, paths_in_folder
from helpers.centerpoint_cases import cloud, detector_of, pillar_config
from helpers.centerpoint_cases import frames as clouds
from helpers.command_line import boxcov, refuse, small_network, succeed
from helpers.error_models import make_error_model
from helpers.yolox_cases import objects, small


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[str, Path, Path]:
    """A detector, its posterior, and a folder of three clouds."""
    folder = tmp_path_factory.mktemp("net")
    word = small_network(folder)
    detector = load_detector(word)
    config = pillar_config()
    fit(detector, clouds(config, 1), fisher="mc").save(folder / "p.safetensors")
    frames = folder / "frames"
    frames.mkdir()
    for seed in (2, 0, 1):
        cloud(config, seed).numpy().astype("<f4").tofile(frames / f"{seed}.bin")
    return word, folder / "p.safetensors", frames


def with_risk(posterior: Path, detector: Any, path: Path) -> Path:
    """Write the posterior with an error model to ``path``, and return it."""
    plain = Posterior.load(posterior, detector)
    model = make_error_model(detector.box_fields, detector.classes, "exact", plain.fingerprint)
    plain.with_error_model(model).save(path)
    return path


def test_lines_of_a_calibrated_posterior_hold_the_risk(made, tmp_path) -> None:
    word, posterior, frames = made
    detector = load_detector(word)
    calibrated = with_risk(posterior, detector, tmp_path / "c.safetensors")
    words = f"--detector {word} --posterior {calibrated} --points plain --count 1"
    done = succeed(f"stream --source {frames} {words}")
    (line,) = done.lines
    expected = ExactGLM(detector, Posterior.load(calibrated, detector))([cloud(detector.config, 0)])
    for name in ("risk", "no_object", "misplaced"):
        close(line[name], getattr(expected, name))
    close(line["region"], expected.region(0.9))
    close(line["std"], expected.covariance.diagonal(dim1=1, dim2=2).sqrt())
    close(line["predictive_std"], expected.predictive.diagonal(dim1=1, dim2=2).sqrt())
    (line,) = boxcov(f"stream --source {frames} {words} --with-covariance").lines
    for name in ("covariance", "predictive"):
        matrices = torch.tensor(line[name], dtype=torch.float64)
        close(matrices, getattr(expected, name), rtol=1e-4)
        assert bool((torch.linalg.eigvalsh(matrices) >= 0).all())
    (line,) = boxcov(f"stream --source {frames} {words} --no-calibrated").lines
    assert "risk" not in line
    assert "std" in line


def close(numbers, expected: torch.Tensor, rtol: float = 6e-3) -> None:
    """Equal up to the rounding of a line."""
    found = torch.as_tensor(numbers, dtype=torch.float64)
    torch.testing.assert_close(found, expected.double(), rtol=rtol, atol=1e-6)


def test_calibrated_lines_need_an_error_model(made) -> None:
    word, posterior, frames = made
    words = f"--detector {word} --posterior {posterior} --calibrated"
    error = refuse(f"stream --source {frames} {words}")
    assert "p.safetensors has no error model: fit one with boxcov calibrate" in error


def test_lines_are_compact(made) -> None:
    """300 bytes per box of nine fields; the covariances alone took 1,600."""
    word, posterior, frames = made
    words = f"--detector {word} --posterior {posterior} --points plain --count 2"
    done = boxcov(f"stream --source {frames} {words}")
    line = done.lines[1]
    assert len(line["boxes"]) > 5
    assert len(done.out.splitlines()[1]) < 300 * len(line["boxes"]) + 300


def test_first_line_states_how_all_are_computed(made, tmp_path) -> None:
    word, posterior, frames = made
    calibrated = with_risk(posterior, load_detector(word), tmp_path / "c.safetensors")
    words = f"--source {frames} --detector {word} --posterior {calibrated} --points plain"
    first, second = boxcov(f"stream {words} --count 2").lines
    assert "meta" not in second
    assert first["meta"]["posterior_sha256"] == sha256(calibrated.read_bytes()).hexdigest()
    succeed(f"predict {words} --count 1 --out {tmp_path}/boxes.safetensors")
    predicted = Detections.load(tmp_path / "boxes.safetensors").meta
    names = ("detector", "posterior", "posterior_sha256", "method", "error_model", "boxcov")
    assert [first["meta"][name] for name in names] == [predicted[name] for name in names]
    (first,) = boxcov(f"stream {words} --no-calibrated --count 1").lines
    assert first["meta"]["error_model"] is None


@pytest.mark.parametrize("watch", [False, True])
def test_special_files_are_error_lines(made, tmp_path, watch) -> None:
    """A link to nothing, a pipe and an endless device end neither the stream nor the memory."""
    word, posterior, frames = made
    (tmp_path / "a.bin").symlink_to(tmp_path / "absent")
    os.mkfifo(tmp_path / "b.bin")
    (tmp_path / "c.bin").symlink_to("/dev/zero")
    (tmp_path / "d.bin").mkdir()
    (tmp_path / "e.bin").symlink_to(frames / "0.bin")
    words = f"--detector {word} --posterior {posterior} --points plain --count 4"
    done = boxcov(f"stream --source {tmp_path} {words}", *(["--watch"] if watch else []))
    assert done.code == 1
    a, b, c, e = done.lines
    assert a["error"].endswith("a.bin: no such file")
    assert "not a regular file" in b["error"]
    assert "not a regular file" in c["error"]
    assert e["boxes"]
    assert "3 of 4 frames failed" in done.err


def test_one_line_per_frame_with_the_model_results(made) -> None:
    word, posterior, frames = made
    done = succeed(
        f"stream --source {frames} --detector {word} --posterior {posterior} "
        "--points plain --method mcglm --samples 4"
    )
    found = done.lines
    assert [Path(line["frame"]).name for line in found] == ["0.bin", "1.bin", "2.bin"]
    detector = load_detector(word)
    model = MCGLM(detector, Posterior.load(posterior, detector), 4)
    for seed, line in enumerate(found):
        expected = model([cloud(detector.config, seed)])
        assert len(expected)
        close(line["boxes"], expected.boxes, rtol=1e-4)
        close(line["std"], expected.covariance.diagonal(dim1=1, dim2=2).sqrt())
        close(line["scores"], expected.scores, rtol=1e-3)
        assert line["labels"] == [detector.classes[label] for label in expected.labels]
        assert line["fields"] == list(detector.box_fields)
        assert line["ms"] > 0
    assert "boxcov: 3 frames, all warm-up: p50 " in done.err
    assert "p95" in done.err
    assert "p99" in done.err


def test_bad_frame_gives_an_error_line(made, tmp_path) -> None:
    word, posterior, frames = made
    (tmp_path / "bad.bin").write_bytes(b"123")
    paths = "\n".join(
        map(str, (frames / "0.bin", tmp_path / "bad.bin", tmp_path / "none.bin", frames / "1.bin"))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(paths))
        done = boxcov(
            f"stream --source - --detector {word} --posterior {posterior} "
            "--points plain --method mcglm --samples 2"
        )
    assert done.code == 1
    found = done.lines
    assert ["error" in line for line in found] == [False, True, True, False]
    assert "3 bytes are not a whole number of points" in found[1]["error"]
    assert "none.bin: no such file" in found[2]["error"]
    assert done.err.endswith("boxcov: 2 of 4 frames failed: see the errors in their lines\n")


def test_nonfinite_boxes_give_an_error_line(tmp_path) -> None:
    """Covariances are checked; the boxes of the detector itself may be non-finite."""
    cloud(pillar_config(), 0).numpy().astype("<f4").tofile(tmp_path / "x.bin")
    box = torch.tensor([[1.0, float("nan")]])
    found = Detections(
        box, torch.ones(1), torch.zeros(1), torch.zeros(1), ("x", "y"), ("car",), torch.eye(2)[None]
    )
    reader = FrameReader(detector_of(pillar_config()), "plain")
    (entry,) = reader.entries(tmp_path / "x.bin")
    line = streaming.predict_line(lambda inputs: found, entry)
    assert line == {"frame": str(tmp_path / "x.bin"), "error": "boxes are not finite"}


def test_errors_without_labels_are_null(tmp_path) -> None:
    """Calibration frames without velocities leave their errors unknown."""
    cloud(pillar_config(), 0).numpy().astype("<f4").tofile(tmp_path / "x.bin")
    C = torch.tensor([[[0.04, float("nan")], [float("nan"), float("nan")]]])
    zero = torch.zeros(1, dtype=torch.long)
    found = Detections(
        *(torch.ones(1, 2), torch.ones(1), zero, zero, ("x", "vx"), ("car",), torch.eye(2)[None]),
        predictive=C,
    )
    reader = FrameReader(detector_of(pillar_config()), "plain")
    (entry,) = reader.entries(tmp_path / "x.bin")
    line = streaming.predict_line(lambda inputs: found, entry)
    assert (line["std"], line["predictive_std"]) == ([[1.0, 1.0]], [[0.2, None]])


def test_names_that_are_not_utf_8_are_text(tmp_path) -> None:
    """boxcov monitor reads them."""
    (tmp_path / os.fsdecode(b"a\xff.bin")).write_bytes(b"")
    reader = FrameReader(detector_of(pillar_config()), "plain")
    (entry,) = reader.entries(tmp_path)
    line = streaming.predict_line(lambda inputs: inputs, entry)
    assert line["frame"] == str(tmp_path / r"a\udcff.bin")


def test_kitti_points_give_boxes_in_kitti_axes(made, tmp_path) -> None:
    word, posterior, _ = made
    detector = load_detector(word)
    there = cloud(detector.config, 3)
    x, y = there[:, 1], -there[:, 0]  # the same position in KITTI's axes
    np.stack([x, y, there[:, 2], there[:, 3] / 255], 1).astype("<f4").tofile(tmp_path / "k.bin")
    done = succeed(
        f"stream --source {tmp_path} --detector {word} --posterior {posterior} "
        "--points kitti --method mcglm --samples 2"
    )
    (line,) = done.lines
    there[:, 4] = 0
    expected = MCGLM(detector, Posterior.load(posterior, detector), 2)([there])
    assert len(line["boxes"]) == len(expected) > 0
    boxes, std = torch.tensor(line["boxes"]), torch.tensor(line["std"])
    torch.testing.assert_close(boxes[:, 0], expected.field("y"), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(boxes[:, 1], -expected.field("x"), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(std[:, 0], expected.std("y"), rtol=2e-2, atol=1e-3)


def test_image_boxes_are_in_pixels_of_the_image(tmp_path) -> None:
    Image = pytest.importorskip("PIL.Image")
    detector = small(seed=2, max_boxes=5).float()
    inputs = torch.zeros(1, 3, 64, 64)
    target = {
        name: value.float() if value.is_floating_point() else value
        for name, value in objects(2, 64, 64).items()
    }
    posterior = fit(detector, [(inputs, [target])], fisher="mc")
    pixels = (np.random.default_rng(0).random((48, 96, 3)) * 255).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    model = MCGLM(detector, posterior, 3)
    (entry,) = FrameReader(detector, size=64).entries(tmp_path / "a.png")
    line = streaming.predict_line(model, entry, with_covariance=True)
    assert "error" not in line, line
    square, scale = letterbox(read_image(tmp_path / "a.png"), 64)
    expected = model(square.unsqueeze(0))
    assert len(expected)
    close(torch.tensor(line["boxes"]) * scale, expected.boxes, rtol=1e-4)
    close(torch.tensor(line["covariance"]) * scale**2, expected.covariance, rtol=1e-4)


def test_watched_folder_yields_new_files(tmp_path) -> None:
    (tmp_path / "b.bin").write_bytes(b"1")
    paths = paths_in_folder(tmp_path, (".bin",), watch=True, poll=0.01)
    assert next(paths).name == "b.bin"
    (tmp_path / "a.bin").write_bytes(b"2")
    (tmp_path / "x.txt").write_bytes(b"3")
    assert next(paths).name == "a.bin"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--source", "nowhere"], "nowhere: no such file or folder"),
        ([], "give --source: a folder, a video, or - for paths on stdin"),
        (["--source", "-", "--watch"], "--watch needs a folder"),
        (["--source", ".", "--size", 33], "--size must be a multiple of 32"),
        (["--source", "drive.mp4"], "drive.mp4: is a video; this detector reads no images"),
        (["--source", ".", "--show", "x.avi"], "give a folder, or a video that ends in .gif or"),
    ],
)
def test_wrong_stream_options_are_refused(made, words, message) -> None:
    word, posterior, _ = made
    assert message in refuse("stream", *words, f"--detector {word} --posterior {posterior}")


def test_empty_folder_is_an_error(made, tmp_path) -> None:
    word, posterior, _ = made
    error = refuse(f"stream --source {tmp_path} --detector {word} --posterior {posterior}")
    assert f"{tmp_path}: no .bin file there, which this detector reads: give a folder" in error


def started(made, *more: str) -> subprocess.Popen[str]:
    """``boxcov stream`` in a separate process."""
    word, posterior, frames = made
    line = f"stream --source {frames} --detector {word} --posterior {posterior} --points plain"
    return subprocess.Popen(
        [sys.executable, "-m", "boxcov", *line.split(), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.slow
def test_ctrl_c_prints_the_latencies(made) -> None:
    process = started(made, "--watch")
    assert process.stdout is not None
    for _ in range(3):
        assert json.loads(process.stdout.readline())["boxes"] is not None
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert "3 frames, all warm-up: p50" in err


@pytest.mark.slow
def test_closed_pipe_ends_the_stream(made) -> None:
    process = started(made)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(60) == 141
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


@pytest.mark.parametrize(
    ("written", "columns", "asked", "message"),
    [
        ("kitti", 4, "nuscenes", "the ring is not a whole number"),
        ("nuscenes", 5, "kitti", "the intensity is not between 0 and 1"),
        ("nuscenes", 5, "plain", "the ages are whole numbers"),
    ],
)
def test_points_of_another_layout_are_refused(
    made, tmp_path, written: str, columns: int, asked: str, message: str
) -> None:
    word, posterior, _ = made
    points = np.random.default_rng(0).uniform(0, 1, (500, columns)).astype("<f4")  # both divide it
    if written == "nuscenes":
        points[:, 3:] = np.arange(500)[:, None] % [255, 32]
    points.tofile(tmp_path / "0.bin")
    words = f"--detector {word} --posterior {posterior} --points {asked}"
    done = boxcov(f"stream --source {tmp_path} {words}")
    assert done.code == 1
    assert message in done.lines[0]["error"]
    assert done.lines[0]["error"].endswith("--points nuscenes, kitti or plain")


def test_warm_up_is_no_part_of_the_latencies() -> None:
    latencies = streaming.Latencies()
    for milliseconds in (*[90.0] * 5, 10.0, 20.0, 30.0):
        latencies.add(milliseconds)
    quantiles = "p50 20.0 ms, p95 29.0 ms, p99 29.8 ms, maximum 30.0 ms"
    assert str(latencies) == f"3 frames after 5 of warm-up: {quantiles}"
