"""A posterior and its error model belong to one configuration of the detector, not only to weights.

Voxel size, range and strides cannot be seen in the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from boxcov import (
    MCI,
    BoxcovError,
    BoxcovWarning,
    Checkpoint,
    Detections,
    ExactGLM,
    Posterior,
    fit,
    wrap,
)
from boxcov.concatenation import concatenate
from boxcov.detectors.centerpoint import CenterPoint, Config
from boxcov.detectors.tiny import TinyCenter
from boxcov.detectors.yolox import YOLOX
from boxcov.detectors.yolox import Config as YOLOXConfig
from helpers.centerpoint_cases import frames, pillar_config
from helpers.error_models import make_error_model

NARROW = replace(  # the same weights on pillars of 0.3 m
    pillar_config(),
    point_range=(-4.8, -4.8, -5.0, 4.8, 4.8, 3.0),
    voxel_size=(0.3, 0.3, 8.0),
)
DEPTH = ["head.tasks.0.reg.3"]


@contextmanager
def assert_refused(*words: str) -> Iterator[None]:
    with pytest.raises(BoxcovError) as error:
        yield
    for word in words:
        assert word in str(error.value)


def twin(config: Config) -> CenterPoint:
    """A detector with the weights of every other one."""
    return CenterPoint(config).eval()


@pytest.fixture(scope="module")
def posterior() -> Posterior:
    return fit(twin(pillar_config()), frames(pillar_config()), depth=DEPTH, n_data=10)


@pytest.fixture
def path(posterior: Posterior, tmp_path: Path) -> Path:
    posterior.save(tmp_path / "posterior.safetensors")
    return tmp_path / "posterior.safetensors"


def test_another_grid_is_refused_by_name(posterior: Posterior, path: Path) -> None:
    words = ("voxel_size was 0.4 0.4 8, is 0.3 0.3 8", "point_range was -6.4", "configuration")
    with assert_refused(str(path), *words):
        Posterior.load(path, twin(NARROW))
    for use in (ExactGLM, MCI):
        with assert_refused(*words):
            use(twin(NARROW), posterior)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"encoder": replace(pillar_config().encoder, max_points=5)}, "encoder.max_points"),
        ({"encoder": replace(pillar_config().encoder, any_height=True)}, "encoder.any_height"),
    ],
)
def test_whatever_changes_boxes_is_named(path: Path, change: dict, name: str) -> None:
    with assert_refused(f"{name} was"):
        Posterior.load(path, twin(replace(pillar_config(), **change)))


def test_the_order_of_classes_is_part_of_it(tmp_path: Path) -> None:
    detector, renamed = TinyCenter(), TinyCenter()
    renamed.classes = tuple(reversed(detector.classes))
    images = [(torch.zeros(1, 1, 64, 64), [{"boxes": torch.zeros(0, 5), "labels": torch.zeros(0)}])]
    fitted = fit(detector, images, depth=["head.shared.0"], fisher="identity")
    with assert_refused("classes was"):
        ExactGLM(renamed, fitted)


def test_another_selection_binds_only_the_error_model(posterior: Posterior, path: Path) -> None:
    detector = twin(pillar_config())
    circle = replace(pillar_config().reporting, nms="circle")
    other = twin(replace(pillar_config(), reporting=circle))
    assert Posterior.load(path, other).configuration == detector.configuration()
    own = (detector.box_fields, detector.classes, "exact", posterior.fingerprint)
    model = replace(make_error_model(*own), configuration=detector.configuration())
    calibrated = posterior.with_error_model(model)
    assert ExactGLM(detector, calibrated).error_model is not None
    with assert_refused("selection.nms was rotated, is circle", "boxcov.calibrate"):
        ExactGLM(other, calibrated)
    calibrated.save(path)
    with assert_refused("selection.nms was rotated, is circle"):
        ExactGLM(other, Posterior.load(path, other))


def test_a_file_without_a_configuration_loads_with_a_warning(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["boxcov.posterior"])
    del about["configuration"]
    save_file(load_file(path), path, {"boxcov.posterior": json.dumps(about)})
    with pytest.warns(BoxcovWarning, match="did not store the configuration"):
        old = Posterior.load(path, twin(NARROW))
    assert old.configuration == {}
    ExactGLM(twin(NARROW), old)


def test_an_interrupted_fit_does_not_resume_on_another_grid(tmp_path: Path) -> None:
    def start(config: Config, resume: bool) -> None:
        checkpoint = Checkpoint(tmp_path / "fit.checkpoint", every_seconds=0, resume=resume)
        fit(twin(config), frames(pillar_config()), depth=DEPTH, checkpoint=checkpoint)

    start(pillar_config(), resume=False)
    start(pillar_config(), resume=True)
    with assert_refused("voxel_size was '0.4 0.4 8', is '0.3 0.3 8'"):
        start(NARROW, resume=True)


def test_results_hold_it_and_are_not_mixed(posterior: Posterior, tmp_path: Path) -> None:
    detector = twin(pillar_config())
    found = ExactGLM(detector, posterior)(frames(pillar_config())[0][0])
    found.save(tmp_path / "found.safetensors")
    written = Detections.load(tmp_path / "found.safetensors")
    assert written.meta["configuration"] == detector.configuration()
    other = dict(detector.configuration(), voxel_size="0.1 0.1 8")
    with assert_refused("configuration"):
        concatenate([found, replace(found, meta={**found.meta, "configuration": other})])
    with assert_refused("weights sha256"):
        concatenate([found, replace(found, meta={**found.meta, "weights_sha256": "0" * 64})])


def test_wrap_and_yolox_have_one_too() -> None:
    base = YOLOX(YOLOXConfig.named("nano"))
    assert base.configuration()["selection.threshold"] == "0.3"
    tiny = TinyCenter()
    wrapped = wrap(
        tiny,
        select=TinyCenter.select,
        decode=TinyCenter.decode,
        loss=TinyCenter.loss,
        parts={"head": "head"},
        box_fields=tiny.box_fields,
        classes=tiny.classes,
        configuration={"pixels": (416, 416.0), "selection": {"threshold": 0.3}},
    )
    own = wrapped.configuration()
    assert (own["pixels"], own["selection.threshold"]) == ("416 416", "0.3")
    assert own["classes"] == ", ".join(tiny.classes)
