"""boxcov export through the command line."""

from __future__ import annotations

import pytest
import torch

from boxcov import ExactGLM, fit
from boxcov.pipeline.detectors import load_detector
from helpers.centerpoint_cases import cloud
from helpers.centerpoint_cases import frames as clouds
from helpers.command_line import boxcov, refuse, small_network, succeed
from helpers.error_models import with_error_model

pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")


@pytest.mark.slow
def test_exported_file_runs_in_onnxruntime(tmp_path) -> None:
    word = small_network(tmp_path)
    detector = load_detector(word)
    fit(detector, clouds(detector.config, 1)).save(tmp_path / "p.safetensors")
    cloud(detector.config, 4).numpy().astype("<f4").tofile(tmp_path / "x.bin")
    words = (
        f"--detector {word} --posterior {tmp_path / 'p.safetensors'} "
        f"--example {tmp_path / 'x.bin'} --points plain "
        "--samples 2 --boxes 9",
    )
    said = succeed("export", *words, f"--out {tmp_path / 'net.onnx'} --json").report
    assert said["bytes"] == (tmp_path / "net.onnx").stat().st_size
    assert said["inputs"] == {"map": [1, 8, 32, 32]}
    assert said["outputs"]["covariance"] == [9, 9, 9]
    with torch.no_grad():
        map_ = detector.encoder([cloud(detector.config, 5)]).contiguous()
    session = runtime.InferenceSession(
        str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"]
    )
    boxes = session.run(["boxes"], {"map": map_.numpy()})[0]
    expected = detector.detect([cloud(detector.config, 5)]).boxes[:9]
    torch.testing.assert_close(
        torch.from_numpy(boxes)[: len(expected)], expected, rtol=1e-4, atol=1e-4
    )


def test_missing_folder_is_an_error(tmp_path) -> None:
    error = refuse(f"export --posterior small --out {tmp_path / 'nowhere' / 'x.onnx'}")
    assert "there is no folder" in error


def test_missing_posterior_is_an_error_before_the_work(tmp_path) -> None:
    error = refuse(f"export --posterior p.safetensors --out {tmp_path / 'x.onnx'}")
    assert "p.safetensors: no such file: write a posterior with boxcov fit" in error
    done = boxcov(f"export --posterior {tmp_path} --out {tmp_path / 'x.onnx'}")
    assert f"{tmp_path}: is a folder: write a posterior with boxcov fit" in done.err


def test_an_error_model_that_does_not_fit_comes_first(tmp_path) -> None:
    word = small_network(tmp_path)
    detector = load_detector(word)
    inputs = [cloud(detector.config, 4)]
    posterior = fit(detector, clouds(detector.config, 1))
    calibrated = with_error_model(ExactGLM(detector, posterior), posterior, inputs, "exact")
    calibrated.save(tmp_path / "p.safetensors")
    error = refuse(
        f"export --detector {word} --posterior {tmp_path / 'p.safetensors'} --samples 2",
        f"--example {tmp_path / 'missing.bin'} --out {tmp_path / 'net.onnx'}",
    )
    assert "is for covariances of exact, not mcglm, 2 samples" in error
    assert "tracing" not in error
