"""A recording for the rerun viewer: boxes, ellipsoids of their covariances, points and images. Needs ``pip install 'boxcov[rerun]'``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.files import atomic_write

Array = NDArray[Any]
SIGMAS = (1, 3)
IMAGE = ("x1", "y1", "x2", "y2")
PLANE = ("x", "y", "w", "l", "yaw")


def write_rrd(
    path: str | Path,
    detections: Detections,
    frames: Sequence[Any] | None = None,
    color_model: str = "RGB",
) -> None:
    """Write the boxes of all frames to ``path``: one point in the timeline ``frame`` for each number of a frame.

    ``world/boxes`` are the boxes (``x y w l yaw``, with or without ``z`` and ``h``), ``world/epistemic/1_sigma`` and ``3_sigma`` the ellipsoids
    of their centres, and ``world/predictive`` those of the errors, where they are known. Boxes ``x1 y1 x2 y2`` go to ``image``, with
    ellipses of both corners.
    frames: (inputs, targets) by the number of the frame, for the points or images behind: lists of clouds (n, 3 or more), images
    (1, C, height, width), whose colours ``color_model`` names.
    """
    rr = _rerun()
    draw = _in_image if detections.fields[:4] == IMAGE else _in_space
    if draw is _in_space and not set(PLANE) <= set(detections.fields):
        raise BoxcovError(
            f"rerun takes boxes of {' '.join(PLANE)}, z and h too, or {' '.join(IMAGE)}; these are {' '.join(detections.fields)}"
        )
    numbers = sorted(
        set(detections.frame.tolist()) | set(range(0 if frames is None else len(frames)))
    )
    with atomic_write(path) as temporary:
        recording = rr.RecordingStream("boxcov")
        recording.save(temporary)
        for number in numbers:
            recording.set_time("frame", sequence=int(number))
            if frames is not None and number < len(frames):
                _background(rr, recording, frames[number][0], color_model)
            draw(rr, recording, detections[detections.frame == number])
        recording.flush()
        recording.disconnect()


def ellipsoids(covariance: Array) -> tuple[Array, Array]:
    """The half axes (m, 3) of the 1 sigma ellipsoids of covariances (m, 3, 3), and their turns as quaternions x y z w (m, 4).

    >>> half, turn = ellipsoids(np.diag([4.0, 1.0, 0.25])[None])
    >>> half[0].tolist()
    [0.5, 1.0, 2.0]
    """
    values, vectors = np.linalg.eigh(covariance)  # axes in columns
    vectors = (
        vectors * np.where(np.linalg.det(vectors) < 0, -1.0, 1.0)[:, None, None]
    )  # a turn, not a mirror
    return np.sqrt(values.clip(min=0)), quaternions(vectors)


def quaternions(R: Array) -> Array:
    """Quaternions x y z w (m, 4) of rotation matrices (m, 3, 3).

    >>> quaternions(np.eye(3)[None]).tolist()
    [[0.0, 0.0, 0.0, 1.0]]
    """
    # the eigenvector of the greatest eigenvalue, Bar-Itzhack: no case by case
    K = np.empty((len(R), 4, 4))
    xx, yy, zz = R[:, 0, 0], R[:, 1, 1], R[:, 2, 2]
    K[:, 0, 0], K[:, 1, 1], K[:, 2, 2], K[:, 3, 3] = (
        xx - yy - zz,
        yy - xx - zz,
        zz - xx - yy,
        xx + yy + zz,
    )
    pairs = {
        (0, 1): R[:, 1, 0] + R[:, 0, 1],
        (0, 2): R[:, 2, 0] + R[:, 0, 2],
        (1, 2): R[:, 2, 1] + R[:, 1, 2],
    }
    pairs |= {
        (0, 3): R[:, 2, 1] - R[:, 1, 2],
        (1, 3): R[:, 0, 2] - R[:, 2, 0],
        (2, 3): R[:, 1, 0] - R[:, 0, 1],
    }
    for (i, j), value in pairs.items():
        K[:, i, j] = K[:, j, i] = value
    found: Array = np.linalg.eigh(K / 3)[1][:, :, -1]
    return found * np.where(found[:, 3:] < 0, -1.0, 1.0)


def _in_space(rr: Any, recording: Any, found: Detections) -> None:
    known = found.numpy()
    value = {name: known["boxes"][:, i].astype(float) for i, name in enumerate(found.fields)}
    nothing = np.zeros(len(found))
    centre = np.stack([value["x"], value["y"], value.get("z", nothing)], 1)
    half = np.stack([value["l"], value["w"], value.get("h", nothing)], 1) / 2
    turn = np.stack([nothing, nothing, np.sin(value["yaw"] / 2), np.cos(value["yaw"] / 2)], 1)
    labels = _labels(found)
    recording.log(
        "world/boxes",
        rr.Boxes3D(
            centers=centre,
            half_sizes=half,
            quaternions=turn,
            labels=labels,
            class_ids=known["labels"],
        ),
    )
    for kind, C in _covariances(found):
        whole = np.zeros((len(found), 3, 3))
        at = [found.fields.index(name) for name in ("x", "y", "z") if name in found.fields]
        whole[:, : len(at), : len(at)] = C[:, at][:, :, at]
        axes, tilt = ellipsoids(whole)
        for sigmas in SIGMAS:
            shape = rr.Ellipsoids3D(
                centers=centre,
                half_sizes=sigmas * axes,
                quaternions=tilt,
                class_ids=known["labels"],
            )
            recording.log(f"world/{kind}/{sigmas}_sigma", shape)


def _in_image(rr: Any, recording: Any, found: Detections) -> None:
    from boxcov.evaluate.geometry import ellipse

    known = found.numpy()
    boxes = known["boxes"][:, :4].astype(float)
    shape = rr.Boxes2D(
        array=boxes,
        array_format=rr.Box2DFormat.XYXY,
        labels=_labels(found),
        class_ids=known["labels"],
    )
    recording.log("image/boxes", shape)
    for kind, C in _covariances(found):
        for sigmas in SIGMAS:
            lines = [
                ellipse(box[k : k + 2], c[k : k + 2, k : k + 2], sigmas)
                for box, c in zip(boxes, C)
                for k in (0, 2)
            ]
            recording.log(f"image/{kind}/{sigmas}_sigma", rr.LineStrips2D(lines))


def _background(rr: Any, recording: Any, inputs: Any, color_model: str) -> None:
    if isinstance(inputs, (list, tuple)) and inputs and isinstance(inputs[0], Tensor):
        recording.log("world/points", rr.Points3D(inputs[0][:, :3].detach().cpu().numpy()))
    elif isinstance(inputs, Tensor) and inputs.dim() == 4:
        image = inputs[0].detach().cpu().float()
        image = (
            image * (255 / image.max().clamp(min=1e-6)) if float(image.max()) <= 4 else image
        )  # 0 to 1, or so
        pixels = image.clamp(0, 255).to(torch.uint8).movedim(0, 2).numpy()
        recording.log(
            "image",
            rr.Image(pixels, color_model)
            if pixels.shape[2] == 3
            else rr.Image(pixels[:, :, 0], "L"),
        )


def _covariances(found: Detections) -> list[tuple[str, Array]]:
    kinds = (("epistemic", found.covariance), ("predictive", found.predictive))
    return [
        (kind, C.detach().cpu().double().numpy())
        for kind, C in kinds
        if C is not None and len(found)
    ]


def _labels(found: Detections) -> list[str]:
    names = [found.classes[label] for label in found.labels.tolist()]
    if found.covariance is None:
        return [f"{name} {score:.2f}" for name, score in zip(names, found.scores.tolist())]
    return [
        f"{name} {score:.2f}, u {u:.3g}"
        for name, score, u in zip(names, found.scores.tolist(), found.uncertainty.tolist())
    ]


def _rerun() -> Any:
    try:
        import rerun
    except ImportError:
        raise BoxcovError("the format rerun needs rerun-sdk: pip install 'boxcov[rerun]'") from None
    return rerun
