"""ONNX files give the boxes and covariances of PyTorch in onnxruntime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import boxcov
from boxcov import MCGLM, BoxcovError, ExactGLM, Posterior
from boxcov._torch.modules import fingerprint
from boxcov.data import simulated
from boxcov.detectors import centerpoint, yolox
from boxcov.detectors.tiny import TinyCenter
from boxcov.export.onnx import StaticLimits, about, export, trace
from helpers.centerpoint_cases import cloud, detector_of, pillar_config
from helpers.centerpoint_cases import frames as clouds
from helpers.error_models import with_error_model
from helpers.onnx_file import File, check_rows
from helpers.yolox_cases import nano, objects, small

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


# CenterPoint


def model_of(detector: Any, posterior: Posterior, samples: Any, seed: int = 0) -> Any:
    if samples == "exact":
        return ExactGLM(detector, posterior)
    return MCGLM(detector, posterior, samples, seed=seed)


def calibrated(detector: Any, posterior: Posterior, samples: Any, inputs: Any) -> Posterior:
    """Return the posterior with an error model that reads all signals."""
    estimator = "exact" if samples == "exact" else f"mcglm, {samples} samples"
    return with_error_model(model_of(detector, posterior, samples), posterior, inputs, estimator)


@pytest.fixture(scope="module")
def pillar() -> tuple[Any, Posterior]:
    config = pillar_config(tasks=(("car",), ("truck", "trailer")))
    config = replace(
        config, reporting=replace(config.reporting, threshold=0.1, max_boxes=7, candidates=40)
    )
    detector = detector_of(config)
    return detector, boxcov.fit(detector, clouds(config, 2), n_data=50, prior_precision=1.0)


@pytest.mark.parametrize("samples", [4, pytest.param("exact", marks=pytest.mark.slow)])
def test_centerpoint_agrees_with_torch(tmp_path, pillar, samples: Any) -> None:
    detector, posterior = pillar
    points = [cloud(detector.config, seed) for seed in (5, 6)]
    posterior = calibrated(detector, posterior, samples, [points[0]])
    model = model_of(detector, posterior, samples, seed=3)
    with torch.no_grad():
        maps = [detector.encoder([some]).contiguous() for some in points]
    most = max(len(detector.detect([some])) for some in points)
    said = export(
        detector,
        posterior,
        tmp_path / "all.onnx",
        maps[0],
        samples,
        seed=3,
        limits=StaticLimits(boxes=most + 2, candidates=40),
        input_name="map",
        signal_inputs=detector.signal_inputs([points[0]]),
    )
    assert list(said["inputs"]) == ["map", "signal_inputs"]
    file = File(tmp_path / "all.onnx")
    for some, map_ in zip(points, maps):
        check_rows(file(map_, detector.signal_inputs([some])), model([some]))


@pytest.mark.slow
def test_boxes_beyond_the_limit_are_counted(tmp_path, pillar) -> None:
    detector, posterior = pillar
    points = cloud(detector.config, 5)
    with torch.no_grad():
        map_ = detector.encoder([points]).contiguous()
    export(detector, posterior, tmp_path / "few.onnx", map_, 2, limits=StaticLimits(boxes=3))
    found = File(tmp_path / "few.onnx")(map_)
    assert int(found["left_off"]) > 0
    check_rows(found, MCGLM(detector, posterior, 2)([points]))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [10, "exact"])
def test_the_shipped_centerpoint_agrees_with_torch(tmp_path, samples: Any) -> None:
    """Exact: with the shipped error model."""
    detector = centerpoint.load("small")
    clouds = [simulated.frames(name, seed=1000, count=1)[0][0] for name in ("clear", "rain")]
    clouds.append([torch.zeros(1, 5)])
    posterior = Posterior.load("small", detector)
    assert posterior.error_model is not None
    if samples != "exact":
        posterior = posterior.with_error_model(None)
    model = model_of(detector, posterior, samples)
    with torch.no_grad():
        inputs = [
            {
                "inputs": detector.encoder(some).contiguous(),
                "signal_inputs": detector.signal_inputs(some),
            }
            for some in clouds
        ]
    said = export(
        detector,
        posterior,
        tmp_path / "small.onnx",
        **inputs[0],
        samples=samples,
        limits=StaticLimits(boxes=150, candidates=500, pairs=60_000),
    )
    file = File(tmp_path / "small.onnx")
    counts = []
    for given, some in zip(inputs, clouds):
        expected = model(some)
        counts.append(len(expected))
        check_rows(file(*(given[name] for name in said["inputs"])), expected)
    assert counts[0] > 50
    assert counts[1] > 150  # more than the rows
    assert 0 < counts[2] < 50  # a few


# YOLOX


def photo(seed: int, side: int = 64) -> Tensor:
    """Return a smooth image, so that no two cells have the same score."""
    rough = torch.rand(1, 3, 5, 7, generator=torch.Generator().manual_seed(seed))
    return 255 * torch.nn.functional.interpolate(
        rough, (side, side), mode="bicubic", align_corners=True
    ).clamp(0, 1)


@pytest.fixture(scope="module")
def yolo() -> tuple[Any, Posterior]:
    detector = small(seed=2, threshold=0.35, max_boxes=30).float()
    with torch.no_grad():
        for layers in (detector.head.cls_preds, detector.head.obj_preds, detector.head.reg_preds):
            for layer in layers:
                layer.weight.mul_(3)
    data = [
        (
            photo(i),
            [
                {
                    k: v.float() if v.is_floating_point() else v
                    for k, v in objects(3, 64, 64, i).items()
                }
            ],
        )
        for i in range(2)
    ]
    return detector, boxcov.fit(detector, data, n_data=50, prior_precision=1.0, fisher="mc")


@pytest.mark.parametrize("samples", [4, pytest.param("exact", marks=pytest.mark.slow)])
def test_yolox_agrees_with_torch(tmp_path, yolo, samples: Any) -> None:
    detector, posterior = yolo
    inputs = [photo(seed) for seed in (10, 11)]
    if samples == "exact":  # the error model is half of the work; CenterPoint always has one
        posterior = calibrated(detector, posterior, samples, inputs[0])
    model = model_of(detector, posterior, samples)
    limits = StaticLimits(boxes=32, candidates=84)
    export(detector, posterior, tmp_path / "yolox.onnx", inputs[0], samples, limits=limits)
    file = File(tmp_path / "yolox.onnx")
    for image in inputs:
        check_rows(file(image), model(image))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [10, "exact"])
def test_the_trained_nano_agrees_with_torch(tmp_path, samples: Any) -> None:
    detector = yolox.load(nano() / "yolox_nano_folded.safetensors")
    data = [
        (
            255 * torch.rand(1, 3, 416, 416, generator=torch.Generator().manual_seed(0)),
            [{"boxes": torch.tensor([[50.0, 50, 200, 300]]), "labels": torch.tensor([0])}],
        )
    ]
    posterior = boxcov.fit(detector, data, n_data=1000, prior_precision=10.0, fisher="mc")
    sharp = YOLOXAt(detector, 0.001)
    images = [photo(seed, 416) for seed in (1, 2)]
    posterior = calibrated(sharp, posterior, samples, images[0])
    limits = StaticLimits(boxes=60, candidates=400)
    export(sharp, posterior, tmp_path / "nano.onnx", images[0], samples, limits=limits)
    file, model = File(tmp_path / "nano.onnx"), model_of(sharp, posterior, samples)
    expected = [model(image) for image in images]
    assert max(map(len, expected)) > 3
    for image, found in zip(images, expected):
        check_rows(file(image), found)


def YOLOXAt(detector: Any, threshold: float) -> Any:
    detector.config = replace(detector.config, threshold=threshold)
    return detector


# any detector, any depth


def test_weights_below_the_head_by_forward_mode(tmp_path, tiny, train_frames, image) -> None:
    posterior = boxcov.fit(tiny, train_frames[:3], depth="neck", n_data=2000, prior_precision=1.0)
    export(tiny, posterior, tmp_path / "neck.onnx", image, 3, limits=StaticLimits(boxes=12))
    file = File(tmp_path / "neck.onnx")
    model = MCGLM(tiny, posterior, 3)
    for inputs in (image, torch.zeros_like(image)):
        check_rows(file(inputs), model(inputs))
    with pytest.raises(
        BoxcovError,
        match=r"lateral\.0\..* lie below the head. Take samples, or a posterior of the head",
    ):
        export(tiny, posterior, tmp_path / "neck.onnx", image, "exact")


def test_any_number_of_boxes_up_to_the_limit(
    tmp_path, tiny, posterior, train_frames, image
) -> None:
    before = {name: (id(p), p.requires_grad) for name, p in tiny.named_parameters()}
    said = export(
        tiny, posterior, tmp_path / "t.onnx", image, 5, seed=7, limits=StaticLimits(boxes=3)
    )
    assert {
        name: (id(p), p.requires_grad) for name, p in tiny.named_parameters()
    } == before  # the detector is left alone
    model = MCGLM(tiny, posterior, 5, seed=7)
    file = File(tmp_path / "t.onnx")
    counts = []
    for inputs in (torch.zeros_like(image), *(inputs for inputs, _ in train_frames[:8])):
        expected = model(inputs)
        counts.append(len(expected))
        check_rows(file(inputs), expected)
    assert min(counts) == 0
    assert max(counts) >= 3
    assert said == about(tmp_path / "t.onnx")
    assert said["boxcov"] == boxcov.__version__
    assert said["weights_sha256"] == posterior.fingerprint
    assert (said["method"], said["samples"], said["seed"], said["depth"]) == ("mcglm", 5, 7, "head")
    assert said["units"] == ["m", "m", "m", "m", "rad"]
    assert said["classes"] == list(tiny.classes)


# what is refused


def test_mismatches_are_refused_and_nothing_is_written(
    tmp_path, tiny, posterior, image, monkeypatch
) -> None:
    out = tmp_path / "t.onnx"
    with pytest.raises(BoxcovError, match="was made for weights with the fingerprint"):
        export(TinyCenter(seed=3).eval(), posterior, out, image)
    double = TinyCenter(seed=3).double().eval()
    with pytest.raises(BoxcovError, match=r"float32 on the CPU, got .*float64 on cpu"):
        export(double, replace(posterior, fingerprint=fingerprint(double)), out, image)
    with pytest.raises(BoxcovError, match="samples must be a whole number of at least 2"):
        export(tiny, posterior, out, image, 1)
    with pytest.raises(BoxcovError, match="boxes must be a whole number of at least 1"):
        StaticLimits(boxes=0)
    monkeypatch.setattr(TinyCenter, "select_static", lambda self, raw, limits: None)
    with pytest.raises(BoxcovError, match="has no select_static"):
        export(tiny, posterior, out, image, 2)
    assert not out.exists()


def test_a_graph_that_differs_is_not_written(tmp_path, tiny, posterior, image, monkeypatch) -> None:
    wrong = {torch.ops.aten.atan2.default: torch.add}
    monkeypatch.setattr(
        "boxcov.export.onnx.trace.DECOMPOSITIONS", {**trace.DECOMPOSITIONS, **wrong}
    )
    with pytest.raises(BoxcovError, match="gives other boxes than PyTorch on the example"):
        export(tiny, posterior, tmp_path / "t.onnx", image, 2, limits=StaticLimits(boxes=4))
    assert not (tmp_path / "t.onnx").exists()


def test_a_posterior_of_the_encoder_is_refused(tmp_path, pillar) -> None:
    detector, _ = pillar
    posterior = boxcov.fit(
        detector, clouds(detector.config, 1), depth=["encoder.layers.0.linear"], prior_precision=1.0
    )
    map_ = torch.zeros(1, 8, 32, 32)
    with pytest.raises(
        BoxcovError, match=r"encoder\.layers\.0\.linear\.weight, which is not in the graph"
    ):
        export(detector, posterior, tmp_path / "t.onnx", map_)


def test_other_files_are_refused(tmp_path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"nonsense")
    with pytest.raises(BoxcovError, match=r"x\.onnx: not an ONNX file of boxcov's"):
        about(tmp_path / "x.onnx")
    with pytest.raises(BoxcovError, match=r"y\.onnx: no such file"):
        about(tmp_path / "y.onnx")
