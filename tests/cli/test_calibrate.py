from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from boxcov import MCGLM, BoxcovError, Detections, ExactGLM, Posterior
from boxcov.data.simulated import CLASSES
from boxcov.error_model import unusual_frames
from boxcov.error_model.calibrate import fit_error_model
from boxcov.error_model.labelled_frames import predict_frames
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.evaluate.label_order import box_values
from boxcov.evaluate.quality import auroc
from boxcov.pipeline.calibrate import _stress_frames, run
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.options import CalibrateCommand, DataOptions, EstimatorOptions
from boxcov.pipeline.predict import build_predictor
from boxcov.pipeline.progress import Steps
from boxcov.posterior import file as posterior_file
from helpers.command_line import boxcov, refuse, succeed

WORD = "centerpoint:small"
FRAMES = "--count 10 --sweeps 2 --copies 0"


@pytest.fixture(scope="module")
def posterior(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("fitted") / "p.safetensors"
    succeed(
        f"fit --detector {WORD} --out {out} --count 2 --sweeps 2 --depth head.shared --n-data 2000"
    )
    return out


@pytest.fixture(scope="module")
def made(posterior: Path) -> tuple[Path, dict]:
    out = posterior.with_name("c.safetensors")
    done = succeed(f"calibrate --posterior {posterior} --out {out} {FRAMES} --json")
    return out, done.report


@pytest.fixture(scope="module")
def predicted(posterior: Path) -> tuple[Detections, GroundTruth]:
    """What the command predicts for its ten frames, by its own steps."""
    frames = load_frames(DataOptions("simulated:clear", "val", 10, 0, 2))
    model = build_predictor(load_detector(WORD), EstimatorOptions("exact", posterior))
    return predict_frames(model, frames)


def test_report_uses_frames_outside_the_fit(made, predicted) -> None:
    _, report = made
    assert (report["estimator"], report["threshold"], report["frames"]) == ("exact", 0.4, 10)
    held_out = report["held_out"]
    assert held_out["frames"] == 5
    found, truth = predicted
    records = match_detections(found, truth, threshold=-1.0)
    first = found.frame < 5
    fitted = fit_error_model(
        found[first], records[first.numpy()], estimator="exact", fingerprint=""
    )
    rest, others = fitted.apply(found[~first]), records[~first.numpy()]
    row = held_out["rows"]["risk"]
    assert held_out["boxes"] == len(rest)
    assert row["share"] == pytest.approx(float((others.iou < 0.4).mean()))
    assert row["AUROC"] == pytest.approx(auroc(others.iou < 0.4, rest.risk.numpy()), abs=1e-3)
    assert row["baseline"] == pytest.approx(auroc(others.iou < 0.4, 1 - others.scores))
    assert row["low"] < row["AUROC"] - row["baseline"] < row["high"]
    inside = (
        np.abs(others.as_axes().errors[others.paired]) <= rest.region(0.9).numpy()[others.paired]
    )
    assert held_out["regions"]["0.9"] == pytest.approx(inside.mean(), abs=5e-3)


def test_written_model_is_fitted_on_all_frames(made) -> None:
    out, report = made
    kept = Posterior.load(out, load_detector(WORD)).error_model
    assert kept.provenance["frames"] == 10
    assert kept.provenance["held_out"] == report["held_out"]
    assert kept.provenance["data"] == "simulated:clear val seed 0"


def test_copies_of_the_frames_are_learned_from(posterior: Path, tmp_path, monkeypatch) -> None:
    """Both fits have the copies of their own frames; the losses are those of the frames."""
    given: list[tuple[set, set]] = []

    def fit(found: Detections, *args, copies, **options):
        given.append((set(found.frame.tolist()), set(copies.source.tolist())))
        return fit_error_model(found, *args, copies=copies, **options)

    monkeypatch.setattr("boxcov.pipeline.calibrate.fit_error_model", fit)
    out = tmp_path / "c.safetensors"
    frames = "--count 10 --sweeps 2 --copies 1 --json"
    done = succeed(f"calibrate --posterior {posterior} --out {out} {frames}")
    (own, copied), (every, all_copied) = given
    assert copied <= own == set(range(5))
    assert all_copied <= every == set(range(10))
    assert max(all_copied) > 5
    assert done.report["copies"] >= 0  # boxes of copies that the network learned from


def test_both_fits_show_their_progress(posterior: Path, tmp_path) -> None:
    shown: list[tuple[str, str, int, int]] = []

    class Watched(Steps):
        def __call__(self, what: str, unit: str = "frames"):
            return lambda done, total: shown.append((what, unit, done, total))

    options = CalibrateCommand(
        out=tmp_path / "c.safetensors",
        detector=WORD,
        source=DataOptions("simulated:clear", "val", 6, 0, 2),
        estimator=EstimatorOptions("exact", posterior),
        fit_share=5 / 6,
        copies=1,
    )
    run(options, Watched())
    fits = ("fitting the error model of the report", "fitting the error model")
    for number, what in enumerate(("predicting", "predicting copies")):
        steps = shown[6 * number : 6 * number + 6]
        assert steps == [(what, "frames", i + 1, 6) for i in range(6)]
    # two epochs of each of three models, without copies and with them
    assert shown[12:] == [(what, "epochs", i + 1, 12) for what in fits for i in range(12)]


def test_predict_applies_the_error_model(made, posterior: Path, tmp_path) -> None:
    files, texts = [], []
    for name, source in (("plain", posterior), ("calibrated", made[0])):
        files.append(tmp_path / f"{name}.safetensors")
        done = succeed(f"predict --posterior {source} --out {files[-1]} --count 1 --sweeps 2")
        texts.append(done.out)
    plain, found = map(Detections.load, files)
    assert torch.equal(plain.boxes, found.boxes)
    assert torch.equal(plain.covariance, found.covariance)
    assert "uncalibrated" in texts[0]
    low = int((found.risk < 0.2).sum())
    line = f"risk: median {100 * float(found.risk.median()):.1f} %, below 20 % for {low} of"
    assert f"{line} {len(found)} boxes" in texts[1]
    assert "trace" not in texts[1]  # a sum of square metres and square radians
    assert plain.no_object is None
    assert found.meta["signals"]
    assert found.region(0.9).shape == found.boxes.shape


@pytest.fixture(scope="module")
def sampled(made) -> tuple[Path, str]:
    """A posterior that was calibrated in place for another method, and what was printed."""
    same = made[0].with_name("sampled.safetensors")
    same.write_bytes(made[0].read_bytes())
    words = "--method mcglm --samples 4 --threshold 0.5 --count 6 --fit-share 0.84 --sweeps 2"
    done = succeed(f"calibrate --posterior {same} --out {same} --force {words}")
    return same, done.out


def test_calibrate_in_place_for_another_method(sampled, tmp_path) -> None:
    same, printed = sampled
    for words in (
        "error model for mcglm, 4 samples",
        "misplaced: IoU below 0.5",
        "regions of 50 / 90 / 95 % hold",
        f"written to {same}",
    ):
        assert words in printed
    found = Posterior.load(same, load_detector(WORD)).error_model
    assert (found.estimator, found.threshold) == ("mcglm, 4 samples", 0.5)
    out = tmp_path / "d.safetensors"
    words = f"predict --posterior {same} --out {out} --force --count 1 --sweeps 2"
    for more in ("--seed 0", "--method mcglm", "--samples 4"):  # the rest: as calibrated
        succeed(f"{words} {more}")
        meta = Detections.load(out).meta
        assert (meta["method"], meta["samples"]) == ("mcglm", 4)
    done = boxcov(f"{words} --method exact")
    assert "not exact: give --method mcglm --samples 4, or fit one with" in done.err


@pytest.fixture(scope="module")
def clouds(tmp_path_factory) -> Path:
    """Two simulated frames, as files."""
    folder = tmp_path_factory.mktemp("clouds")
    frames = load_frames(DataOptions("simulated:clear", "test", 2, 0, 2))
    for number, (inputs, _) in enumerate(frames):
        inputs[0].numpy().astype("<f4").tofile(folder / f"{number}.bin")
    return folder


@pytest.fixture(scope="module")
def by_hand(sampled, clouds: Path) -> dict[str, Detections]:
    """The boxes of the first frame, by Python."""
    detector = load_detector(WORD)
    posterior = Posterior.load(sampled[0], detector)
    cloud = torch.from_numpy(np.fromfile(clouds / "0.bin", "<f4").reshape(-1, 5))
    exact = ExactGLM(detector, posterior.with_error_model(None))
    return {"mcglm": MCGLM(detector, posterior, 4)([cloud]), "exact": exact([cloud])}


@pytest.mark.parametrize(
    ("words", "estimator", "has_risk"),
    [
        ("--seed 0", "mcglm", True),
        ("--method mcglm", "mcglm", True),
        ("--no-calibrated", "mcglm", False),  # the same deviations, without the error model
        ("--no-calibrated --method exact", "exact", False),
    ],
)
def test_stream_has_the_method_of_the_calibration(
    sampled, clouds: Path, by_hand, words: str, estimator: str, has_risk: bool
) -> None:
    source = f"--source {clouds} --points plain --posterior {sampled[0]} --count 1"
    done = succeed(f"stream {source} {words}")
    line, found = done.report, by_hand[estimator]
    deviation = found.covariance.diagonal(dim1=1, dim2=2).sqrt()
    np.testing.assert_allclose(line["std"], deviation, rtol=6e-3, atol=1e-6)
    assert ("risk" in line) == has_risk
    if has_risk:
        np.testing.assert_allclose(line["risk"], found.risk, rtol=6e-3, atol=1e-6)


@pytest.mark.parametrize("words", ["--by risk", "--by risk --method mcglm", "--by epistemic"])
def test_rank_has_the_method_of_the_calibration(
    sampled, clouds: Path, by_hand, tmp_path, words: str
) -> None:
    source = f"--source {clouds} --points plain --posterior {sampled[0]} --count 1"
    boxes = tmp_path / "b.csv"
    succeed(f"rank {words} {source} --out {tmp_path / 'f.csv'} --boxes {boxes}")
    values = [float(row.split(",")[1]) for row in boxes.read_text().splitlines()[1:]]
    wanted = box_values(by_hand["mcglm"], "risk" if "risk" in words else "epistemic")
    np.testing.assert_allclose(values, np.sort(wanted)[::-1], rtol=1e-3, atol=1e-6)


def test_monitor_reads_lines_and_files_of_samples(sampled, clouds: Path, tmp_path) -> None:
    """Each frame is among the usual ones, so at least one of two is as unusual as itself."""
    source = f"--source {clouds} --points plain --posterior {sampled[0]}"
    (tmp_path / "d.jsonl").write_text(boxcov(f"stream {source}").out)
    succeed(f"predict {source} --out {tmp_path / 'd.safetensors'}")
    for name in ("d.jsonl", "d.safetensors"):
        words = f"{tmp_path / name} --usual {tmp_path / name} --false-alarm-rate 0.4"
        done = succeed(f"monitor {words}")
        verdicts = done.lines
        assert all(one["p_value"] >= 0.6 and not one["alarm"] for one in verdicts)
        assert len(verdicts) == 2


@pytest.mark.parametrize("command", ["stream", "rank --by risk --out f.csv"])
def test_another_method_than_calibrated_is_refused(sampled, clouds: Path, command: str) -> None:
    source = f"--source {clouds} --points plain --posterior {sampled[0]}"
    error = refuse(f"{command} {source} --method exact")
    assert f"{sampled[0]}: this error model is for covariances of mcglm, 4 samples" in error
    assert "give --method mcglm --samples 4, or fit one with" in error


@pytest.mark.filterwarnings("always:.*fitted on frames of the split")
def test_predict_warns_of_calibration_frames(made, tmp_path) -> None:
    command = f"predict --posterior {made[0]} --count 1 --sweeps 2 --out {tmp_path}/d.safetensors"
    same = boxcov(f"{command} --split val")
    assert "the error model was fitted on frames of the split val, too" in same.err
    assert "give another --split\n" in same.err  # simulated splits have no parts
    other = boxcov(f"{command} --split test --force")
    assert (other.code, "fitted on frames" in other.err) == (0, False)


@pytest.mark.filterwarnings("always:.*fitted on frames of the split")
def test_calibrate_warns_of_the_frames_of_the_fit(posterior: Path, tmp_path) -> None:
    done = succeed(
        f"calibrate --posterior {posterior} --out {tmp_path}/c.safetensors --split train {FRAMES}"
    )
    assert "the posterior was fitted on frames of the split train, too" in done.err
    assert "promise too much: give another --split\n" in done.err


def test_predict_names_the_method_of_the_error_model(made, tmp_path) -> None:
    out = tmp_path / "d.safetensors"
    error = refuse(f"predict --posterior {made[0]} --method mcglm --out {out} --count 1 --sweeps 2")
    assert f"{made[0]}: this error model is for covariances of exact, not mcglm, 10" in error
    assert "give --method exact, or fit one with" in error
    assert "`boxcov calibrate --method mcglm --samples 10`" in error
    assert not out.exists()
    # the same covariance as exact
    succeed(f"predict --posterior {made[0]} --method glm --out {out} --count 1 --sweeps 2")


def test_small_is_the_posterior_in_the_package(made, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(posterior_file, "SHIPPED", made[0])
    out = tmp_path / "d.safetensors"
    succeed(f"predict --posterior small --out {out} --count 1 --sweeps 2")
    assert Detections.load(out).no_object is not None
    again = f"predict --out {out} --force --count 1 --sweeps 2"
    done = succeed(again)  # the default of this detector
    assert done.out.startswith("posterior: small, the calibrated one of centerpoint:small")
    assert "risk: median" in done.out
    assert Detections.load(out).meta["posterior"] == "small"


def test_calibrate_has_the_default_that_its_help_states(posterior, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(posterior_file, "SHIPPED", posterior)
    done = succeed(f"calibrate --out {tmp_path}/c.safetensors {FRAMES}")
    assert done.out.startswith("posterior: small, the calibrated one of centerpoint:small")
    weights = tmp_path / "n.pth"
    words = f"calibrate --detector yolox:{weights} --data coco:root --out {tmp_path}/x.safetensors"
    assert f"{weights}: no such file" in boxcov(words).err
    weights.touch()
    error = boxcov(words).err
    assert f"needs a posterior of yolox:{weights}: run boxcov fit and pass its file" in error


def test_stream_without_a_posterior_gives_the_risk(made, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(posterior_file, "SHIPPED", made[0])
    ((inputs, _),) = load_frames(DataOptions("simulated:clear", "test", 1, 0, 2))
    inputs[0].numpy().astype("<f4").tofile(tmp_path / "0.bin")
    done = succeed(f"stream --source {tmp_path} --points plain")
    assert "posterior: small" in done.err
    line = done.report
    assert len(line["risk"]) == len(line["boxes"]) > 0


def test_export_of_another_estimator_is_refused(tmp_path) -> None:
    error = refuse(f"export --samples 3 --out {tmp_path}/x.onnx --candidates 8 --pairs 8 --boxes 4")
    assert "this error model is for covariances of exact, not mcglm, 3 samples" in error
    assert "`boxcov calibrate --method mcglm --samples 3`" in error  # of the command line
    assert "posterior of `boxcov fit`" in error
    assert "boxcov.calibrate" in error  # of Python


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fit-share 1.0", "--fit-share must be above 0 and below 1, got 1.0"),
        ("--count 8", "8 frames cannot be split with --fit-share 0.5: the fit needs at least 5"),
        ("--threshold 0.45", "threshold must be one of 0.1, 0.2, 0.3, 0.4"),
        ("--method nms", "the error model is stored in a posterior"),
        ("--out nowhere/p.safetensors", "there is no folder nowhere"),
    ],
)
def test_wrong_options_are_refused(posterior: Path, tmp_path, words, message) -> None:
    before = posterior.read_bytes()
    error = refuse(f"calibrate --posterior {posterior} --out {tmp_path / 'c.safetensors'}", words)
    assert message in error
    assert posterior.read_bytes() == before
    assert not (tmp_path / "c.safetensors").exists()


def test_stress_frames_widen_the_regions(
    posterior: Path, predicted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = iter([predicted])
    monkeypatch.setattr(
        "boxcov.pipeline.calibrate.predict_frames",
        lambda *given: next(first, None) or predict_frames(*given),
    )
    monkeypatch.setattr(unusual_frames, "GATE", 0.95)  # ten frames are too few for 0.05
    out = tmp_path / "w.safetensors"
    succeed(f"calibrate --posterior {posterior} --out {out} {FRAMES} --stress resized")
    model = Posterior.load(out, load_detector(WORD)).error_model
    assert bool((model.widening.factors >= 1).all())
    assert model.widening.bound.isfinite()


def test_too_few_boxes_name_the_share_of_the_frames(
    made, predicted, posterior: Path, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("boxcov.pipeline.calibrate.predict_frames", lambda *given: predicted)
    monkeypatch.setattr("boxcov.error_model.calibrate.MIN_PAIRS", made[1]["paired"])
    error = refuse(f"calibrate --posterior {posterior} --out {tmp_path / 'c'} {FRAMES}")
    assert "with an object in the first 5 of 10 frames (--fit-share 0.5): " in error


def test_stress_is_other_data_or_resized_lidar_frames(posterior: Path) -> None:
    options = CalibrateCommand(
        out=posterior, estimator=EstimatorOptions("exact", posterior), stress="simulated:rain"
    )
    detector = mock.Mock(box_fields=("x1", "y1", "x2", "y2"), classes=tuple(CLASSES))
    rain = _stress_frames(options, DataOptions(count=3), [], detector)
    assert (rain.scenario, len(rain)) == ("rain", 3)
    options = replace(options, stress="resized")
    with pytest.raises(BoxcovError, match="--stress resized needs LiDAR frames"):
        _stress_frames(options, DataOptions(), [], detector)
