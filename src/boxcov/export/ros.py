"""ROS messages as plain dicts, without ROS.

Keys are those of the messages: ``rosidl_runtime_py.set_message_fields(message, fields)`` fills one.
Boxes keep their frame of reference, which ``frame_id`` must name, in metres and radians. To move
them first, use ``boxcov.data.poses.transform_detections``.

Pose covariances are 6 x 6, row by row, in the order x, y, z, rotation about x, y, z; entry 35 is
the variance of the yaw. boxcov's boxes stand upright: the variances of the rotations about x and y
are 1e-6, not 0, because some readers divide by them. There is no place for that of the size.

Of calibrated detections the covariance is ``predictive``, and Autoware's ``existence_probability``
is ``1 - no_object``. The scores stay those of the detector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import cos, sin
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from boxcov.box_layout import IMAGE, SPACE, columns, find_layout
from boxcov.concatenation import check_single_frame
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, BoxcovWarning, check_choice
from boxcov.export.kalman import check_known
from boxcov.result_check import check_result

_TYPES = ("unknown", "car", "truck", "bus", "trailer", "motorcycle", "bicycle", "pedestrian")
AUTOWARE = {name: number for number, name in enumerate(_TYPES)}
_AUTOWARE_ALIASES = {"cyclist": 6, "van": 1, "construction_vehicle": 2}
_TILT_VARIANCE = 1e-6
_ORIGIN = {"x": 0.0, "y": 0.0, "z": 0.0}
_SIGN_UNKNOWN, _AVAILABLE = 1, 2  # of Autoware's orientation_availability
_SURE_HEADING = 0.05  # most probability of a swap of front and back for a known direction
_NO_TWIST = {"twist": {"linear": _ORIGIN, "angular": _ORIGIN}, "covariance": [0.0] * 36}

CovarianceKind = Literal["predictive", "epistemic"]
Stamp = float | tuple[int, int]
"""Seconds, or whole seconds and nanoseconds."""


def header(frame_id: str, stamp: Stamp = 0.0) -> dict[str, Any]:
    """Return a std_msgs/Header.

    >>> header("lidar_top", 1.5)
    {'stamp': {'sec': 1, 'nanosec': 500000000}, 'frame_id': 'lidar_top'}
    >>> header("map", (1532402927, 647951000))["stamp"]
    {'sec': 1532402927, 'nanosec': 647951000}
    """
    if not isinstance(frame_id, str) or not frame_id:
        raise BoxcovError(f"frame_id must name the boxes' frame of reference, got {frame_id!r}")
    try:
        whole = stamp if isinstance(stamp, tuple) else divmod(round(stamp * 10**9), 10**9)
        sec, nanosec = map(int, whole)
    except (TypeError, ValueError, OverflowError):
        raise BoxcovError(
            f"stamp must be seconds, or whole seconds and nanoseconds, got {stamp!r}"
        ) from None
    return {"stamp": {"sec": sec, "nanosec": nanosec}, "frame_id": frame_id}


def quaternion(yaw: float) -> dict[str, float]:
    """Return the geometry_msgs/Quaternion of a rotation about z.

    >>> quaternion(0.0)
    {'x': 0.0, 'y': 0.0, 'z': 0.0, 'w': 1.0}
    """
    return {"x": 0.0, "y": 0.0, "z": sin(yaw / 2), "w": cos(yaw / 2)}


def poses(
    detections: Detections, covariance: CovarianceKind = "predictive"
) -> list[dict[str, Any]]:
    """Return a geometry_msgs/PoseWithCovariance per box: its centre and heading.

    >>> from torch import eye, ones, zeros
    >>> frame = label = zeros(1).long()
    >>> fields = ("x", "y", "z", "w", "l", "h", "yaw")
    >>> box = Detections(ones(1, 7), ones(1), label, frame, fields, ("car",), eye(7)[None])
    >>> pose, = poses(box, "epistemic")
    >>> pose["pose"]["position"], len(pose["covariance"]), pose["covariance"][35]
    ({'x': 1.0, 'y': 1.0, 'z': 1.0}, 36, 1.0)
    """
    boxes = _boxes_of(detections, SPACE).tolist()
    C = _covariance(detections, covariance, ("x", "y", "z", "yaw"))
    rows = _in_pose_order(C, (0, 1, 2, 5), _TILT_VARIANCE)
    return [
        _pose_with_covariance((x, y, z), yaw, row) for (x, y, z, *_, yaw), row in zip(boxes, rows)
    ]


def detection3d_array(
    detections: Detections,
    frame_id: str,
    stamp: Stamp = 0.0,
    *,
    covariance: CovarianceKind = "predictive",
) -> dict[str, Any]:
    """Return the vision_msgs/Detection3DArray of one frame.

    ``bbox.size`` is the length, width and height, along the box's own x, y, z.

    >>> from torch import arange, eye, ones, zeros
    >>> frame = label = zeros(1).long()
    >>> fields = ("x", "y", "z", "w", "l", "h", "yaw")
    >>> box = Detections(arange(7.0)[None], ones(1), label, frame, fields, ("car",), eye(7)[None])
    >>> message = detection3d_array(box, "lidar_top", covariance="epistemic")
    >>> message["detections"][0]["bbox"]["size"]
    {'x': 4.0, 'y': 3.0, 'z': 5.0}
    """
    top = header(frame_id, stamp)
    check_single_frame(detections, "a message")
    boxes = [
        (pose, {"center": pose["pose"], "size": size})
        for pose, size in zip(poses(detections, covariance), _sizes(detections))
    ]
    return _detection_array(detections, top, boxes)


def detection2d_array(
    detections: Detections,
    frame_id: str,
    stamp: Stamp = 0.0,
    *,
    covariance: CovarianceKind = "predictive",
) -> dict[str, Any]:
    """Return the vision_msgs/Detection2DArray of one image with boxes ``x1 y1 x2 y2``, in pixels.

    >>> from torch import eye, ones, tensor, zeros
    >>> frame = label = zeros(1).long()
    >>> corners, fields = tensor([[2.0, 4, 6, 10]]), ("x1", "y1", "x2", "y2")
    >>> box = Detections(corners, ones(1), label, frame, fields, ("car",), eye(4)[None])
    >>> message, = detection2d_array(box, "camera", covariance="epistemic")["detections"]
    >>> message["bbox"]["center"]["position"], message["results"][0]["pose"]["covariance"][:2]
    ({'x': 4.0, 'y': 7.0}, [0.5, 0.0])
    """
    corners = _boxes_of(detections, IMAGE)
    check_single_frame(detections, "a message")
    top = header(frame_id, stamp)
    C = _covariance(detections, covariance, IMAGE)
    J = torch.tensor([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]], dtype=torch.float64)  # of the centre
    boxes = []
    for (x1, y1, x2, y2), row in zip(corners.tolist(), _in_pose_order(J @ C @ J.T)):
        x, y = (x1 + x2) / 2, (y1 + y2) / 2
        center = {"position": {"x": x, "y": y}, "theta": 0.0}
        bbox = {"center": center, "size_x": x2 - x1, "size_y": y2 - y1}
        boxes.append((_pose_with_covariance((x, y, 0.0), 0.0, row), bbox))
    return _detection_array(detections, top, boxes)


def detected_objects(
    detections: Detections,
    frame_id: str,
    stamp: Stamp = 0.0,
    *,
    covariance: CovarianceKind = "predictive",
    labels: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the autoware_perception_msgs/DetectedObjects of one frame.

    Poses are in ``frame_id``, velocities in each object's axes, as the message requires. The
    covariance of the velocity is rotated by -yaw, taking the reported yaw as exact; if the
    calibration frames had no labels of it, ``has_twist_covariance`` is false.

    Of calibrated detections ``existence_probability`` is ``1 - no_object``, else the score. The
    predictive variance of yaw is that of the axis: a box that is ``flipped`` with a probability
    above 0.05 has the orientation SIGN_UNKNOWN, so that a tracker decides which end is the front.

    labels: Autoware's number per class name; its own names by default, and 0 (unknown) for others.

    >>> from torch import eye, ones, tensor, zeros
    >>> frame = label = zeros(1).long()
    >>> fields = ("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")
    >>> along_y = tensor([[0.0, 0, 0, 2, 4, 1, 1.5707964, 0, 5]])
    >>> box = Detections(along_y, ones(1), label, frame, fields, ("car",), eye(9)[None])
    >>> car, = detected_objects(box, "base_link", covariance="epistemic")["objects"]
    >>> round(car["kinematics"]["twist_with_covariance"]["twist"]["linear"]["x"], 4)
    5.0
    """
    top = header(frame_id, stamp)
    check_single_frame(detections, "a message")
    numbers = {**AUTOWARE, **_AUTOWARE_ALIASES} if labels is None else labels
    parts = poses(detections, covariance), _twists(detections, covariance), _sizes(detections)
    no_object, flipped = detections.no_object, detections.flipped
    objects = []
    for row, (pose, twist, size) in enumerate(zip(*parts)):
        hypothesis = _hypothesis(detections, row)
        name, score = hypothesis["class_id"], hypothesis["score"]
        label = numbers.get(name, numbers.get(name.lower(), 0))
        is_sure = flipped is None or float(flipped[row]) <= _SURE_HEADING  # which end is the front
        kinematics = {
            "pose_with_covariance": pose,
            "has_position_covariance": True,
            "orientation_availability": _AVAILABLE if is_sure else _SIGN_UNKNOWN,
            "twist_with_covariance": twist,
            "has_twist": twist is not _NO_TWIST,
            "has_twist_covariance": any(twist["covariance"]),
        }
        objects.append(
            {
                "existence_probability": score if no_object is None else 1 - float(no_object[row]),
                "classification": [{"label": label, "probability": score}],
                "kinematics": kinematics,
                # type 0 is BOUNDING_BOX
                "shape": {"type": 0, "footprint": {"points": []}, "dimensions": size},
            }
        )
    return {"header": top, "objects": objects}


def _detection_array(
    detections: Detections, top: dict[str, Any], boxes: Sequence[tuple[dict[str, Any], Any]]
) -> dict[str, Any]:
    """A vision_msgs array of boxes, each with its pose and its ``bbox``."""
    messages = [
        {
            "header": top,
            "results": [{"hypothesis": _hypothesis(detections, row), "pose": pose}],
            "bbox": bbox,
            "id": "",
        }
        for row, (pose, bbox) in enumerate(boxes)
    ]
    return {"header": top, "detections": messages}


def _twists(detections: Detections, covariance: CovarianceKind) -> list[dict[str, Any]]:
    """A geometry_msgs/TwistWithCovariance per box in its axes; zero if the velocity is unknown."""
    if not {"vx", "vy"} <= set(detections.fields):
        return [_NO_TWIST] * len(detections)
    (yaw,) = _boxes_of(detections, ("yaw",)).T
    R = torch.stack([yaw.cos(), yaw.sin(), -yaw.sin(), yaw.cos()], 1).view(-1, 2, 2)  # by -yaw
    velocity = (R @ _boxes_of(detections, ("vx", "vy")).unsqueeze(2)).squeeze(2)
    C = _covariance(detections, covariance, ("vx", "vy"), must_be_known=False)
    C = R @ C.masked_fill(C.isnan(), 0.0) @ R.transpose(1, 2)  # NaN: without labels of it
    is_known = velocity.isfinite().all(1).tolist()
    return [
        {"twist": {"linear": {"x": x, "y": y, "z": 0.0}, "angular": _ORIGIN}, "covariance": row}
        if known
        else _NO_TWIST
        for (x, y), known, row in zip(velocity.tolist(), is_known, _in_pose_order(C))
    ]


def _in_pose_order(
    C: Tensor, places: Sequence[int] = (0, 1), tilt_variance: float = 0.0
) -> list[list[float]]:
    """Return covariances (m, f, f) as rows of 36 numbers, symmetric to the last digit.

    places: of the f numbers among x, y, z and the rotations about x, y, z.
    """
    index = torch.tensor(places)
    pose = torch.zeros(len(C), 6, 6, dtype=torch.float64)
    pose[:, 3, 3] = pose[:, 4, 4] = tilt_variance
    pose[:, index[:, None], index] = (C + C.transpose(1, 2)) / 2
    return pose.flatten(1).tolist()


def _pose_with_covariance(
    position: tuple[float, float, float], yaw: float, covariance: list[float]
) -> dict[str, Any]:
    pose = {"position": dict(zip("xyz", position)), "orientation": quaternion(yaw)}
    return {"pose": pose, "covariance": covariance}


def _sizes(detections: Detections) -> list[dict[str, float]]:
    sizes = [detections.field(name).tolist() for name in ("l", "w", "h")]
    return [{"x": length, "y": width, "z": height} for length, width, height in zip(*sizes)]


def _hypothesis(detections: Detections, row: int) -> dict[str, Any]:
    name = detections.classes[int(detections.labels[row])]
    return {"class_id": name, "score": float(detections.scores[row])}


def _covariance(
    detections: Detections,
    kind: CovarianceKind,
    fields: tuple[str, ...],
    must_be_known: bool = True,
) -> Tensor:
    """Return the covariance (m, f, f) of some fields, in float64 on the CPU."""
    check_choice("covariance", kind, CovarianceKind)
    check_result(detections, "these detections cannot be exported")
    C = detections.predictive if kind == "predictive" else detections.covariance
    if C is None and kind == "predictive" and detections.covariance is not None:
        raise BoxcovError(
            "these detections have the epistemic covariance alone, which leaves out the noise of "
            "sensor and labels: a reader would trust the boxes too much. Calibrate (boxcov "
            "calibrate), or pass covariance='epistemic'"
        )
    if C is None:
        raise BoxcovError(
            f"these detections have no {kind} covariance: use MCGLM, ExactGLM, GLM or MCI"
        )
    clipped = int(detections.clipped.any(1).sum())
    if kind == "epistemic" and clipped:
        warn(
            f"{clipped} of {len(detections)} boxes are clipped at the image border: their epistemic"
            " covariance is 0 in the clipped sides, as if these were known. Calibrated detections "
            "have a variance there",
            BoxcovWarning,
            stacklevel=3,
        )
    index = columns(detections.fields, fields)
    C = C.detach().cpu().double()[:, index][:, :, index]
    if must_be_known:
        check_known(C, fields, "pass covariance='epistemic'")
    return C


def _boxes_of(detections: Detections, fields: tuple[str, ...]) -> Tensor:
    """Return the boxes (m, f) of some fields, in float64 on the CPU."""
    find_layout(detections.fields, (fields,), "this message")
    return detections.boxes.detach().cpu().double()[:, columns(detections.fields, fields)]
