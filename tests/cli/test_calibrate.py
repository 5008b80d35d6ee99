from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from boxcov.error_model.fit import apply_calibration

import boxcov as package
from boxcov import Detections, Posterior
from boxcov.evaluate.covariance_metrics import covariance_metrics
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.options import DataOptions
from helpers.command_line import boxcov

WORD = "centerpoint:small"
FRAMES = ["--count 4 --sweeps 2"]


@pytest.fixture(scope="module")
def posterior(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("fitted") / "p.safetensors"
    done = boxcov(
        f"fit --detector {WORD} --out {out} --count 2 --sweeps 2 --depth head.shared --n-data 2000"
    )
    assert done.code == 0, done.err
    return out


@pytest.fixture(scope="module")
def made(posterior: Path) -> tuple[Path, dict]:
    out = posterior.with_name("c.safetensors")
    done = boxcov(
        f"calibrate --detector {WORD} --posterior {posterior} --out {out} --kind product",
        *FRAMES,
        "--json",
    )
    assert done.code == 0, done.err
    return out, json.loads(done.out)


def test_report_uses_frames_outside_the_fit(made) -> None:
    out, report = made
    detector = load_detector(WORD)
    loaded = Posterior.load(out, detector)
    found = loaded.calibration
    assert (found.kind, found.estimator, found.provenance["frames"]) == ("product", "exact", 2)
    frames = load_frames(DataOptions("simulated:clear", "val", 4, 0, 2))
    model = package.ExactGLM(detector, loaded)
    boxes, unseen = [], []
    for number in (2, 3):
        inputs, targets = frames[number]
        boxes.append(model(inputs))
        unseen.append((None, targets))
    records = [
        match_detections(one, GroundTruth.from_frames([frame])) for one, frame in zip(boxes, unseen)
    ]
    errors = np.concatenate([r[r.paired].errors for r in records])
    after = np.concatenate([apply_calibration(r[r.paired], found).predictive for r in records])
    expected = covariance_metrics(errors, after, found.fields)
    row = report["held_out"]["rows"]["after"]
    assert report["held_out"]["boxes"] == len(errors) > 10
    assert row["NLL"] == pytest.approx(expected["NLL"], rel=1e-4)
    assert row["coverage"] == pytest.approx(expected["coverage"])
    before = report["held_out"]["rows"]["before"]
    assert before["singular"] > 0  # one layer does not move all fields of every box
    assert before["NLL"] is None
    assert set(report["held_out"]["rows"]) == {"before", "after", "score and size alone"}


def test_predict_uses_the_calibration(made, posterior: Path, tmp_path) -> None:
    out, _ = made
    files = []
    for name, words in (("plain", []), ("calibrated", ["--calibrated"])):
        files.append(tmp_path / f"{name}.safetensors")
        done = boxcov(
            f"predict --detector {WORD} --posterior {out} --out",
            files[-1],
            "--count 1 --sweeps 2",
            *words,
        )
        assert done.code == 0, done.err
    plain, found = map(Detections.load, files)
    assert torch.equal(plain.covariance, found.covariance)
    assert torch.equal(plain.boxes, found.boxes)
    assert plain.predictive is None
    assert found.predictive.shape == found.covariance.shape
    assert found.meta["calibration"] == {"kind": "product", "estimator": "exact"}
    frames = load_frames(DataOptions("simulated:clear", "test", 1, 0, 2))
    assert match_detections(found, GroundTruth.from_frames(frames)).predictive is not None
    done = boxcov(
        f"predict --detector {WORD} --posterior {posterior} --out {files[0]} --count 1 --calibrated"
    )
    assert done.code == 1
    assert "fit one with `boxcov calibrate`" in done.err


def test_calibrate_in_place_and_print_a_table(made, tmp_path) -> None:
    out, _ = made
    same = tmp_path / "same.safetensors"
    same.write_bytes(out.read_bytes())
    words = ["--kind score --method mcglm --samples 3 --count 2 --sweeps 2"]
    done = boxcov(f"calibrate --posterior {same} --out {same}", *words)
    assert done.code == 0, done.err
    assert "mcglm, 3 samples" in done.out
    assert "NLL no better than score and size alone: 0.000 (0.000 to 0.000)" in done.out
    assert Posterior.load(same, load_detector(WORD)).calibration.kind == "score"


def test_product_kind_with_heading_as_axis(posterior: Path, tmp_path) -> None:
    out = tmp_path / "product.safetensors"
    words = ["--kind product --heading axis --fit-share 0.75"]
    done = boxcov(f"calibrate --posterior {posterior} --out {out}", *words, *FRAMES, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    found = Posterior.load(out, load_detector(WORD)).calibration
    assert found.kind == "product"
    assert found.features[-1] == "variance vy"
    assert set(report["variances"]) == set(found.fields)
    assert report["heading"] == found.provenance["heading"] == "axis"
    assert 0 < report["half_turns"] < 1
    # no flip of the heading was fitted
    assert (
        np.sqrt(np.exp(np.array(found.log_residual)[:, found.fields.index("yaw")])).max()
        < np.pi / 2
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fit-share", 1.0], "--fit-share must lie between 0 and 1, got 1.0"),
        (["--count", 1], "1 frames cannot be split with --fit-share 0.5"),
        (["--method", "nms"], "the calibration is stored in a posterior"),
        (["--out", "nowhere/p.safetensors"], "there is no folder nowhere"),
    ],
)
def test_wrong_options_are_refused(posterior: Path, tmp_path, words, message) -> None:
    before = posterior.read_bytes()
    done = boxcov(
        f"calibrate --posterior {posterior} --out {tmp_path / 'c.safetensors'} --count 2", *words
    )
    assert done.code == 1
    assert message in done.err
    assert posterior.read_bytes() == before
    assert not (tmp_path / "c.safetensors").exists()
