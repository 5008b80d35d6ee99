"""No file, message or measurement carries a number that is out of range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import Detections
from boxcov.data.covariance_json import pair_with_frames
from boxcov.errors import BoxcovError, NotFiniteError
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.evaluate.label_order import box_values
from boxcov.evaluate.wrong_labels import disagreement
from boxcov.export import fiftyone, kalman, rerun, ros, supervision, tables
from boxcov.pipeline.options import MessageOptions
from boxcov.pipeline.output_format import write_detections
from boxcov.report.canvas import draw_from_above
from boxcov.report.frame_plot import write_plot
from helpers.error_models import make_error_model

FIELDS = ("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")


def boxes() -> Detections:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(3, 9, 9, generator=generator)
    zero = torch.zeros(3, dtype=torch.long)
    plain = Detections(
        torch.rand(3, 9, generator=generator).double() + 1,
        *(torch.rand(3, generator=generator), zero, zero, FIELDS, ("car", "bus")),
        A @ A.transpose(1, 2),
    )
    return make_error_model(FIELDS, plain.classes).apply(plain)


def spoil(name: str, value: float) -> Detections:
    """The boxes with one wrong number in the second one."""
    found = boxes()
    numbers = getattr(found, name).clone()
    numbers[(1,) + (0,) * (numbers.dim() - 1)] = value
    return replace(found, **{name: numbers})


WRONG = {
    "negative variance": ("predictive", -5.0),
    "tiny negative variance": ("covariance", -1e-16),
    "NaN variance": ("predictive", float("nan")),
    "infinite variance": ("covariance", float("inf")),
    "scale of 0": ("scale", 0.0),
    "negative half width": ("region_widths", -1.0),
    "probability above 1": ("no_object", 1.5),
    "label -1": ("labels", -1),
    "infinite position": ("boxes", float("inf")),
    "position beyond float32": ("boxes", 1e300),
    "NaN score": ("scores", float("nan")),
}
WRITERS: dict[str, Callable[[Path, Detections], Any]] = {
    "native": lambda path, found: found.save(path),
    "csv": lambda path, found: tables.write_csv(path, found),
    "columns": lambda path, found: tables.columns(found),
    "rerun": lambda path, found: rerun.write_rrd(path, found),
    "live": lambda path, found: rerun.log(found),
    "supervision": lambda path, found: supervision.to_supervision(found),
    "fiftyone": lambda path, found: fiftyone.to_fiftyone(found),
    "kalman": lambda path, found: kalman.measurements(found),
    "vision_msgs": lambda path, found: ros.detection3d_array(found, "map"),
    "autoware": lambda path, found: ros.detected_objects(found, "map"),
    "poses": lambda path, found: ros.poses(found, "epistemic"),
    "result files": lambda path, found: list(pair_with_frames(["7"], [found], found.classes)),
    "ros file": lambda path, found: write_detections("ros", path, None, found),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("writer", WRITERS)
def test_numbers_out_of_range_do_not_leave(tmp_path: Path, writer: str, wrong: str) -> None:
    path = tmp_path / "out"
    with pytest.raises(NotFiniteError, match="of 1 of 3 boxes is not"):
        WRITERS[writer](path, spoil(*WRONG[wrong]))
    assert not list(tmp_path.iterdir())


def test_files_out_of_range_are_refused(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "boxes.safetensors"
    for name, value in WRONG.values():
        with monkeypatch.context() as patch:
            patch.setattr("boxcov.detections.check_result", lambda *args: True)
            spoil(name, value).save(path)
        with pytest.raises(BoxcovError, match=r"boxes\.safetensors.*of 1 of 3 boxes is not"):
            Detections.load(path)


def test_ros_files_are_valid_json(tmp_path: Path) -> None:
    """Metadata with a NaN would make a file that other readers refuse."""
    found = boxes()
    found = replace(found, meta={**found.meta, "loss": float("nan")})
    with pytest.raises(BoxcovError, match="NaN or infinite numbers, which JSON cannot express"):
        write_detections("ros", tmp_path / "out", None, found, MessageOptions())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, lambda t: t.clone().requires_grad_()])
def test_numbers_are_read_in_any_precision(
    change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    exact = boxes()
    names = [n for n, t in exact._tensors() if t.is_floating_point() and n != "covariance"]
    changed = {name: change(getattr(exact, name)) for name in names if name != "predictive"}
    found = replace(exact, **changed)
    truth = GroundTruth(exact.boxes.numpy(), exact.labels.numpy(), exact.frame.numpy(), 1)
    records = match_detections(found, truth, threshold=-1.0)
    np.testing.assert_allclose(records.risk, exact.risk, atol=0.01)
    np.testing.assert_allclose(box_values(found, "risk"), box_values(exact, "risk"), rtol=0.02)
    assert len(disagreement(found, truth).value) >= 3
    assert not kalman.measurements(found, ("x", "y")).R.requires_grad
    tables.write_csv(tmp_path / "boxes.csv", found)
    write_plot(tmp_path / "plot.png", found)
    assert draw_from_above(found, np.zeros((1, 2))).size == (960, 960)
