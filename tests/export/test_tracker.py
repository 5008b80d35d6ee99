"""The tracker against a Kalman filter written out, and with bad input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import pi
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import Detections
from boxcov.data import kitti, nuscenes
from boxcov.data.poses import BOX_FIELDS, Pose
from boxcov.errors import BoxcovError
from boxcov.export.tracker import MEASURED, BoxTrack, Tracker, TrackerSettings
from helpers.data_roots import real
from helpers.error_models import make_error_model

pytest.importorskip("stonesoup", reason="stonesoup is not installed")

INDEX = [BOX_FIELDS.index(name) for name in MEASURED]
CLASSES = ("car", "pedestrian")


def boxes(
    *rows: Sequence[float], variances: Sequence[float] = (0.04,), labels: Sequence[int] = ()
) -> Detections:
    """Cars at x y yaw vx vy with an epistemic covariance of their own."""
    values = torch.tensor([[r[0], r[1], 0, 2, 4, 1.5, r[2], r[3], r[4]] for r in rows])
    m = len(rows)
    C = torch.eye(9).repeat(m, 1, 1) * torch.tensor([*variances, *[0.04] * m])[:m, None, None]
    label = torch.tensor([*labels, *[0] * m])[:m]
    frame = torch.zeros(m, dtype=torch.long)
    return Detections(
        values.reshape(m, 9), torch.full((m,), 0.9), label, frame, BOX_FIELDS, CLASSES, C
    )


def calibrated(found: Detections) -> Detections:
    """The boxes with a random error model."""
    return make_error_model(BOX_FIELDS, CLASSES).apply(found)


def tracker(**settings: float) -> Tracker:
    return Tracker(TrackerSettings(**settings), residual=torch.zeros(9, 9))  # type: ignore[arg-type]


def last(one: Tracker, frames: Sequence[Detections], step: float = 0.5) -> list[BoxTrack]:
    for number, found in enumerate(frames):
        tracks = one.update(found, step * number)
    return tracks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_boxes_on_a_gpu_are_tracked() -> None:
    found = boxes((10.0, 0.0, 0.0, 0.0, 0.0))
    on_cpu, on_gpu = (last(tracker(), [found.to(device)] * 2) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(on_gpu[0].mean, on_cpu[0].mean)


def test_repr_of_a_track_is_one_line() -> None:
    (track,) = last(tracker(), [boxes((10.0, 2.0, 0.0, 0.0, 0.0))] * 3)
    assert repr(track).startswith("BoxTrack(1, label 0, 3 states, at x=10 y=2, P(object) ")


def test_white_noise_gives_the_textbook_filter():
    one = tracker(persistence=1e-9, acceleration=2.0, turning=0.1)
    rng = np.random.default_rng(0)
    z = np.array([[5 * t + rng.normal(0, 0.2), 1, 0.1, 5, 0] for t in (0, 0.5, 1.0, 1.5)])
    variances = (0.04, 0.09, 0.01, 0.25)
    frames = [boxes(row, variances=(v,)) for row, v in zip(z.tolist(), variances)]
    (track,) = last(one, frames)
    # x vx y vy yaw, written out
    H = np.array(
        [[1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 0, 0, 1, 0]]
    )
    F, Q = np.eye(5), np.diag([0, 0, 0, 0, 0.1 * 0.5])
    F[0, 1] = F[2, 3] = 0.5
    Q[:2, :2] = Q[2:4, 2:4] = 2.0 * np.array([[0.125 / 3, 0.125], [0.125, 0.5]])
    m, P = H.T @ z[0], np.diag([1e4, 1e3, 1e4, 1e3, 1e1])
    for k, (row, v) in enumerate(zip(z, variances)):
        if k:
            m, P = F @ m, F @ P @ F.T + Q
        S = H @ P @ H.T + v * np.eye(5)
        K = P @ H.T @ np.linalg.inv(S)
        m, P = m + K @ (row - H @ m), (np.eye(5) - K @ H) @ P
    np.testing.assert_allclose(track.mean, m, atol=1e-5)
    np.testing.assert_allclose(track.covariance, P, atol=1e-5)


def test_a_sure_box_moves_the_track_more():
    (sure,) = last(tracker(), [boxes([0, 0, 0, 0, 0]), boxes([0.3, 0, 0, 0, 0], variances=[0.001])])
    (vague,) = last(tracker(), [boxes([0, 0, 0, 0, 0]), boxes([0.3, 0, 0, 0, 0], variances=[0.4])])
    assert sure.mean[0] > 0.25 > 0.1 > vague.mean[0]


def test_barriers_stand_unless_told_otherwise():
    classes = ("barrier", "car")
    frames = [
        replace(boxes([0, 0, 0, 0, 0], [9, 0, 0, 0, 0], labels=[0, 1]), classes=classes)
        for _ in range(6)
    ]
    white = {"persistence": 1e-9}
    barrier, car = last(tracker(**white), frames)
    assert 2 * barrier.covariance[1, 1] < car.covariance[1, 1]  # of the velocity
    given = last(tracker(acceleration={"barrier": 1.0}, **white), frames)  # type: ignore[arg-type]
    np.testing.assert_allclose(given[0].covariance, car.covariance)
    every = last(tracker(acceleration=1.0, **white), frames)
    np.testing.assert_allclose(every[0].covariance, car.covariance)


def test_errors_that_last_are_not_averaged_away():
    frames = [boxes([0, 0, 0, 0, 0])] * 20
    still = {"acceleration": 1e-6, "turning": 1e-6}
    (white,) = last(tracker(persistence=0.0, **still), frames)
    (lasting,) = last(tracker(persistence=0.8, fading=1e6, **still), frames)
    assert white.covariance[4, 4] == pytest.approx(0.04 / 20, rel=0.05)
    assert lasting.covariance[4, 4] == pytest.approx(0.8 * 0.04, rel=0.1)


def test_an_estimate_is_as_far_off_as_it_says():
    """ANEES is 1 if the errors are those of the model: half of R lasts, half is white."""
    rng = np.random.default_rng(1)
    nees = []
    for _ in range(60):
        one = tracker(persistence=0.5, fading=1e6, acceleration=1e-6, turning=1e-6, gate=0.9999)
        bias = rng.normal(0, 0.02**0.5, 5)
        for k in range(6):
            error = bias + rng.normal(0, 0.02**0.5, 5)
            (track, *_) = one.update(boxes(error.tolist()), 0.5 * k)
        nees.append(track.mean @ np.linalg.solve(track.covariance, track.mean) / 5)
    assert np.mean(nees) == pytest.approx(1, abs=0.25)


def test_boxes_are_tracked_in_the_world():
    one = tracker()
    for k in range(4):  # the ego car drives 2 m per frame and turns; the car stands at (10, 3)
        turn = 0.1 * k
        R = torch.tensor(
            [[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]]
        )
        pose = Pose(R.double(), torch.tensor([2.0 * k, 0, 0]).double())
        x, y, _ = pose.inverse()(torch.tensor([[10.0, 3.0, 0.0]]).double())[0].tolist()
        tracks = one.update(boxes([x, y, 0.5 - turn, 0, 0]), 0.5 * k, pose)
    (track,) = tracks
    np.testing.assert_allclose(track.mean, [10, 0, 3, 0, 0.5], atol=1e-5)


def test_a_swapped_front_does_not_turn_the_track():
    frames = [boxes([0, 0, yaw, 0, 0]) for yaw in (0.2, 0.2, 0.2 - pi, 0.2)]
    (track,) = last(tracker(), frames)
    assert track.mean[4] == pytest.approx(0.2, abs=1e-6)
    frames = [boxes([0, 0, yaw, 0, 0]) for yaw in (0.2 - pi, 0.2, 0.2, 0.2)]
    (track,) = last(tracker(), frames)  # the first box was the wrong one
    assert np.cos(track.mean[4] - 0.2) == pytest.approx(1, abs=1e-6)


def test_student_updates_mistrust_outliers():
    frames = [boxes([0, 0, 0, 0, 0])] * 4 + [boxes([1.2, 0, 0, 0, 0])]
    settings = {"gate": 0.99999999, "acceleration": 0.01}
    (normal,) = last(tracker(**settings), frames)
    (robust,) = last(tracker(**settings, dof=3.0), frames)
    assert robust.mean[0] < 0.6 * normal.mean[0]
    assert normal.nis[-1] == pytest.approx(robust.nis[-1])


def test_classes_and_gates_keep_objects_apart():
    one = tracker()
    one.update(boxes([0, 0, 0, 0, 0], [9, 0, 0, 0, 0], labels=[0, 1]), 0.0)
    tracks = one.update(boxes([0, 0, 0, 0, 0], [9, 0, 0, 0, 0], labels=[1, 1]), 0.5)
    rows = {track.number: track.row for track in tracks}
    assert rows == {1: None, 2: 1, 3: 0}  # a pedestrian where the car was is another object
    far = one.update(boxes([0, 40, 0, 0, 0]), 1.0)
    assert [track.row for track in far] == [None, None, None, 0]


def test_regions_of_the_error_model_are_the_gates():
    found = calibrated(boxes([0, 0, 0, 0, 0]))
    narrow, wide = (
        replace(found, region_widths=torch.full_like(found.region_widths, width))
        for width in (0.05, 5.0)
    )
    step = replace(found, boxes=found.boxes + torch.tensor([2.0, *[0.0] * 8]))
    endless = replace(found, region_widths=torch.full_like(found.region_widths, torch.inf))
    for gate, rows in ((narrow, 2), (wide, 1), (endless, 2)):  # endless: that of a Gaussian
        one = Tracker(TrackerSettings(acceleration=1e-4, birth=0.0, death=0.0))
        one.update(replace(found, predictive=0.01 * torch.eye(9)[None]), 0.0)
        one.update(replace(found, predictive=0.01 * torch.eye(9)[None]), 0.5)
        moved = replace(
            step, region_widths=gate.region_widths, predictive=0.01 * torch.eye(9)[None]
        )
        assert len(one.update(moved, 1.0)) == rows


def test_risk_decides_about_birth_and_death():
    found = calibrated(boxes([0, 0, 0, 0, 0]))
    clutter = replace(found, no_object=torch.tensor([0.8]))
    thing = replace(found, no_object=torch.tensor([0.1]))
    assert Tracker().update(clutter, 0.0) == []
    one = Tracker()
    (track,) = one.update(thing, 0.0)
    assert track.existence == pytest.approx(0.9)
    one.update(clutter, 0.5)
    assert 0.2 < track.existence < 0.9
    lives = [len(one.update(thing[:0], 1.0 + 0.5 * k)) for k in range(8)]
    assert lives == sorted(lives, reverse=True)
    assert lives[-1] == 0


@pytest.mark.parametrize("detection", [0.6, 1.0])
def test_tracks_of_certain_boxes_end_too(detection: float):
    certain = replace(boxes([0, 0, 0, 0, 0]), scores=torch.ones(1))
    tracks = last(tracker(detection=detection), [certain] + [certain[:0]] * 40)
    assert tracks == []


def test_bfloat16_boxes_are_tracked():
    found = boxes([8, 0, 0, 0, 0])
    low = {name: getattr(found, name).bfloat16() for name in ("boxes", "scores", "covariance")}
    (track,) = last(tracker(), [replace(found, **low)] * 2)
    assert track.mean[0] == pytest.approx(8)


# real drives: boxes that are the labels with errors of a known covariance


def follow(drive: Any, frames: int, with_poses: bool) -> list[dict[int, BoxTrack]]:
    """Return which track follows each identity, frame by frame."""
    rng = torch.Generator().manual_seed(0)
    one, found = tracker(persistence=1e-9, noise=1.0), []
    for item in range(frames):
        _, (target,) = drive[item]
        place = target["boxes"] + 0.1 * torch.randn(target["boxes"].shape, generator=rng)
        m, none = len(place), torch.zeros(len(place), dtype=torch.long)
        C = torch.where(place.isnan(), 100.0, 0.01).diag_embed()  # KITTI has no velocities
        seen = Detections(
            *(place.nan_to_num(), torch.ones(m), target["labels"], none),
            *(BOX_FIELDS, drive_classes(drive), C),
        )
        pose = drive.pose(item) if with_poses else None
        tracks = one.update(seen, 1e-6 * drive.timestamp(item), pose)
        ids = target["ids"].tolist()
        found.append({ids[t.row]: replace(t) for t in tracks if t.row is not None})
    return found


def drive_classes(drive: Any) -> tuple[str, ...]:
    return getattr(drive, "classes", nuscenes.CLASSES)


def kept(found: list[dict[int, BoxTrack]]) -> float:
    """Return the share of objects whose track is that of the frame before."""
    both = [
        before[i].number == now[i].number
        for before, now in pairwise(found)
        for i in before.keys() & now.keys()
    ]
    return float(np.mean(both))


def test_a_real_scene_is_tracked_in_the_world():
    (scene,) = nuscenes.sequences(real("nuscenes"), sweeps=1)
    found = follow(scene, 5, with_poses=True)
    assert kept(found) > 0.95
    barriers = [t for t in found[-1].values() if nuscenes.CLASSES[t.label] == "barrier"]
    # the ego car drives, the barriers stand
    assert float((scene.pose(4).t - scene.pose(0).t).norm()) > 5
    assert len(barriers) > 10
    assert float(np.median([np.hypot(*t.mean[[1, 3]]) for t in barriers])) < 0.2


def test_a_real_drive_without_poses_is_tracked():
    (drive,) = kitti.sequences(real("kitti"), classes=kitti.TYPES, rate=5)
    found = follow(drive, 10, with_poses=False)
    assert kept(found) > 0.95
    assert len(found[-1]) == len(drive[9][1][0]["ids"])


# bad input


def test_frames_out_of_order_are_refused():
    one = tracker()
    one.update(boxes([0, 0, 0, 0, 0]), 1.0)
    for seconds in (1.0, 0.5):
        with pytest.raises(BoxcovError, match=r"order of time: .* s follows 1\.0 s"):
            one.update(boxes([0, 0, 0, 0, 0]), seconds)


@pytest.mark.parametrize("time", [None, float("nan"), "now"])
def test_a_frame_without_a_time_is_refused(time: Any):
    with pytest.raises(BoxcovError, match=f"must be a number of seconds, got '?{time}"):
        tracker().update(boxes([0, 0, 0, 0, 0]), time)


def test_gaps_of_an_hour_are_refused():
    """The time stamps of a simulated drive are microseconds from 0."""
    one = tracker()
    one.update(boxes([0, 0, 0, 0, 0]), 0)
    with pytest.raises(BoxcovError, match=r"500000\.0 s follows 0\.0 s, more than an hour later"):
        one.update(boxes([0, 0, 0, 0, 0]), 500000)
    assert len(one.update(boxes([0, 0, 0, 0, 0]), 0.5)) == 1


def test_a_matrix_is_not_a_pose():
    with pytest.raises(BoxcovError, match=r"pose must be a boxcov\.data\.poses\.Pose, got ndarray"):
        tracker().update(boxes([0, 0, 0, 0, 0]), 0.0, np.eye(4))  # type: ignore[arg-type]


def test_microseconds_are_not_seconds():
    """As nuScenes states them; 0-dimensional tensors and epoch seconds are times."""
    with pytest.raises(BoxcovError, match=r"1\.5324e\+15 is no time in seconds: .* microseconds"):
        tracker().update(boxes([0, 0, 0, 0, 0]), 1532402927650000)
    one = tracker()
    one.update(boxes([0, 0, 0, 0, 0]), torch.tensor(1532402927.65, dtype=torch.float64))  # type: ignore[arg-type]
    assert len(one.update(boxes([0, 0, 0, 0, 0]), 1532402928.15)) == 1


def test_other_classes_than_before_are_refused():
    one, found = tracker(), boxes([0, 0, 0, 0, 0])
    one.update(found, 0.0)
    with pytest.raises(BoxcovError, match=r"the classes are .*, and were car, .* before"):
        one.update(replace(found, classes=found.classes[::-1]), 0.5)


def test_a_pose_that_is_not_finite_is_refused():
    pose = Pose(torch.eye(3).double(), torch.tensor([0.0, float("nan"), 0.0]).double())
    with pytest.raises(BoxcovError, match="the pose is not finite"):
        tracker().update(boxes([0, 0, 0, 0, 0]), 0.0, pose)


def test_a_missing_ego_pose_is_named():
    one = tracker()
    pose = Pose(torch.eye(3).double(), torch.zeros(3).double())
    one.update(boxes([0, 0, 0, 0, 0]), 0.0, pose)
    with pytest.raises(BoxcovError, match=r"frame at 0\.5 s has no ego pose"):
        one.update(boxes([0, 0, 0, 0, 0]), 0.5)


def test_empty_frames_and_single_boxes():
    one, nothing = tracker(), boxes([0, 0, 0, 0, 0])[:0]
    assert one.update(nothing, 0.0) == []
    (first,) = one.update(boxes([0, 0, 0, 0, 0]), 0.5)
    before = first.covariance[0, 0]
    (still,) = one.update(nothing, 1.0)
    assert still is first
    assert first.row is None
    assert first.covariance[0, 0] > before


def test_classes_that_never_appear_need_no_settings():
    one = tracker(acceleration={"pedestrian": 0.1})  # type: ignore[arg-type]
    assert len(last(one, [boxes([0, 0, 0, 0, 0])] * 2)) == 1


def test_settings_of_unknown_classes_are_refused():
    one = tracker(acceleration={"Car": 0.1})  # type: ignore[arg-type]
    with pytest.raises(BoxcovError, match="acceleration has Car, but the classes are car"):
        one.update(boxes([0, 0, 0, 0, 0]), 0.0)
    with pytest.raises(BoxcovError, match="acceleration must be above 0"):
        TrackerSettings(acceleration={"car": 1.0, "pedestrian": 0.0})


def test_unfit_boxes_are_refused():
    found = boxes([0, 0, 0, 0, 0])
    with pytest.raises(BoxcovError, match="several frames"):
        tracker().update(replace(boxes(*[[0.0] * 5] * 2), frame=torch.tensor([0, 1])), 0.0)
    with pytest.raises(BoxcovError, match="no measurement noise R"):
        Tracker().update(found, 0.0)
    with pytest.raises(BoxcovError, match="vx of some boxes is not finite"):
        tracker().update(boxes([0, 0, 0, float("nan"), 0]), 0.0)
    one = Tracker()  # a refused frame leaves it as it was
    with pytest.raises(BoxcovError, match="no measurement noise R"):
        one.update(found, 0.0)
    assert len(one.update(replace(calibrated(found), classes=("bus", "bike")), 0.0)) <= 1
    image = Detections(
        torch.ones(1, 4), torch.ones(1), *[torch.zeros(1).long()] * 2, tuple("abcd"), ("car",)
    )
    with pytest.raises(BoxcovError):
        tracker().update(replace(image, covariance=torch.eye(4)[None]), 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("persistence", 1.0), ("gate", 1.5), ("birth", -0.1), ("fading", 0.0), ("dof", float("nan"))],
)
def test_settings_out_of_range_are_named(name: str, value: float):
    with pytest.raises(BoxcovError, match=f"^{name} must"):
        TrackerSettings(**{name: value})  # type: ignore[arg-type]
