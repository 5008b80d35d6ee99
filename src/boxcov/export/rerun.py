"""The rerun viewer, live or as a file: boxes, their uncertainty, points and images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov._files.output_file import atomic_write
from boxcov._files.plain_text import short_name
from boxcov.box_layout import IMAGE, PLANE, columns, find_layout
from boxcov.concatenation import check_single_frame
from boxcov.detections import Detections
from boxcov.errors import import_package
from boxcov.outlines import background_of, ellipse, risk_colors
from boxcov.result_check import check_result

Array = NDArray[Any]
_SIGMAS = (1, 3)


def log(detections: Detections, inputs: Any = None, recording: Any = None) -> None:
    """Log the boxes of one frame, and its inputs if given, to the rerun viewer.

    Boxes ``x y w l yaw``, with or without ``z`` and ``h``, go to ``world/boxes``. The 1 and 3 sigma
    ellipsoids of their centres go to ``world/epistemic`` and, where the predictive covariance is
    known, to ``world/predictive``. Boxes ``x1 y1 x2 y2`` go to ``image``, with the ellipses of both
    corners. Calibrated boxes have their risk in the label and the colour, from blue to red, and
    ``risk/highest`` and ``risk/mean`` are curves over time.

    inputs: a list of one point cloud (n, 3 or more), or an image (1, 3, height, width).
    recording: a ``rerun.RecordingStream``; the global one of ``rerun.init`` unless given. Set its
        time before each frame, and send it ``blueprint(detections.fields)`` once.
    """
    check_result(detections, "these detections cannot be exported")
    check_single_frame(detections, "a frame of a recording")
    rr = import_package("rerun")
    log_boxes = _log_image_boxes if _is_image(detections.fields) else _log_world_boxes
    stream = rr if recording is None else recording
    background = None if inputs is None else background_of(inputs)
    if background is not None and background.ndim == 2:
        stream.log("world/points", rr.Points3D(background[:, :3]))
    elif background is not None:
        stream.log("image", rr.Image(background))
    log_boxes(rr, stream, detections)
    if detections.no_object is not None and len(detections):
        stream.log("risk/highest", rr.Scalars(float(detections.risk.max())))
        stream.log("risk/mean", rr.Scalars(float(detections.risk.mean())))


def blueprint(fields: Sequence[str]) -> Any:
    """Return the layout of the viewer: the boxes of these fields above the curves of the risk."""
    views = import_package("rerun.blueprint")
    is_image = _is_image(fields)
    view, origin = (views.Spatial2DView, "image") if is_image else (views.Spatial3DView, "world")
    boxes = view(origin=origin, name="Boxes, coloured by risk")
    risk = views.TimeSeriesView(origin="risk", name="Risk")
    rows = views.Vertical(boxes, risk, row_shares=[4, 1])
    return views.Blueprint(rows, collapse_panels=True)


def _is_image(fields: Sequence[str]) -> bool:
    return find_layout(fields, (IMAGE, PLANE), "rerun") == IMAGE


def write_rrd(
    path: str | Path, detections: Detections, frames: Sequence[Any] | None = None
) -> None:
    """Write the boxes of all frames to ``path``, as ``log`` does, with the blueprint.

    The timeline ``frame`` counts the frames. ``frames``, (inputs, targets) each, show the inputs.
    """
    check_result(detections, "these detections cannot be exported")
    rr = import_package("rerun")
    layout = blueprint(detections.fields)
    count = 0 if frames is None else len(frames)
    with atomic_write(path) as temporary:
        recording = rr.RecordingStream("boxcov")
        recording.save(temporary)
        recording.send_blueprint(layout)
        ordered = detections[detections.frame.argsort(stable=True)]
        frame = ordered.frame.cpu().numpy()
        for number in sorted({*frame.tolist(), *range(count)}):
            recording.set_time("frame", sequence=int(number))
            inputs = frames[number][0] if frames is not None and number < count else None
            start, stop = np.searchsorted(frame, [number, number + 1]).tolist()
            log(ordered[start:stop], inputs, recording)
        recording.flush()
        recording.disconnect()


def ellipsoids(covariance: Array) -> tuple[Array, Array]:
    """Return the half axes (m, 3) and quaternions x y z w (m, 4) of 1 sigma ellipsoids.

    covariance: (m, 3, 3).

    >>> half_axes, _ = ellipsoids(np.diag([4.0, 1.0, 0.25])[None])
    >>> half_axes[0].tolist()
    [0.5, 1.0, 2.0]
    """
    from scipy.spatial.transform import Rotation

    values, axes = np.linalg.eigh(covariance)  # axes in columns
    sign = np.where(np.linalg.det(axes) < 0, -1.0, 1.0)  # -axes is a rotation if axes is not
    rotations = Rotation.from_matrix(axes * sign[:, None, None])
    return np.sqrt(values.clip(min=0)), rotations.as_quat()


def _log_world_boxes(rr: Any, recording: Any, detections: Detections) -> None:
    arrays, fields = detections.numpy(), detections.fields
    value = {name: arrays["boxes"][:, i].astype(float) for i, name in enumerate(fields)}
    zeros = np.zeros(len(detections))
    centers = np.stack([value["x"], value["y"], value.get("z", zeros)], 1)
    half_sizes = np.stack([value["l"], value["w"], value.get("h", zeros)], 1) / 2
    half_yaw = value["yaw"] / 2
    quaternions = np.stack([zeros, zeros, np.sin(half_yaw), np.cos(half_yaw)], 1)
    boxes = rr.Boxes3D(
        centers=centers,
        half_sizes=half_sizes,
        quaternions=quaternions,
        **_look(detections),
    )
    recording.log("world/boxes", boxes)
    axes = [name for name in ("x", "y", "z") if name in fields]
    for kind, C in _covariances(detections, axes):
        position = np.zeros((len(detections), 3, 3))
        position[:, : len(axes), : len(axes)] = C
        half_axes, quaternions = ellipsoids(position)
        for sigmas in _SIGMAS:
            shapes = rr.Ellipsoids3D(
                centers=centers,
                half_sizes=sigmas * half_axes,
                quaternions=quaternions,
                class_ids=arrays["labels"],
            )
            recording.log(f"world/{kind}/{sigmas}_sigma", shapes)


def _log_image_boxes(rr: Any, recording: Any, detections: Detections) -> None:
    sides = columns(detections.fields, IMAGE)
    corners = detections.numpy()["boxes"][:, sides].astype(float)
    boxes = rr.Boxes2D(array=corners, array_format=rr.Box2DFormat.XYXY, **_look(detections))
    recording.log("image/boxes", boxes)
    for kind, C in _covariances(detections, IMAGE):
        for sigmas in _SIGMAS:
            lines = [
                ellipse(corners[:, k : k + 2], C[:, k : k + 2, k : k + 2], sigmas) for k in (0, 2)
            ]
            recording.log(f"image/{kind}/{sigmas}_sigma", rr.LineStrips2D(np.concatenate(lines)))


def _covariances(detections: Detections, names: Sequence[str]) -> list[tuple[str, Array]]:
    """The kinds of covariance (m, f, f) of some fields that are known."""
    index, known = columns(detections.fields, names), []
    for kind, C in (("epistemic", detections.covariance), ("predictive", detections.predictive)):
        if C is not None and len(detections):
            some = C.detach().cpu().double().numpy()[:, index][:, :, index]
            known += [(kind, some)] if np.isfinite(some).all() else []
    return known


def _look(detections: Detections) -> dict[str, Any]:
    """Return labels, classes and colours: of the risk, or those that the viewer gives a class."""
    arrays, colors = detections.numpy(), None
    names = [short_name(detections.classes[label]) for label in detections.labels.tolist()]
    labels = [f"{name} {score:.2f}" for name, score in zip(names, detections.scores.tolist())]
    if "risk" in arrays:
        colors = risk_colors(arrays["risk"], is_dark=True)
        labels = [
            f"{label}, risk {100 * p:.0f} %" for label, p in zip(labels, arrays["risk"].tolist())
        ]
    elif "uncertainty" in arrays:
        labels = [f"{label}, u {u:.3g}" for label, u in zip(labels, arrays["uncertainty"].tolist())]
    return {"labels": labels, "class_ids": arrays["labels"], "colors": colors}
