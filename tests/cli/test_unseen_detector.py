"""From ``wrap`` to a calibrated ONNX file by the guide alone, with a detector of attention."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcov import MCGLM, Detections, ExactGLM, FitOptions, Posterior, fit
from boxcov.error_model import network
from boxcov.pipeline.detectors import load_detector
from helpers import token_detector
from helpers.command_line import refuse, succeed


def run(words: str) -> str:
    done = succeed(words)
    return done.out


@pytest.fixture(scope="module", autouse=True)
def few_epochs() -> Iterator[None]:
    """More than in the other files: what the error model is worth is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "EPOCHS", 10)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: mine.py, the weights beside it, and a folder of images."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(token_detector.__file__, folder / "mine.py")
    token_detector.train(folder / "token_detector.pt")
    (folder / "images").mkdir()
    for number, (inputs, _) in enumerate(token_detector.frames("test")[:3]):
        torch.save(inputs["image"], folder / "images" / f"{number}.pt")
    return folder


@pytest.fixture(scope="module")
def calibrated(folder: Path) -> Path:
    mine = f"--detector python:{folder}/mine.py:build --data python:{folder}/mine.py:frames"
    run(f"check {mine}")
    run(f"fit {mine} --out {folder}/p.safetensors")
    run(f"calibrate {mine} --posterior {folder}/p.safetensors --out {folder}/c.safetensors")
    return folder / "c.safetensors"


def test_predictions_are_evaluated(folder: Path, calibrated: Path) -> None:
    mine = f"--detector python:{folder}/mine.py:build --data python:{folder}/mine.py:frames"
    out = folder / "exact.safetensors"
    run(f"predict {mine} --posterior {calibrated} --out {out}")
    assert bool(Detections.load(out).risk.isfinite().all())
    data = f"--data python:{folder}/mine.py:frames --replicates 2 --json"
    rows = {row["method"]: row for row in json.loads(run(f"evaluate {out} {data}"))["rows"]}
    assert rows["exact: risk"]["AUROC IoU"]["value"] > 0.5


def test_a_stream_has_the_same_boxes(folder: Path, calibrated: Path) -> None:
    own = f"--detector python:{folder}/mine.py:build --reader python:{folder}/mine.py:read"
    out = run(f"stream --source {folder}/images {own} --posterior {calibrated}")
    detector = load_detector(f"python:{folder}/mine.py:build")
    for line, (inputs, _) in zip(map(json.loads, out.splitlines()), token_detector.frames("test")):
        np.testing.assert_allclose(line["boxes"], detector.detect(inputs).boxes, rtol=1e-3)


def test_the_onnx_file_holds_the_error_model(folder: Path, calibrated: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    own = f"--detector python:{folder}/mine.py:build --reader python:{folder}/mine.py:read"
    words = f"{own} --posterior {calibrated} --example {folder}/images/0.pt"
    run(f"export {words} --boxes 20 --out {folder}/mine.onnx")  # exact, as it was calibrated
    detector = load_detector(f"python:{folder}/mine.py:build")
    model = ExactGLM(detector, Posterior.load(calibrated, detector))
    session = runtime.InferenceSession(folder / "mine.onnx")
    names = [output.name for output in session.get_outputs()]
    for inputs, _ in token_detector.frames("test")[:4]:
        found = model(inputs)
        found = found[found.scores.argsort(descending=True)]
        outputs = dict(zip(names, session.run(None, {k: v.numpy() for k, v in inputs.items()})))
        count = int(outputs["count"])
        assert count == len(found) > 0
        for name in ("boxes", "scores", "covariance", "risk", "predictive"):
            ours = getattr(found, name).numpy()
            error = np.abs(outputs[name][:count] - ours).max() / np.abs(ours).max()
            assert error < 1e-3, name


def test_another_pixel_size_is_refused(folder: Path, calibrated: Path) -> None:
    text = (folder / "mine.py").read_text()
    (folder / "other.py").write_text(text.replace("PIXEL = 0.5", "PIXEL = 0.25"))
    images = f"--source {folder}/images --reader python:{folder}/other.py:read"
    words = f"--detector python:{folder}/other.py:build --posterior {calibrated}"
    assert "pixel was 0.5, is 0.25" in refuse(f"stream {images} {words}")


def test_samples_reach_below_its_attention(folder: Path) -> None:
    detector = load_detector(f"python:{folder}/mine.py:build")
    frames = token_detector.frames("train")[:6]
    options = FitOptions(exclude=["attend"])  # as the message of fit says
    posterior = fit(detector, frames, depth="neck", n_data=200, options=options)
    exact = ExactGLM(detector, posterior)(frames[0][0]).covariance
    sampled = MCGLM(detector, posterior, samples=600)(frames[0][0]).covariance
    assert float((sampled - exact).norm() / exact.norm()) < 0.25


def test_labels_that_begin_at_1_are_refused(folder: Path, calibrated: Path) -> None:
    text = (folder / "mine.py").read_text()
    assert "(as_inputs(image), targets) for" in text
    later = "[{**targets[0], 'labels': targets[0]['labels'] + 1}]"
    (folder / "later.py").write_text(text.replace("targets) for", f"{later}) for"))
    mine = f"--detector python:{folder}/mine.py:build --data python:{folder}/later.py:frames"
    error = refuse(f"calibrate {mine} --posterior {calibrated} --out {folder}/x.safetensors")
    assert "the labels of the objects are 1 to 2, expected indices into the 2 classes" in error
