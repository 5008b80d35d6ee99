from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcov import Detections
from boxcov.data import nuscenes
from boxcov.data.poses import BOX_FIELDS, transform_detections
from boxcov.errors import BoxcovError
from helpers.data_roots import CAR_SPEED, car_centre, nuscenes_root, random_detections
from helpers.error_models import make_error_model


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return nuscenes_root(tmp_path / "set")


def found(frames: nuscenes.NuScenes, number: int) -> Detections:
    (target,) = frames[number][1]
    return random_detections(
        target["boxes"].nan_to_num(0.0), target["labels"], nuscenes.CLASSES, seed=number
    )


def test_results_round_trip(root: Path, tmp_path: Path) -> None:
    frames = nuscenes.frames(root, sweeps=1)
    path = tmp_path / "results.json"
    nuscenes.write_results(path, frames, (found(frames, number) for number in range(len(frames))))
    content = json.loads(path.read_text())
    assert content["meta"]["covariance_fields"] == list(BOX_FIELDS)
    assert content["meta"]["covariance_frame"] == "global"
    assert content["meta"]["uncertainty"] == {"method": "mcglm", "samples": 10}
    assert list(content["results"]) == frames.tokens
    back = nuscenes.read_results(path)
    for number, token in enumerate(frames.tokens):
        there = transform_detections(found(frames, number), frames.pose(number))
        there = there[there.scores.argsort(descending=True)]
        assert back[token].meta == there.meta
        assert torch.allclose(back[token].boxes, there.boxes, atol=1e-9)
        assert torch.equal(back[token].labels, there.labels)
        assert torch.allclose(back[token].scores, there.scores.double())
        assert torch.allclose(back[token].covariance, there.covariance, rtol=1e-7, atol=1e-12)
        entry = content["results"][token][0]
        assert len(entry["covariance"]) == 81
        assert entry["uncertainty"] == pytest.approx(float(there.uncertainty[0]))
    # the car is where the annotation has it, and its front too
    car = back["sample-1"][back["sample-1"].labels == 0].boxes[0]
    assert torch.allclose(car[:3], torch.from_numpy(car_centre(0.5)), atol=1e-5)
    assert float(car[6]) == pytest.approx(
        np.radians(-18), abs=2e-3
    )  # the sensor is tilted by 2 degrees
    assert torch.allclose(car[7:], torch.from_numpy(CAR_SPEED), atol=1e-2)


def test_predictive_covariances_are_written_and_read(root: Path, tmp_path: Path) -> None:
    frames = nuscenes.frames(root, sweeps=1)
    given = [
        replace(one, predictive=3 * one.covariance)
        for one in (found(frames, number) for number in range(4))
    ]
    nuscenes.write_results(tmp_path / "r.json", frames, given)
    for back in nuscenes.read_results(tmp_path / "r.json").values():
        assert torch.allclose(back.predictive, 3 * back.covariance, rtol=1e-6, atol=1e-12)
    nuscenes.write_results(
        tmp_path / "r.json", frames, [found(frames, number) for number in range(4)]
    )
    assert "predictive" not in (tmp_path / "r.json").read_text()
    with pytest.raises(BoxcovError, match="predictive covariance of 3 of 3 boxes is not finite"):
        nuscenes.write_results(
            tmp_path / "r.json",
            frames,
            [replace(given[0], predictive=given[0].predictive * torch.inf), *given[1:]],
        )


def test_500_best_boxes_are_written_with_nan_velocities(root: Path, tmp_path: Path) -> None:
    frames = nuscenes.frames(root, sweeps=1)[:1]
    boxes = torch.ones(600, 9)
    boxes[:, 7:] = torch.nan
    many = random_detections(boxes, torch.full((600,), 8), nuscenes.CLASSES)
    nuscenes.write_results(tmp_path / "r.json", frames, [many])
    (back,) = nuscenes.read_results(tmp_path / "r.json").values()
    assert torch.equal(back.scores, many.scores.sort(descending=True).values[:500].double())
    assert bool(back.boxes[:, 7:].isnan().all())
    entries = json.loads((tmp_path / "r.json").read_text())["results"]["sample-0"]
    assert {entry["attribute_name"] for entry in entries} == {"pedestrian.standing"}


def test_plain_detections_have_no_covariance_keys(root: Path, tmp_path: Path) -> None:
    frames = nuscenes.frames(root, sweeps=1)
    nuscenes.write_results(
        tmp_path / "r.json", frames, [replace(found(frames, i), covariance=None) for i in range(4)]
    )
    assert "covariance" not in (tmp_path / "r.json").read_text()
    assert all(
        back.covariance is None for back in nuscenes.read_results(tmp_path / "r.json").values()
    )


def test_frames_without_detections_are_in_the_file(root: Path, tmp_path: Path) -> None:
    frames = nuscenes.frames(root, sweeps=1)
    nuscenes.write_results(tmp_path / "r.json", frames, [found(frames, i)[:0] for i in range(4)])
    back = nuscenes.read_results(tmp_path / "r.json")
    assert list(back) == frames.tokens
    assert all(
        len(nothing) == 0 and nothing.covariance.shape == (0, 9, 9) for nothing in back.values()
    )


def test_results_that_cannot_be_written_leave_the_old_file(root: Path, tmp_path: Path) -> None:
    frames = nuscenes.frames(root, sweeps=1)
    good = [found(frames, i) for i in range(4)]
    path = tmp_path / "r.json"
    path.write_text("old")
    nan = good[0].boxes.clone()
    nan[1, 2] = torch.nan
    wrong = {
        "detections of 3 frames for 4": good[:3],
        "detections of more frames": [*good, good[0]],
        "frame sample-0: the position or size of 1 of 3 boxes is not finite": [
            replace(good[0], boxes=nan),
            *good[1:],
        ],
        "covariance of 3 of 3 boxes is not finite": [
            replace(good[0], covariance=good[0].covariance * torch.inf),
            *good[1:],
        ],
        "no class tram": [replace(good[0], classes=("tram",) * 10), *good[1:]],
        "several frames": [replace(good[0], frame=torch.tensor([0, 0, 1])), *good[1:]],
        "frame sample-2 were not computed like": [
            *good[:2],
            replace(good[2], meta={"method": "glm"}),
            good[3],
        ],
        "takes boxes of x y z w l h yaw vx vy": [
            replace(d, fields=("a", *BOX_FIELDS[1:])) for d in good
        ],
    }
    for words, detections in wrong.items():
        with pytest.raises(BoxcovError, match=words):
            nuscenes.write_results(path, frames, detections)
        assert path.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "set"]


def test_damaged_results(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(BoxcovError, match=r"r\.json: no such file"):
        nuscenes.read_results(path)
    box = {
        "translation": [0, 0, 0],
        "size": [1, 1, 1],
        "rotation": [1, 0, 0, 0],
        "velocity": [0, 0],
        "detection_name": "car",
    }
    for content in ("", "[]", '{"meta": {}}', json.dumps({"meta": {}, "results": {"a": [box]}})):
        path.write_text(content)
        with pytest.raises(BoxcovError, match="not a nuScenes result file"):
            nuscenes.read_results(path)
    path.write_text(
        json.dumps(
            {
                "meta": {},
                "results": {"a": [{**box, "detection_score": 1.0, "detection_name": "tram"}]},
            }
        )
    )
    with pytest.raises(BoxcovError, match="no class tram"):
        nuscenes.read_results(path)


def test_results_of_an_error_model(root: Path, tmp_path: Path) -> None:
    frames = nuscenes.frames(root, sweeps=1)
    error_model = make_error_model(BOX_FIELDS, nuscenes.CLASSES)
    given = [error_model.apply(found(frames, number)) for number in range(4)]
    given[3] = given[3][:0]
    given[0].joint_widths[:, -1] = torch.inf  # too few boxes for the highest level
    nuscenes.write_results(tmp_path / "r.json", frames, given)
    text = (tmp_path / "r.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    back = nuscenes.read_results(tmp_path / "r.json")
    for number, token in enumerate(frames.tokens):
        there = transform_detections(given[number], frames.pose(number))
        there = there[there.scores.argsort(descending=True)]
        assert back[token].meta == there.meta
        for name in (
            *("no_object", "iou_below", "flipped", "scale", "predictive"),
            *("region_widths", "joint_widths", "misplaced", "risk"),
        ):
            expected = getattr(there, name).double()
            own = getattr(back[token], name)
            torch.testing.assert_close(own, expected, rtol=1e-7, atol=1e-9, equal_nan=True)
