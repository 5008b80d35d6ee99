from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, BoxcovWarning, Detections
from boxcov.data.poses import rotation_matrix
from boxcov.export import ros
from helpers.export_boxes import in_image, in_space, with_error_model

COLUMN = {"x": 0, "y": 1, "z": 2, "rot_z": 5}


def test_pose_covariances_are_in_the_order_of_ros() -> None:
    found = in_space()
    for box, pose, C in zip(found.boxes, ros.poses(found), found.predictive):
        numbers = pose["covariance"]
        assert len(numbers) == 36
        for first, i in COLUMN.items():
            for second, j in COLUMN.items():
                a, b = (
                    found.fields.index("yaw" if name == "rot_z" else name)
                    for name in (first, second)
                )
                assert numbers[6 * i + j] == pytest.approx(float(C[a, b]), rel=1e-12)
        assert numbers[21] == numbers[28] == 1e-6  # rotations about x and y: not 0
        assert all(numbers[6 * i + j] == 0 for i in (3, 4) for j in range(6) if i != j)
        assert pose["pose"]["position"] == {
            "x": float(box[0]),
            "y": float(box[1]),
            "z": float(box[2]),
        }


def test_the_quaternion_turns_the_front_to_the_heading() -> None:
    for yaw in (0.0, 0.7, -2.9, 3.14159, 9.0):
        q = ros.quaternion(yaw)
        front = rotation_matrix(
            torch.tensor([q["w"], q["x"], q["y"], q["z"]], dtype=torch.float64)
        )[:, 0]
        torch.testing.assert_close(front, torch.tensor([np.cos(yaw), np.sin(yaw), 0.0]))


def test_vision_msgs_box() -> None:
    found = in_space(frames=1)
    message = ros.detection3d_array(found, "lidar_top", 12.25)
    assert message["header"] == {
        "stamp": {"sec": 12, "nanosec": 250_000_000},
        "frame_id": "lidar_top",
    }
    assert len(message["detections"]) == len(found)
    one, box = message["detections"][1], dict(zip(found.fields, found.boxes[1].tolist()))
    assert set(one) == {"header", "results", "bbox", "id"}
    assert one["bbox"]["size"] == {"x": box["l"], "y": box["w"], "z": box["h"]}
    assert one["bbox"]["center"] == one["results"][0]["pose"]["pose"]
    assert one["results"][0]["hypothesis"] == {
        "class_id": "pedestrian",
        "score": pytest.approx(float(found.scores[1])),
    }
    json.dumps(message)


def test_message_and_box_have_the_same_corners() -> None:
    """Size x lies along the heading: as boxcov draws its boxes."""
    from boxcov.outlines import corners

    found = in_space(1)
    one = ros.detection3d_array(found, "map")["detections"][0]["bbox"]
    q, half = one["center"]["orientation"], [one["size"][name] / 2 for name in "xyz"]
    R = rotation_matrix(torch.tensor([q["w"], q["x"], q["y"], q["z"]], dtype=torch.float64)).numpy()
    there = (
        np.array(
            [[sx * half[0], sy * half[1], 0] for sx, sy in ((1, 1), (1, -1), (-1, -1), (-1, 1))]
        )
        @ R.T
    )
    there = there[:, :2] + [one["center"]["position"]["x"], one["center"]["position"]["y"]]
    plane = [found.fields.index(name) for name in ("x", "y", "w", "l", "yaw")]
    np.testing.assert_allclose(there, corners(found.boxes.numpy()[:, plane])[0, :4], atol=1e-9)


def test_twists_are_in_the_axes_of_the_object() -> None:
    found = in_space()
    for one, box, C in zip(
        ros.detected_objects(found, "base_link")["objects"], found.boxes, found.predictive
    ):
        twist = one["kinematics"]["twist_with_covariance"]
        yaw = float(box[6])

        def turned(v: torch.Tensor, yaw: float = yaw) -> torch.Tensor:
            x, y = v
            return torch.stack(
                [np.cos(yaw) * x + np.sin(yaw) * y, -np.sin(yaw) * x + np.cos(yaw) * y]
            )

        v = turned(box[7:])
        J = torch.autograd.functional.jacobian(turned, box[7:])
        assert [twist["twist"]["linear"][name] for name in "xy"] == pytest.approx(v.tolist())
        there = np.array(twist["covariance"]).reshape(6, 6)
        np.testing.assert_allclose(there[:2, :2], J @ C[7:, 7:] @ J.T, rtol=1e-9)
        assert not there[2:].any()
        assert one["kinematics"]["has_twist"]


def test_autoware_labels_and_shapes() -> None:
    found = in_space()
    objects = ros.detected_objects(found, "base_link")["objects"]
    assert [one["classification"][0]["label"] for one in objects] == [1, 7, 0, 1, 7]
    for name in ("traffic_cone", "TrafficCone"):
        named = replace(found, classes=("car", "pedestrian", name))
        cones = ros.detected_objects(named, "b", labels={name: 9})["objects"]
        assert [one["classification"][0]["label"] for one in cones] == [0, 0, 9, 0, 0]
    assert objects[0]["shape"]["dimensions"]["x"] == float(found.field("l")[0])
    assert objects[0]["existence_probability"] == pytest.approx(float(found.scores[0]))
    json.dumps(objects)


def test_calibrated_objects_exist_with_their_probability() -> None:
    found = with_error_model(in_space())
    found = replace(found, flipped=torch.tensor([0.0, 0.04, 0.06, 0.5, 1.0]))
    objects = ros.detected_objects(found, "base_link")["objects"]
    for row, one in enumerate(objects):
        assert one["existence_probability"] == pytest.approx(1 - float(found.no_object[row]))
        assert one["classification"][0]["probability"] == pytest.approx(float(found.scores[row]))
        numbers = one["kinematics"]["pose_with_covariance"]["covariance"]
        assert numbers[35] == pytest.approx(float(found.predictive[row, 6, 6]))
    known = [one["kinematics"]["orientation_availability"] for one in objects]
    assert known == [2, 2, 1, 1, 1]  # AVAILABLE, SIGN_UNKNOWN
    plain = ros.detected_objects(in_space(), "base_link")["objects"]
    assert {one["kinematics"]["orientation_availability"] for one in plain} == {2}


def test_boxes_without_a_velocity() -> None:
    plain = in_space(fields=("x", "y", "z", "w", "l", "h", "yaw"))
    kinematics = ros.detected_objects(plain, "base_link")["objects"][0]["kinematics"]
    assert (kinematics["has_twist"], kinematics["has_twist_covariance"]) == (False, False)
    unknown = in_space()
    unknown.boxes[0, 7] = torch.nan
    first, second = (
        one["kinematics"] for one in ros.detected_objects(unknown, "base_link")["objects"][:2]
    )
    assert (first["has_twist"], second["has_twist"]) == (False, True)
    assert json.loads(json.dumps(first)) == first
    assert "NaN" not in json.dumps(first)


def test_unknown_predictive_fields() -> None:
    found = in_space()
    found.predictive[:, 7:] = found.predictive[:, :, 7:] = torch.nan
    for one, other in zip(
        ros.detected_objects(found, "base_link")["objects"],
        ros.detected_objects(in_space(), "base_link")["objects"],
    ):
        kinematics = one["kinematics"]
        assert kinematics["has_twist"]
        assert not kinematics["has_twist_covariance"]
        assert kinematics["twist_with_covariance"]["covariance"] == [0.0] * 36
        expected = other["kinematics"]["pose_with_covariance"]
        assert kinematics["pose_with_covariance"] == expected
    stands = replace(found, boxes=found.boxes * torch.tensor([1.0] * 7 + [0.0] * 2))
    for one in ros.detected_objects(stands, "base_link")["objects"]:
        assert one["kinematics"]["has_twist"]
    found.predictive[:, 2] = found.predictive[:, :, 2] = torch.nan
    with pytest.raises(BoxcovError, match=r"covariance of z is NaN: the calibration .*epistemic"):
        ros.poses(found)


def test_a_clipped_box_warns_unless_it_is_calibrated() -> None:
    found = in_image()
    found.covariance[1, 2] = found.covariance[1, :, 2] = 0.0
    with pytest.warns(BoxcovWarning, match=r"1 of \d+ boxes are clipped at the image border"):
        ros.detection2d_array(found, "camera_front", covariance="epistemic")
    calibrated = with_error_model(found)
    ros.detection2d_array(calibrated, "camera_front")
    assert bool((calibrated.predictive.diagonal(dim1=1, dim2=2) > 0).all())


def test_boxes_in_an_image() -> None:
    found = in_image()
    message = ros.detection2d_array(found, "camera_front", covariance="epistemic")
    for one, box, C in zip(message["detections"], found.boxes, found.covariance):
        J = torch.autograd.functional.jacobian(
            lambda b: torch.stack([b[0] + b[2], b[1] + b[3]]) / 2, box
        )
        there = np.array(one["results"][0]["pose"]["covariance"]).reshape(6, 6)
        np.testing.assert_allclose(there[:2, :2], J @ C @ J.T, rtol=1e-9)
        assert one["bbox"]["size_x"] == pytest.approx(float(box[2] - box[0]))
        assert one["bbox"]["center"]["position"]["y"] == pytest.approx(float(box[1] + box[3]) / 2)


def test_the_epistemic_covariance_must_be_requested() -> None:
    found = in_space(calibrated=False)
    with pytest.raises(BoxcovError, match="epistemic covariance alone, which leaves out the noise"):
        ros.detection3d_array(found, "map")
    numbers = ros.detection3d_array(found, "map", covariance="epistemic")["detections"][0][
        "results"
    ][0]["pose"]["covariance"]
    assert numbers[0] == pytest.approx(float(found.covariance[0, 0, 0]))
    with pytest.raises(BoxcovError, match="no predictive covariance"):
        ros.detection3d_array(replace(found, covariance=None), "map")
    with pytest.raises(BoxcovError, match="must be one of predictive, epistemic, got 'both'"):
        ros.detection3d_array(found, "map", covariance="both")  # type: ignore[arg-type]


def test_invalid_detections_are_refused() -> None:
    with pytest.raises(
        BoxcovError, match="this message takes boxes of x y z w l h yaw; these are x1 y1 x2 y2"
    ):
        ros.detection3d_array(in_image(), "map")
    with pytest.raises(BoxcovError, match="of several frames"):
        ros.detection3d_array(in_space(frames=2), "map")
    with pytest.raises(BoxcovError, match="frame_id must name"):
        ros.detection3d_array(in_space(), "")
    broken = in_space()
    broken.boxes[1, 0] = torch.nan
    with pytest.raises(
        BoxcovError, match=r"position or size of 1 of \d+ boxes is not finite .*\(box 1"
    ):
        ros.detection3d_array(broken, "map")
    none: Detections = in_space()[:0]
    assert (
        ros.detection3d_array(none, "map")["detections"]
        == ros.detected_objects(none, "map")["objects"]
        == []
    )


def test_stamps_are_whole_nanoseconds() -> None:
    assert ros.header("map", 1532402927.647951)["stamp"]["sec"] == 1532402927
    assert ros.header("map", 0.9999999999)["stamp"] == {"sec": 1, "nanosec": 0}
    assert ros.header("map", (3, 7))["stamp"] == {"sec": 3, "nanosec": 7}
    for stamp in (float("nan"), (1, 2, 3), "now", None):
        with pytest.raises(BoxcovError, match="stamp must be seconds, or whole seconds and nano"):
            ros.header("map", stamp)
