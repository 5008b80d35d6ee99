"""Options: what they fill in, and what files and messages take from them."""

from __future__ import annotations

from pathlib import Path

from boxcov.pipeline.options import (
    DetectorOptions,
    EstimatorOptions,
    ReproduceCommand,
)
from boxcov.pipeline.reproduce.plan import Setting


def test_the_method_is_that_of_the_calibration() -> None:
    assert EstimatorOptions().as_calibrated("mcglm", 20).samples == 20
    assert EstimatorOptions("mcglm").as_calibrated("exact", None).method == "mcglm"


def test_the_shipped_posterior_is_that_of_the_shipped_detector() -> None:
    filled = EstimatorOptions("exact").for_detector("centerpoint:small")
    assert filled.posterior == Path("small")


def test_files_state_what_was_given_about_the_detector() -> None:
    options = DetectorOptions(detector="centerpoint:x.pth", config="voxel01")
    assert options.detector_meta == {"detector": "centerpoint:x.pth", "config": "voxel01"}


def test_a_reproduction_without_options_is_the_default() -> None:
    setting = Setting.from_options(ReproduceCommand(out=Path("r")))
    assert (setting.test, setting.test_split, setting.n_data) == ("simulated:clear", "test", 3500)
    assert (setting.count, setting.test_count) == (100, 24)
    assert (setting.slow, setting.calibration_count) == (40, 40)
    own = ReproduceCommand(out=Path("r"), detector="yolox:s.pth", data="coco:root", quick=True)
    setting = Setting.from_options(own)
    assert (setting.test, setting.n_data) == ("coco:root", None)
    assert (setting.count, setting.slow, setting.calibration_count) == (12, 2, 0)
