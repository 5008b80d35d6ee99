"""The settings of a CenterPoint's pieces: encoder, dense layers, reporting rules, loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from boxcov.errors import BoxcovError

Framework = Literal["mmdet3d", "det3d", "openpcdet"]


@dataclass(frozen=True)
class Pillars:
    """The pillar encoder: what a point is decorated with, and the widths of its layers.

    >>> Pillars().decorated, Pillars(centre_z=False).decorated
    (11, 10)
    """

    widths: tuple[int, ...] = (
        64,
    )  # of each layer's output; all but the last give half of it, and their pillar's maximum the other half
    centre_z: bool = True  # whether the height over the pillar's centre is among the decorations
    padded: bool = (
        True  # whether a pillar that is not full holds zeros that take part in its maximum
    )
    max_points: int | None = 20  # a pillar; None: no limit
    max_cells: tuple[int, int] | None = (
        30000,
        40000,
    )  # pillars a frame, in training and after; None: no limit

    def __post_init__(self) -> None:
        if self.padded and self.max_points is None:
            raise BoxcovError(
                "pillars are padded to their max_points: give max_points, or padded=False"
            )

    @property
    def decorated(self) -> int:
        return 11 if self.centre_z else 10


@dataclass(frozen=True)
class Voxels:
    """The sparse 3-D encoder: the widths of its four stages, each half as fine as the one before.

    >>> Voxels().max_points
    10
    """

    widths: tuple[int, int, int, int] = (16, 32, 64, 128)
    max_points: int | None = 10  # a voxel
    max_cells: tuple[int, int] | None = (90000, 120000)


@dataclass(frozen=True)
class Dense:
    """SECOND, SECONDFPN and the head's widths; the defaults are those of the pillar networks.

    >>> Dense().neck
    384
    """

    widths: tuple[int, ...] = (64, 128, 256)
    layers: tuple[int, ...] = (3, 5, 5)  # convolutions after the first of each block
    strides: tuple[int, ...] = (2, 2, 2)
    up_widths: tuple[int, ...] = (128, 128, 128)
    up_strides: tuple[float, ...] = (0.5, 1, 2)  # below 1: a strided convolution
    shared: int = 64  # channels that all branches read
    branch: int = 64

    @property
    def neck(self) -> int:
        return sum(self.up_widths)


@dataclass(frozen=True)
class Reporting:
    """Which boxes are reported: score threshold, best candidates, non-maximum suppression inside a task.

    >>> Reporting(nms="circle").radii
    (4.0, 12.0, 10.0, 1.0, 0.85, 0.175)
    """

    threshold: float = 0.1
    candidates: int = 500  # a task, by falling score
    per_class: bool = (
        True  # a cell may stand for several classes; otherwise for its best class alone
    )
    nms: Literal["rotated", "circle"] = "rotated"
    overlap: float = 0.2  # rotated: the largest IoU of two boxes of a task
    radii: tuple[float, ...] = (
        4.0,
        12.0,
        10.0,
        1.0,
        0.85,
        0.175,
    )  # circle: a task's bound on the SQUARED distance, as in the originals
    most: int = 83  # boxes a task; six tasks make 498, the nuScenes limit is 500
    centre_range: tuple[float, ...] = (-61.2, -61.2, -10.0, 61.2, 61.2, 10.0)


@dataclass(frozen=True)
class Loss:
    """The conventions in which the frameworks differ.

    >>> Loss.of("openpcdet").weights[6:]
    (0.2, 0.2, 1.0, 1.0)
    """

    weights: tuple[float, ...] = (
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.2,
        0.2,
    )  # reg 2, height, dim 3, rot 2, vel 2
    box_weight: float = 0.25
    positives: Literal["objects", "peaks"] = (
        "peaks"  # what the focal loss counts: objects, or cells where the heat is 1
    )
    normaliser: Literal["plus", "max", "none"] = (
        "plus"  # of a task's box loss: n + 1e-4, or max(n, 1); "none": neither it nor the heat is divided
    )
    max_objects: int = 500  # a task and frame

    @staticmethod
    def of(framework: Framework) -> Loss:
        if framework == "openpcdet":  # it weighs the rotation down, not the velocity
            return Loss(weights=(*[1.0] * 6, 0.2, 0.2, 1.0, 1.0), normaliser="max")
        return Loss(positives="objects") if framework == "det3d" else Loss()
