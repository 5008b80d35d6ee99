from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import boxcov as package
from boxcov import BoxcovError, Detections
from boxcov.data import kitti, nuscenes, simulated
from boxcov.data.poses import BOX_FIELDS
from boxcov.pipeline import predict as prediction
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.kitti_axes import KittiAsNuScenes, detections_to_kitti, frame_to_nuscenes
from boxcov.pipeline.options import DataOptions, EstimatorOptions, PredictCommand
from boxcov.pipeline.options.option import SHIPPED_POSTERIOR
from helpers.command_line import boxcov, refuse, small_network, small_posterior, succeed
from helpers.data_roots import kitti_root, nuscenes_root

TINY = ["--count 3 --sweeps 1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[str, Path]:
    """A detector and its posterior."""
    return small_posterior(tmp_path_factory.mktemp("net"))


METHODS = {
    "exact": ([], lambda detector, posterior: package.ExactGLM(detector, posterior)),
    "glm": ([], lambda detector, posterior: package.GLM(detector, posterior)),
    "mcglm": (
        ["--samples", 5, "--seed", 3],
        lambda detector, posterior: package.MCGLM(detector, posterior, 5, seed=3),
    ),
    "mci": (
        ["--samples", 4],
        lambda detector, posterior: package.MCI(detector, posterior, samples=4),
    ),
    "nms": ([], lambda detector, posterior: package.NMSSpread(detector)),
}


@pytest.mark.parametrize("method", ["exact", "glm", "mcglm", "mci"])
def test_variance_of_the_score_logit(tmp_path, made, method) -> None:
    word, posterior = made
    common = (f"predict --detector {word} --posterior {posterior} --method {method}", *TINY)
    for name, words in (("plain", []), ("scored", ["--with-logit"])):
        succeed(*common, *words, "--out", tmp_path / f"{name}.safetensors")
    plain, scored = (
        Detections.load(tmp_path / f"{name}.safetensors") for name in ("plain", "scored")
    )
    assert torch.equal(plain.covariance, scored.covariance)
    assert plain.score_variance is None
    assert bool((scored.score_variance > 0).all())
    assert scored.meta["with_logit"] is True


def test_nms_has_no_score_logit(tmp_path, made) -> None:
    done = boxcov(
        f"predict --detector {made[0]} --method nms --with-logit --out {tmp_path / 'd'}",
        *TINY,
    )
    assert done.code != 0
    assert "the method nms has no option --with-logit" in done.err


@pytest.mark.parametrize("method", METHODS)
def test_file_equals_the_library_results(tmp_path, made, method) -> None:
    word, posterior = made
    words, build = METHODS[method]
    out = tmp_path / "d.safetensors"
    done = succeed(
        f"predict --detector {word} --posterior {posterior} --method {method} --out {out}",
        *TINY,
        *words,
        "--json",
    )
    found, report = Detections.load(out), done.report
    detector = load_detector(word)
    model = build(detector, package.Posterior.load(posterior, detector))
    seed = 3 if method == "mcglm" else 0
    frames = simulated.frames("clear", seed=seed + 1000, count=3, sweeps=1)
    expected = [model(inputs) for inputs, _ in frames]
    assert sum(map(len, expected)) == len(found) == report["boxes"] > 5
    for mine, theirs in zip(found.frames(3), expected):
        for name in ("boxes", "scores", "labels", "covariance"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert found.meta["method"] == method
    assert DataOptions(**found.meta["source"]) == DataOptions("simulated:clear", "test", 3, seed, 1)
    assert found.meta["frames"] == len(found.meta["milliseconds"]) == 3
    assert ("posterior_sha256" in found.meta) == (method != "nms")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.safetensors"]


def test_mc_dropout_needs_no_posterior(tmp_path, made) -> None:
    word, _ = made
    succeed(f"predict --detector {word} --method mci --out {tmp_path / 'a'}", *TINY)
    assert Detections.load(tmp_path / "a").meta["dropout"] == 0.1


# interrupted and resumed


@pytest.mark.parametrize("method", ["exact", "mci", "calibrated"])
def test_interrupted_run_resumes_to_the_same_bytes(tmp_path, made, monkeypatch, method) -> None:
    """mci with dropout draws samples per frame: earlier draws must not matter."""
    monkeypatch.setattr(prediction, "seconds", lambda device: 0.0)  # only the times would differ
    word, posterior = made
    estimators = {
        "exact": EstimatorOptions("exact", posterior),
        "mci": EstimatorOptions("mci"),
        "calibrated": EstimatorOptions(None, SHIPPED_POSTERIOR),
    }
    out = tmp_path / "cut.safetensors"
    options = PredictCommand(
        out=out,
        detector="centerpoint:small" if method == "calibrated" else word,
        source=DataOptions("simulated:rain", "val", 7, 0, 1),
        estimator=estimators[method],
    )
    whole = tmp_path / "whole.safetensors"
    report = prediction.run(replace(options, out=whole), block=2)
    assert report["error_model"] == Detections.load(whole).meta["error_model"]
    assert (report["error_model"] is not None) == (method == "calibrated")
    seen: list[int] = []

    def killed(done: int, total: int) -> None:
        if done == 6:  # the third block is at work
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prediction.run(options, killed, block=2)
    parts = tmp_path / "cut.safetensors.parts"
    assert sorted(p.name for p in parts.iterdir()) == [
        "00000000.safetensors",
        "00000002.safetensors",
    ]
    (parts / ".00000004.safetensors.x1").write_text("half")
    with pytest.raises(
        BoxcovError,
        match=r"cut\.safetensors\.parts: blocks of an interrupted run: continue it with --resume",
    ):
        prediction.run(options, block=2)
    other = replace(options, source=replace(options.source, seed=9), resume=True)
    with pytest.raises(BoxcovError, match=r"made with other options \(seed was 0, now 9"):
        prediction.run(other, block=2)
    prediction.run(replace(options, resume=True), lambda done, total: seen.append(done), block=2)
    assert seen == [2, 4, 5, 6, 7]
    assert out.read_bytes() == whole.read_bytes()
    assert not parts.exists()


def test_resume_replaces_no_finished_boxes(tmp_path, made) -> None:
    out = tmp_path / "d.safetensors"
    words = [f"predict --detector {made[0]} --method nms --out {out}", *TINY, "--resume"]
    succeed(*words)
    boxes = out.read_bytes()
    assert f"{out}: exists: replace it with --force" in refuse(*words)
    assert out.read_bytes() == boxes
    (tmp_path / "d.safetensors.parts").mkdir()  # interrupted after it wrote
    succeed(*words)
    succeed(*words, "--seed 7 --force")


def test_resume_replaces_no_finished_file_of_another_format(tmp_path, made) -> None:
    """Such a file does not state its options."""
    out = tmp_path / "d.csv"
    words = [f"predict --detector {made[0]} --method nms --format csv --out {out}", *TINY]
    succeed(*words, "--resume")
    rows = out.read_bytes()
    (tmp_path / "d.checkpoint").touch()  # of the output d
    error = refuse(*words, "--seed 7 --resume")
    assert f"{out}: exists: replace it with --force" in error
    assert out.read_bytes() == rows
    succeed(*words, "--seed 7 --resume --force")


def test_resume_without_blocks_starts_a_run(tmp_path, made) -> None:
    succeed(f"predict --detector {made[0]} --method nms --out {tmp_path / 'd'}", *TINY, "--resume")
    assert len(Detections.load(tmp_path / "d"))


# formats


def test_nuscenes_results(tmp_path, made) -> None:
    word, posterior = made
    root = nuscenes_root(tmp_path)
    words = ["--data", f"nuscenes:{root}", "--split train[1:] --count 2 --format nuscenes"]
    succeed(
        f"predict --detector {word} --posterior {posterior} --out {tmp_path / 'r.json'}", *words
    )
    found = nuscenes.read_results(tmp_path / "r.json")
    assert list(found) == nuscenes.frames(root).tokens[1:3]
    assert sum(map(len, found.values())) > 0
    assert all(len(part) == 0 or part.covariance.shape[1:] == (9, 9) for part in found.values())


@pytest.mark.filterwarnings("default:.*KITTI has no such classes")
def test_kitti_results_use_the_axes_of_kitti(tmp_path, made) -> None:
    word, posterior = made
    root = kitti_root(tmp_path)
    words = [f"--detector {word} --posterior {posterior} --data", f"kitti:{root}", "--count 1"]
    succeed(f"predict --out {tmp_path / 'native'}", *words)
    done = succeed(f"predict --out {tmp_path / 'results'} --format kitti", *words)
    native = Detections.load(tmp_path / "native")
    kept = [
        i
        for i, label in enumerate(native.labels.tolist())
        if native.classes[label] in ("car", "pedestrian", "bicycle")
    ]
    (found,) = kitti.read_results(tmp_path / "results", kitti.frames(root)[:1])
    assert len(found) == len(kept) > 0
    left_out = f"{len(native) - len(kept)} of {len(native)} boxes are not written, because KITTI"
    assert left_out in done.err
    there = native[kept]
    assert torch.allclose(found.field("x"), there.field("y").double(), atol=1e-3)
    assert torch.allclose(found.field("y"), -there.field("x").double(), atol=1e-3)
    assert torch.allclose(found.std("x"), there.std("y").double(), rtol=1e-3)
    assert [found.classes[label] for label in found.labels] == [
        {"car": "Car", "pedestrian": "Pedestrian", "bicycle": "Cyclist"}[there.classes[label]]
        for label in there.labels
    ]


def test_kitti_axes_round_trip() -> None:
    boxes = torch.tensor(
        [
            [10.0, 2.0, -1.0, 1.6, 4.0, 1.5, 0.3, 3.0, 1.0],
            [5.0, -7.0, 0.0, 1.0, 1.0, 2.0, -3.1, 0.0, 0.0],
        ]
    )
    _, (target,) = frame_to_nuscenes(
        ([torch.zeros(1, 5)], [{"boxes": boxes, "labels": torch.tensor([0, 2])}])
    )
    n = torch.zeros(2, dtype=torch.long)
    back = detections_to_kitti(
        Detections(
            target["boxes"], torch.ones(2), target["labels"], n, BOX_FIELDS, simulated.CLASSES
        )
    )
    assert torch.allclose(back.boxes[:, :7], boxes[:, :7].double(), atol=1e-5)
    assert back.labels.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "nuscenes"], "the format nuscenes is for frames of nuScenes"),
        (["--format", "kitti"], "the format kitti is for frames of KITTI"),
        (
            ["--format", "coco"],
            "the format coco takes boxes of x1 y1 x2 y2; these are x y z",
        ),
        (["--out", "absent/d"], "absent/d: there is no folder absent"),
        (["--out", "d.csv"], "--out d.csv: the format native is no .csv file: give --format"),
        (["--out", "."], "is a folder; give the name of a file"),
        (["--samples", 5], "the method nms has no option --samples"),
        (["--method", "exact"], "needs a posterior of centerpoint:"),
        (["--method", "mcglm", "--posterior", "nope"], "nope: no such file"),
        (["--method", "mci", "--samples", 1], "samples must be at least 2"),
        (["--data", "carla:town"], "no data 'carla:town'"),
    ],
)
def test_user_errors_come_before_the_work(tmp_path, made, monkeypatch, words, message) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        prediction, "_predict_block", lambda *given: pytest.fail("the work has begun")
    )
    done = boxcov(f"predict --detector {made[0]} --method nms --out d", *TINY, *words)
    assert done.code == 1
    assert done.out == ""
    assert done.err.startswith("boxcov: ")
    assert done.err.count("\n") == 1
    assert message in done.err
    assert not list(tmp_path.iterdir())


def test_posterior_of_other_weights_is_refused(tmp_path, made) -> None:
    error = refuse(
        "predict --detector",
        small_network(tmp_path, seed=5),
        f"--posterior {made[1]} --out {tmp_path / 'd'}",
        *TINY,
    )
    assert "this posterior was made for weights with the fingerprint" in error


def test_detector_with_other_classes_is_refused(tmp_path) -> None:
    with pytest.raises(
        BoxcovError, match=r"the labels are car, truck, .*; the detector has car, bus"
    ):
        load_frames(DataOptions("simulated:clear"), classes=("car", "bus"))
    root = kitti_root(tmp_path)
    assert isinstance(load_frames(DataOptions(f"kitti:{root}")), KittiAsNuScenes)
    assert isinstance(
        load_frames(DataOptions(f"kitti:{root}"), classes=("car", "pedestrian", "cyclist")),
        kitti.Kitti,
    )
    with pytest.raises(BoxcovError, match=r"split training\[90:\]: there are no frames"):
        load_frames(DataOptions(f"kitti:{root}", "training[90:]"))


def test_no_boxes_give_an_empty_file(tmp_path) -> None:
    from boxcov.detectors import centerpoint
    from helpers.centerpoint_cases import detector_of, pillar_config

    config = pillar_config()
    blind = detector_of(replace(config, reporting=replace(config.reporting, threshold=0.999999)))
    centerpoint.save(blind, tmp_path / "blind.safetensors")
    words = [
        "--detector",
        f"centerpoint:{tmp_path}/blind.safetensors",
        f"--method nms --out {tmp_path / 'd.safetensors'}",
        *TINY,
    ]
    done = succeed("predict", *words)
    assert done.out.startswith("0 boxes in 3 frames")
    assert Detections.load(tmp_path / "d.safetensors").covariance.shape == (0, 9, 9)
    error = refuse(f"evaluate {tmp_path / 'd.safetensors'}")
    assert "no box has a score above 0.1: there is nothing to evaluate" in error
