"""nuScenes frames and results against the official devkit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from boxcov.data import nuscenes
from boxcov.data.nuscenes.classes import CATEGORIES, attribute
from helpers.data_roots import (
    VERSION,
    random_detections,
    real,
)


def test_the_devkit_has_the_same_splits_and_classes() -> None:
    pytest.importorskip("nuscenes")
    from nuscenes.eval.detection.constants import DETECTION_NAMES
    from nuscenes.eval.detection.utils import (
        category_to_detection_name,
        detection_name_to_rel_attributes,
    )
    from nuscenes.utils.color_map import get_colormap
    from nuscenes.utils.splits import create_splits_scenes

    assert sorted(nuscenes.CLASSES) == sorted(DETECTION_NAMES)
    assert all(CATEGORIES.get(name) == category_to_detection_name(name) for name in get_colormap())
    assert set(CATEGORIES) <= set(get_colormap())
    for name in nuscenes.CLASSES:
        allowed = detection_name_to_rel_attributes(name) or [""]
        assert {attribute(name, 0.0), attribute(name, 5.0), attribute(name, float("nan"))} <= set(
            allowed
        )
    for split, scenes in create_splits_scenes().items():
        assert nuscenes.scene_names(split) == scenes


def test_the_devkit_agrees_on_boxes_and_velocities() -> None:
    devkit = pytest.importorskip("nuscenes")
    from nuscenes.eval.common.utils import quaternion_yaw
    from pyquaternion import Quaternion

    root = real("nuscenes")
    kit = devkit.NuScenes(VERSION, str(root), verbose=False)
    frames = nuscenes.frames(root)
    for number in range(0, len(frames), 3):
        boxes, _, _ = frames._boxes(frames.indices[number])
        lidar = kit.get("sample", frames.tokens[number])["data"]["LIDAR_TOP"]
        reading = kit.get("sample_data", lidar)
        turns = [
            kit.get(table, reading[f"{table}_token"])["rotation"]
            for table in ("ego_pose", "calibrated_sensor")
        ]
        for box, theirs in zip(boxes.numpy(), kit.get_sample_data(lidar)[1], strict=True):
            velocity = kit.box_velocity(theirs.token) * [1, 1, 0]
            for turn in turns:
                velocity = Quaternion(turn).inverse.rotate(velocity)
            assert np.allclose(box[:6], [*theirs.center, *theirs.wlh], atol=1e-9)
            assert np.allclose(
                np.exp(1j * box[6]), np.exp(1j * quaternion_yaw(theirs.orientation)), atol=1e-9
            )
            # the devkit subtracts seconds since 1970 in float64: accurate to 2e-7 s
            assert np.allclose(box[7:], velocity[:2], rtol=1e-6, atol=1e-6, equal_nan=True)


def test_official_evaluation_ignores_the_covariance(tmp_path: Path) -> None:
    devkit = pytest.importorskip("nuscenes")
    from nuscenes.eval.common.config import config_factory
    from nuscenes.eval.detection.evaluate import DetectionEval

    root = real("nuscenes")
    frames = nuscenes.frames(root, sweeps=1)
    truth = []
    for seed, (_, (target,)) in enumerate(frames):
        seen = target["points"] > 0  # the evaluation knows no others
        truth.append(
            random_detections(target["boxes"][seen], target["labels"][seen], nuscenes.CLASSES, seed)
        )
    kit = devkit.NuScenes(VERSION, str(root), verbose=False)
    scores = []
    for name, detections in (
        ("with", truth),
        ("without", [replace(d, covariance=None) for d in truth]),
    ):
        nuscenes.write_results(tmp_path / f"{name}.json", frames, detections)
        config = config_factory("detection_cvpr_2019")
        official = DetectionEval(
            kit,
            config,
            str(tmp_path / f"{name}.json"),
            "train",
            str(tmp_path / name),
            verbose=False,
        )
        metrics = official.evaluate()[0].serialize()
        metrics.pop("eval_time")
        scores.append(json.dumps(metrics, sort_keys=True))
    assert scores[0] == scores[1]
    metrics = json.loads(scores[0])
    present = {nuscenes.CLASSES[int(label)] for d in truth for label in d.labels}
    assert all(metrics["mean_dist_aps"][name] > 0.99 for name in present)
    assert metrics["label_tp_errors"]["barrier"]["trans_err"] < 1e-3
