"""ROS messages as plain dicts, without ROS: vision_msgs, autoware_perception_msgs, geometry_msgs/PoseWithCovariance.

The keys are those of the messages, so ``rosidl_runtime_py.set_message_fields(message, found)`` fills one. Boxes stay in the frame that they are in,
in metres and radians: ``frame_id`` must name it. To move them first: ``boxcov.data.poses.transform_detections``.

Pose covariances are 6 x 6, row by row, in the order x, y, z, rotation about x, y, z; the yaw's variance is number 35. A box of boxcov stands upright:
nothing is known of the rotations about x and y, whose variances are ``tilt_variance``, not 0, which some readers divide by. No message has a
place for the covariance of the size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import cos, sin
from typing import Any

import torch
from torch import Tensor

from boxcov.data.covariance_json import check_finite
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.export.choose import Which, chosen

POSE = ("x", "y", "z", "rot_x", "rot_y", "rot_z")  # the order of a pose's covariance
AUTOWARE = {
    "unknown": 0,
    "car": 1,
    "truck": 2,
    "bus": 3,
    "trailer": 4,
    "motorcycle": 5,
    "bicycle": 6,
    "pedestrian": 7,
}
_AUTOWARE_TOO = {"cyclist": 6, "van": 1, "construction_vehicle": 2}
_NEEDED = ("x", "y", "z", "w", "l", "h", "yaw")


def header(frame_id: str, stamp: float | tuple[int, int] = 0.0) -> dict[str, Any]:
    """std_msgs/Header: the stamp in seconds, or as whole seconds and nanoseconds.

    >>> header("lidar_top", 1.5)
    {'stamp': {'sec': 1, 'nanosec': 500000000}, 'frame_id': 'lidar_top'}
    >>> header("map", (1532402927, 647951000))["stamp"]
    {'sec': 1532402927, 'nanosec': 647951000}
    """
    if not isinstance(frame_id, str) or not frame_id:
        raise BoxcovError(
            f"frame_id must name the frame of reference that the boxes are in, got {frame_id!r}"
        )
    if isinstance(stamp, tuple):
        sec, nanosec = stamp
    else:
        sec, nanosec = divmod(round(stamp * 1_000_000_000), 1_000_000_000)
    return {"stamp": {"sec": int(sec), "nanosec": int(nanosec)}, "frame_id": frame_id}


def quaternion(yaw: float) -> dict[str, float]:
    """geometry_msgs/Quaternion of a turn about z.

    >>> quaternion(0.0)
    {'x': 0.0, 'y': 0.0, 'z': 0.0, 'w': 1.0}
    """
    return {"x": 0.0, "y": 0.0, "z": sin(yaw / 2), "w": cos(yaw / 2)}


def pose_covariances(
    detections: Detections, covariance: Which = "predictive", tilt_variance: float = 1e-6
) -> Tensor:
    """(m, 6, 6) of x, y, z and the rotations about x, y, z, in float64: the yaw's with its correlations.

    >>> from torch import eye, ones, zeros
    >>> found = Detections(ones(1, 7), ones(1), zeros(1).long(), zeros(1).long(), _NEEDED, ("car",), eye(7)[None])
    >>> pose_covariances(found, "epistemic")[0].diagonal()
    tensor([1.0000e+00, 1.0000e+00, 1.0000e+00, 1.0000e-06, 1.0000e-06, 1.0000e+00],
           dtype=torch.float64)
    """
    C = _finite(detections, chosen(detections, covariance))
    at = [detections.fields.index(name) for name in ("x", "y", "z", "yaw")]
    there = [0, 1, 2, 5]
    found = torch.zeros(len(C), 6, 6, dtype=torch.float64)
    found[:, 3, 3] = found[:, 4, 4] = tilt_variance
    rows = torch.tensor(there)
    found[:, rows[:, None], rows] = C[:, at][:, :, at]
    return found


def poses(
    detections: Detections, covariance: Which = "predictive", tilt_variance: float = 1e-6
) -> list[dict[str, Any]]:
    """A geometry_msgs/PoseWithCovariance for each box: its centre and heading.

    >>> from torch import eye, ones, zeros
    >>> found = Detections(ones(1, 7), ones(1), zeros(1).long(), zeros(1).long(), _NEEDED, ("car",), eye(7)[None])
    >>> one, = poses(found, "epistemic")
    >>> one["pose"]["position"], len(one["covariance"]), one["covariance"][35]
    ({'x': 1.0, 'y': 1.0, 'z': 1.0}, 36, 1.0)
    """
    _check_fields(detections, _NEEDED)
    boxes = detections.boxes.detach().cpu().double()
    check_finite(
        _number(detections), "box", boxes[:, [detections.fields.index(name) for name in _NEEDED]]
    )
    rows = pose_covariances(detections, covariance, tilt_variance).flatten(1).tolist()
    return [
        {"pose": _pose(detections, box), "covariance": row}
        for box, row in zip(boxes.tolist(), rows)
    ]


def detection3d_array(
    detections: Detections,
    frame_id: str,
    stamp: float | tuple[int, int] = 0.0,
    *,
    covariance: Which = "predictive",
    tilt_variance: float = 1e-6,
) -> dict[str, Any]:
    """A vision_msgs/Detection3DArray of one frame's boxes: ``bbox.size`` is length, width, height along the box's own x, y, z.

    >>> from torch import arange, eye, ones, zeros
    >>> found = Detections(arange(7.0)[None], ones(1), zeros(1).long(), zeros(1).long(), _NEEDED, ("car",), eye(7)[None])
    >>> message = detection3d_array(found, "lidar_top", covariance="epistemic")
    >>> message["detections"][0]["bbox"]["size"], message["detections"][0]["results"][0]["hypothesis"]
    ({'x': 4.0, 'y': 3.0, 'z': 5.0}, {'class_id': 'car', 'score': 1.0})
    """
    top = header(frame_id, stamp)
    _check_one_frame(detections)
    made = poses(detections, covariance, tilt_variance)
    found = []
    for row, (pose, size) in enumerate(zip(made, _sizes(detections))):
        result = {"hypothesis": _hypothesis(detections, row), "pose": pose}
        found.append(
            {
                "header": top,
                "results": [result],
                "bbox": {"center": pose["pose"], "size": size},
                "id": "",
            }
        )
    return {"header": top, "detections": found}


def detection2d_array(
    detections: Detections,
    frame_id: str,
    stamp: float | tuple[int, int] = 0.0,
    *,
    covariance: Which = "predictive",
) -> dict[str, Any]:
    """A vision_msgs/Detection2DArray of one image's boxes ``x1 y1 x2 y2``, in pixels: centre, its covariance, and size.

    >>> from torch import eye, ones, tensor, zeros
    >>> fields = ("x1", "y1", "x2", "y2")
    >>> found = Detections(tensor([[2.0, 4, 6, 10]]), ones(1), zeros(1).long(), zeros(1).long(), fields, ("car",), eye(4)[None])
    >>> one, = detection2d_array(found, "camera", covariance="epistemic")["detections"]
    >>> one["bbox"], one["results"][0]["pose"]["covariance"][:2]
    ({'center': {'position': {'x': 4.0, 'y': 7.0}, 'theta': 0.0}, 'size_x': 4.0, 'size_y': 6.0}, [0.5, 0.0])
    """
    _check_fields(detections, ("x1", "y1", "x2", "y2"))
    _check_one_frame(detections)
    top, at = (
        header(frame_id, stamp),
        [detections.fields.index(name) for name in ("x1", "y1", "x2", "y2")],
    )
    boxes = detections.boxes.detach().cpu().double()[:, at]
    check_finite(_number(detections), "box", boxes)
    J = torch.tensor(
        [[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]], dtype=torch.float64
    )  # the centre of the corners
    C = J @ _finite(detections, chosen(detections, covariance))[:, at][:, :, at] @ J.T
    whole = torch.zeros(len(C), 6, 6, dtype=torch.float64)
    whole[:, :2, :2] = (C + C.transpose(1, 2)) / 2
    found = []
    for row, ((x1, y1, x2, y2), numbers) in enumerate(
        zip(boxes.tolist(), whole.flatten(1).tolist())
    ):
        x, y = (x1 + x2) / 2, (y1 + y2) / 2
        pose = {
            "pose": {"position": {"x": x, "y": y, "z": 0.0}, "orientation": quaternion(0.0)},
            "covariance": numbers,
        }
        bbox = {
            "center": {"position": {"x": x, "y": y}, "theta": 0.0},
            "size_x": x2 - x1,
            "size_y": y2 - y1,
        }
        found.append(
            {
                "header": top,
                "results": [{"hypothesis": _hypothesis(detections, row), "pose": pose}],
                "bbox": bbox,
                "id": "",
            }
        )
    return {"header": top, "detections": found}


def detected_objects(
    detections: Detections,
    frame_id: str,
    stamp: float | tuple[int, int] = 0.0,
    *,
    covariance: Which = "predictive",
    tilt_variance: float = 1e-6,
    labels: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """An autoware_perception_msgs/DetectedObjects of one frame's boxes: poses in ``frame_id``, velocities in each object's own axes.

    The velocity's covariance is the same one in other axes, turned by -yaw: the object's axes are taken as they are reported.
    labels: Autoware's number of a class by its name; those of Autoware's own names unless given, 0 (unknown) for others.

    >>> from torch import eye, ones, tensor, zeros
    >>> box = tensor([[0.0, 0, 0, 2, 4, 1, 1.5707964, 0, 5]])  # heading and moving along y
    >>> found = Detections(box, ones(1), zeros(1).long(), zeros(1).long(), (*_NEEDED, "vx", "vy"), ("car",), eye(9)[None])
    >>> one, = detected_objects(found, "base_link", covariance="epistemic")["objects"]
    >>> round(one["kinematics"]["twist_with_covariance"]["twist"]["linear"]["x"], 4), one["classification"][0]["label"]
    (5.0, 1)
    """
    top = header(frame_id, stamp)
    _check_one_frame(detections)
    known = {**AUTOWARE, **_AUTOWARE_TOO} if labels is None else labels
    made = poses(detections, covariance, tilt_variance)
    twists = _twists(detections, covariance)
    found = []
    for row, (pose, size) in enumerate(zip(made, _sizes(detections))):
        hypothesis = _hypothesis(detections, row)
        kinematics = {
            "pose_with_covariance": pose,
            "has_position_covariance": True,
            "orientation_availability": 2,  # known, and which end is the front
            "twist_with_covariance": twists[row],
            "has_twist": twists[row] != _NO_TWIST,
            "has_twist_covariance": twists[row] != _NO_TWIST,
        }
        found.append(
            {
                "existence_probability": hypothesis["score"],
                "classification": [
                    {
                        "label": known.get(hypothesis["class_id"].lower(), 0),
                        "probability": hypothesis["score"],
                    }
                ],
                "kinematics": kinematics,
                "shape": {"type": 0, "footprint": {"points": []}, "dimensions": size},  # a box
            }
        )
    return {"header": top, "objects": found}


_ZERO = {"x": 0.0, "y": 0.0, "z": 0.0}
_NO_TWIST: dict[str, Any] = {"twist": {"linear": _ZERO, "angular": _ZERO}, "covariance": [0.0] * 36}


def _twists(detections: Detections, covariance: Which) -> list[dict[str, Any]]:
    """A geometry_msgs/TwistWithCovariance for each box, in its own axes; none where the velocity is unknown."""
    if not {"vx", "vy"} <= set(detections.fields):
        return [_NO_TWIST] * len(detections)
    at = [detections.fields.index(name) for name in ("vx", "vy")]
    yaw = detections.field("yaw").detach().cpu().double()
    R = torch.stack(
        [torch.stack([yaw.cos(), yaw.sin()], 1), torch.stack([-yaw.sin(), yaw.cos()], 1)], 1
    )  # (m, 2, 2) by -yaw
    v = (R @ detections.boxes.detach().cpu().double()[:, at].unsqueeze(2)).squeeze(2)
    C = R @ _finite(detections, chosen(detections, covariance))[:, at][:, :, at] @ R.transpose(1, 2)
    whole = torch.zeros(len(C), 6, 6, dtype=torch.float64)
    whole[:, :2, :2] = (C + C.transpose(1, 2)) / 2
    rows = zip(v.tolist(), v.isfinite().all(1).tolist(), whole.flatten(1).tolist())
    return [
        {"twist": {"linear": {"x": x, "y": y, "z": 0.0}, "angular": _ZERO}, "covariance": numbers}
        if known
        else _NO_TWIST
        for (x, y), known, numbers in rows
    ]


def _pose(detections: Detections, box: Sequence[float]) -> dict[str, Any]:
    value = dict(zip(detections.fields, box))
    return {
        "position": {name: value[name] for name in ("x", "y", "z")},
        "orientation": quaternion(value["yaw"]),
    }


def _sizes(detections: Detections) -> list[dict[str, float]]:
    sizes = [detections.field(name).tolist() for name in ("l", "w", "h")]
    return [{"x": length, "y": width, "z": height} for length, width, height in zip(*sizes)]


def _hypothesis(detections: Detections, row: int) -> dict[str, Any]:
    return {
        "class_id": detections.classes[int(detections.labels[row])],
        "score": float(detections.scores[row]),
    }


def _finite(detections: Detections, C: Tensor) -> Tensor:
    check_finite(_number(detections), "covariance", C)
    return C.detach().cpu().double()


def _number(detections: Detections) -> str:
    return str(int(detections.frame[0])) if len(detections) else ""


def _check_fields(detections: Detections, needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if name not in detections.fields]
    if missing:
        raise BoxcovError(
            f"this message needs boxes of {' '.join(needed)}; these are {' '.join(detections.fields)}, without {', '.join(missing)}"
        )


def _check_one_frame(detections: Detections) -> None:
    if len(detections.frame.unique()) > 1:
        raise BoxcovError(
            "detections of several frames: a message is one frame's; give detections.frames(count) one by one"
        )
