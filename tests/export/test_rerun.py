from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import BoxcovError
from boxcov.export.rerun import blueprint, ellipsoids, log, write_rrd
from boxcov.outlines import risk_colors
from helpers.export_boxes import covariances, in_image, in_space, with_error_model


def matrix(q: np.ndarray) -> np.ndarray:
    from boxcov.data.poses import rotation_matrix

    return rotation_matrix(torch.as_tensor(q[:, [3, 0, 1, 2]])).numpy()


def test_ellipsoids_reproduce_the_covariances() -> None:
    C = covariances(20, 3).numpy()
    half_axes, quaternions = ellipsoids(C)
    R = matrix(quaternions)
    np.testing.assert_allclose(
        R @ (half_axes[:, :, None] ** 2 * R.transpose(0, 2, 1)), C, atol=1e-12
    )
    assert np.isfinite(ellipsoids(np.zeros((1, 3, 3)))[1]).all()


def test_a_recording_contains_the_boxes(tmp_path: Path) -> None:
    rr = pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    found = in_space(6, frames=2)
    points = [([torch.randn(50, 5)], [{}]), ([torch.randn(40, 5)], [{}])]
    write_rrd(tmp_path / "boxes.rrd", found, points)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["boxes.rrd"]
    content = (tmp_path / "boxes.rrd").read_bytes()
    assert content[:3] == b"RRF"
    entities = [
        b"world/boxes",
        b"world/points",
        b"world/epistemic/1_sigma",
        b"world/epistemic/3_sigma",
        b"world/predictive/1_sigma",
    ]
    assert all(entity in content for entity in entities), rr.__version__


def test_a_recording_of_images(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    images = [(255 * torch.rand(1, 3, 64, 64), [{}])]
    write_rrd(tmp_path / "images.rrd", in_image(calibrated=False), images)
    content = (tmp_path / "images.rrd").read_bytes()
    assert b"image/boxes" in content
    assert b"image/epistemic/3_sigma" in content
    assert b"image/predictive" not in content
    write_rrd(tmp_path / "none.rrd", in_space()[:0])


def test_risk_is_shown_by_colour_and_label() -> None:
    found = with_error_model(in_space(3))
    chosen = replace(
        found, no_object=torch.tensor([0.0, 0.5, 1.0]), iou_below=torch.zeros_like(found.iou_below)
    )
    low, middle, high = risk_colors(chosen.risk.numpy()).astype(int)
    assert low[2] > 200 > 60 > low[0]  # blue
    assert middle[0] > middle[1] > 100 > middle[2]  # amber
    assert high[0] > 200 > 60 > high[1]  # red
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    logged: dict[str, Any] = {}
    log(chosen, recording=SimpleNamespace(log=logged.__setitem__))
    labels = logged["world/boxes"].labels.as_arrow_array().to_pylist()
    assert [label.split(", ")[1] for label in labels] == ["risk 0 %", "risk 50 %", "risk 100 %"]
    assert logged["risk/mean"].scalars.as_arrow_array().to_pylist() == [0.5]


def test_ellipsoids_of_unknown_errors_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found, logged = in_space(3), {}
    predictive = found.predictive.clone()
    predictive[:, 2] = predictive[:, :, 2] = torch.nan  # too few labels of z
    rr = SimpleNamespace(Boxes3D=dict, Ellipsoids3D=dict, Scalars=float)
    monkeypatch.setitem(sys.modules, "rerun", rr)
    recording = SimpleNamespace(log=logged.__setitem__)
    log(replace(found, predictive=predictive), recording=recording)
    assert set(logged) >= {"world/boxes", "world/epistemic/1_sigma"}
    assert "world/predictive/1_sigma" not in logged
    log(found, recording=recording)
    assert "world/predictive/1_sigma" in logged


def test_both_corners_have_their_ellipses() -> None:
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    logged: dict[str, Any] = {}
    found = in_image(3)
    log(found, recording=SimpleNamespace(log=logged.__setitem__))
    lines = np.array(logged["image/epistemic/3_sigma"].strips.as_arrow_array().to_pylist())
    assert lines.shape == (6, 60, 2)
    assert np.allclose(
        lines[:, :-1].mean(1), found.boxes.reshape(3, 2, 2).swapaxes(0, 1).reshape(-1, 2)
    )
    highest = lines.max(1) - lines.mean(1)
    deviations = found.covariance.diagonal(dim1=1, dim2=2).sqrt().reshape(3, 2, 2)
    expected = 3 * deviations.swapaxes(0, 1).reshape(-1, 2).numpy()
    np.testing.assert_allclose(highest, expected, rtol=0.05)


@pytest.mark.parametrize("name", ["\x1b[31m\u202e\u2028$x$", "W" * 100_000])
def test_hostile_names_are_recorded(tmp_path: Path, name: str) -> None:
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    for number, found in enumerate((in_space(3), in_image(3), in_image(0))):
        classes = tuple(f"{name}{i}" for i in range(len(found.classes)))
        write_rrd(tmp_path / f"{number}.rrd", replace(found, classes=classes))
        assert (tmp_path / f"{number}.rrd").stat().st_size < 400_000


def test_frames_are_logged_live(tmp_path: Path) -> None:
    rr = pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    recording = rr.RecordingStream("boxcov_test")
    memory = recording.memory_recording()
    recording.send_blueprint(blueprint(in_space().fields))
    for number in range(2):
        recording.set_time("frame", sequence=number)
        log(with_error_model(in_space(4)), [torch.randn(20, 5)], recording)
    content = memory.drain_as_bytes()
    for entity in (b"world/boxes", b"world/points", b"risk/highest", b"risk/mean"):
        assert entity in content
    assert b"Boxes, coloured by risk" in content  # of the blueprint


def test_a_recording_holds_its_layout(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    write_rrd(tmp_path / "boxes.rrd", in_image())
    content = (tmp_path / "boxes.rrd").read_bytes()
    assert b"Boxes, coloured by risk" in content
    assert b"2D" in content


def test_boxes_of_several_frames_are_refused() -> None:
    with pytest.raises(BoxcovError, match="a frame of a recording: boxes of several frames"):
        log(in_space(4, frames=2))


def test_unsupported_boxes_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    with pytest.raises(BoxcovError, match="rerun takes boxes of x1 y1 x2 y2 or x y w l yaw"):
        write_rrd(
            tmp_path / "x.rrd", in_space(fields=("x", "y", "z", "w", "l", "h", "theta", "vx", "vy"))
        )
