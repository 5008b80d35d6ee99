"""Recordings for the rerun viewer: boxes, ellipsoids of their covariances, points and images.

Needs ``pip install 'boxcov[rerun]'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from boxcov.detections import Detections
from boxcov.drawing import risk_colors
from boxcov.errors import BoxcovError
from boxcov.files import atomic_write
from boxcov.result_check import check_result

Array = NDArray[Any]
_SIGMAS = (1, 3)
_IMAGE_FIELDS = ("x1", "y1", "x2", "y2")
_PLANE_FIELDS = ("x", "y", "w", "l", "yaw")


def write_rrd(
    path: str | Path,
    detections: Detections,
    frames: Sequence[Any] | None = None,
    color_model: str = "RGB",
) -> None:
    """Write the boxes of all frames to ``path``; the timeline ``frame`` counts the frames.

    Boxes ``x y w l yaw``, with or without ``z`` and ``h``, go to ``world/boxes``. The 1 and 3 sigma
    ellipsoids of their centres go to ``world/epistemic`` and, where the predictive covariance is
    known, to ``world/predictive``. Boxes ``x1 y1 x2 y2`` go to ``image``, with the ellipses of both
    corners. The labels of calibrated boxes say the risk, and their colour goes from blue (0) over
    amber to red (1).

    frames: (inputs, targets) per frame, to show the inputs: lists of point clouds (n, 3 or more) or
        images (1, C, height, width).
    color_model: of the images, "RGB" or "BGR".
    """
    check_result(detections, "these detections cannot be exported")
    rr = _import_rerun()
    log_boxes = _log_image_boxes if detections.fields[:4] == _IMAGE_FIELDS else _log_world_boxes
    if log_boxes is _log_world_boxes and not set(_PLANE_FIELDS) <= set(detections.fields):
        raise BoxcovError(
            f"rerun takes boxes of {' '.join(_PLANE_FIELDS)}, optionally z and h, or of "
            f"{' '.join(_IMAGE_FIELDS)}; these are {' '.join(detections.fields)}"
        )
    count = 0 if frames is None else len(frames)
    with atomic_write(path) as temporary:
        recording = rr.RecordingStream("boxcov")
        recording.save(temporary)
        for number in sorted({*detections.frame.tolist(), *range(count)}):
            recording.set_time("frame", sequence=int(number))
            if frames is not None and number < count:
                _log_inputs(rr, recording, frames[number][0], color_model)
            log_boxes(rr, recording, detections[detections.frame == number])
        recording.flush()
        recording.disconnect()


def ellipsoids(covariance: Array) -> tuple[Array, Array]:
    """1 sigma ellipsoids of covariances (m, 3, 3): half axes (m, 3) and quaternions x y z w (m, 4).

    >>> half_axes, _ = ellipsoids(np.diag([4.0, 1.0, 0.25])[None])
    >>> half_axes[0].tolist()
    [0.5, 1.0, 2.0]
    """
    from scipy.spatial.transform import Rotation

    values, axes = np.linalg.eigh(covariance)  # axes in columns
    sign = np.where(np.linalg.det(axes) < 0, -1.0, 1.0)  # -axes is a rotation if axes is not
    rotations = Rotation.from_matrix(axes * sign[:, None, None]) if len(axes) else None
    quaternions = np.zeros((0, 4)) if rotations is None else rotations.as_quat()
    return np.sqrt(values.clip(min=0)), quaternions


def _colors(detections: Detections) -> Array | None:
    """The colours (m, 3) of the risks; None leaves the viewer's colours of the classes."""
    return None if detections.no_object is None else risk_colors(detections.numpy()["risk"])


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
        labels=_labels(detections),
        class_ids=arrays["labels"],
        colors=_colors(detections),
    )
    recording.log("world/boxes", boxes)
    index = [fields.index(name) for name in ("x", "y", "z") if name in fields]
    for kind, C in _covariances(detections):
        position = np.zeros((len(detections), 3, 3))
        position[:, : len(index), : len(index)] = C[:, index][:, :, index]
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
    from boxcov.evaluate.geometry import ellipse

    arrays = detections.numpy()
    corners = arrays["boxes"][:, :4].astype(float)
    boxes = rr.Boxes2D(
        array=corners,
        array_format=rr.Box2DFormat.XYXY,
        labels=_labels(detections),
        class_ids=arrays["labels"],
        colors=_colors(detections),
    )
    recording.log("image/boxes", boxes)
    for kind, C in _covariances(detections):
        for sigmas in _SIGMAS:
            lines = [
                ellipse(box[k : k + 2], c[k : k + 2, k : k + 2], sigmas)
                for box, c in zip(corners, C)
                for k in (0, 2)
            ]
            recording.log(f"image/{kind}/{sigmas}_sigma", rr.LineStrips2D(lines))


def _log_inputs(rr: Any, recording: Any, inputs: Any, color_model: str) -> None:
    if isinstance(inputs, (list, tuple)) and inputs and isinstance(inputs[0], Tensor):
        recording.log("world/points", rr.Points3D(inputs[0][:, :3].detach().cpu().numpy()))
    elif isinstance(inputs, Tensor) and inputs.dim() == 4:
        image = inputs[0].detach().cpu().float()
        if float(image.max()) <= 4:  # scaled to about 0 to 1
            image = image * (255 / image.max().clamp(min=1e-6))
        pixels = image.clamp(0, 255).to(torch.uint8).movedim(0, 2).numpy()
        is_color = pixels.shape[2] == 3
        recording.log(
            "image", rr.Image(pixels, color_model) if is_color else rr.Image(pixels[:, :, 0], "L")
        )


def _covariances(detections: Detections) -> list[tuple[str, Array]]:
    """The kinds of covariance (m, D, D) that the detections have."""
    kinds = (("epistemic", detections.covariance), ("predictive", detections.predictive))
    return [
        (kind, C.detach().cpu().double().numpy())
        for kind, C in kinds
        if C is not None and len(detections)
    ]


def _labels(detections: Detections) -> list[str]:
    names = [detections.classes[label] for label in detections.labels.tolist()]
    labels = [f"{name} {score:.2f}" for name, score in zip(names, detections.scores.tolist())]
    if detections.no_object is not None:
        return [f"{label}, risk {p:.0%}" for label, p in zip(labels, detections.risk.tolist())]
    if detections.covariance is None:
        return labels
    uncertainty = detections.uncertainty.tolist()
    return [f"{label}, u {u:.3g}" for label, u in zip(labels, uncertainty)]


def _import_rerun() -> Any:
    try:
        import rerun
    except ImportError:
        raise BoxcovError("the format rerun needs rerun-sdk: pip install 'boxcov[rerun]'") from None
    return rerun
