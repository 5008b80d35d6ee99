"""The configuration of a CenterPoint: ranges, sizes, reporting rules and loss."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, Literal, get_args

from boxcov._files.input_file import conform, parse_metadata
from boxcov._files.output_file import to_json
from boxcov.detectors.centerpoint.voxels import VoxelGrid
from boxcov.errors import BoxcovError, check_choice

Framework = Literal["mmdet3d", "det3d", "openpcdet"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)

MAX_LAYERS = 256  # of the encoder and of the blocks together
MAX_CELLS = 1 << 13  # of the grid along one axis
MAX_CANDIDATES = 4096  # per task: NMS compares each with each

NUSCENES_TASKS = (
    ("car",),
    ("truck", "construction_vehicle"),
    ("bus", "trailer"),
    ("barrier",),
    ("motorcycle", "bicycle"),
    ("pedestrian", "traffic_cone"),
)


@dataclass(frozen=True)
class Pillars:
    """The pillar encoder."""

    # Output width of each layer. In all but the last, half of it is the maximum over the pillar.
    widths: tuple[int, ...] = (64,)
    centre_z: bool = True  # whether the height above the pillar's centre is an input
    padded: bool = True  # whether the zeros that fill up a pillar take part in its maximum
    max_points: int | None = 20  # per pillar; None: no limit
    max_cells: tuple[int, int] | None = (30000, 40000)  # pillars per frame, training and inference
    any_height: bool = False  # whether points above and below the range count too

    def __post_init__(self) -> None:
        if self.padded and self.max_points is None:
            raise BoxcovError(
                "pillars are padded to their max_points: give max_points, or padded=False"
            )

    @property
    def point_features(self) -> int:
        """Numbers per point that the first layer reads."""
        return 11 if self.centre_z else 10


@dataclass(frozen=True)
class Voxels:
    """The sparse 3-D encoder: four stages, each at half the resolution of the one before."""

    widths: tuple[int, int, int, int] = (16, 32, 64, 128)
    max_points: int | None = 10  # per voxel
    max_cells: tuple[int, int] | None = (90000, 120000)  # voxels per frame, training and inference
    shuffled: bool = False  # whether the limits take points in a random, fixed order


@dataclass(frozen=True)
class Dense:
    """SECOND, SECONDFPN and the widths of the head; the defaults are those of pillar networks."""

    widths: tuple[int, ...] = (64, 128, 256)
    layers: tuple[int, ...] = (3, 5, 5)  # convolutions after the first of each block
    strides: tuple[int, ...] = (2, 2, 2)
    up_widths: tuple[int, ...] = (128, 128, 128)
    up_strides: tuple[float, ...] = (0.5, 1, 2)  # below 1: a strided convolution
    shared: int = 64  # channels of the head's shared convolution
    branch: int = 64  # channels of the head's branches

    @property
    def neck(self) -> int:
        """Channels of the neck's map."""
        return sum(self.up_widths)


@dataclass(frozen=True)
class Reporting:
    """Which boxes are reported: score threshold, best candidates, NMS within each task."""

    threshold: float = 0.1
    candidates: int = 500  # per task, by descending score
    # Whether a cell may report several classes, and the best candidates are taken before those
    # outside centre_range are dropped (mmdetection3d, OpenPCDet); False: neither (det3d)
    per_class: bool = True
    nms: Literal["rotated", "circle"] = "rotated"
    overlap: float = 0.2  # rotated NMS: the largest IoU of two boxes of a task
    # circle NMS: each task's bound on the SQUARED distance, as in the originals
    radii: tuple[float, ...] = (4.0, 12.0, 10.0, 1.0, 0.85, 0.175)
    max_boxes: int = 83  # boxes per task; six tasks make 498, the nuScenes limit is 500
    centre_range: tuple[float, ...] = (-61.2, -61.2, -10.0, 61.2, 61.2, 10.0)

    @staticmethod
    def of(framework: Framework) -> Reporting:
        check_choice("framework", framework, Framework)
        if framework == "det3d":
            return Reporting(candidates=1000, per_class=False)
        return Reporting()


@dataclass(frozen=True)
class Loss:
    """The conventions of the loss in which the frameworks differ."""

    weights: tuple[float, ...] = (*[1.0] * 8, 0.2, 0.2)  # reg 2, height, dim 3, rot 2, vel 2
    box_weight: float = 0.25
    # What the focal loss counts as positive: the objects, or the cells where the target heat is 1.
    positives: Literal["objects", "peaks"] = "peaks"
    # Divisor of a task's box loss: n + 1e-4 ("plus") or max(n, 1) ("max").
    normaliser: Literal["plus", "max"] = "plus"
    max_objects: int = 500  # per task and frame
    # Which objects are targets: those with their centre in the range in x and y, also in z
    # ("centre_3d"), or with any corner in it and a centre less than a cell below it ("corner").
    inside: Literal["centre", "centre_3d", "corner"] = "centre"
    # The target of an unknown velocity; the frameworks replace it by 0 when they read the data.
    unknown_velocity: Literal["ignored", "zero"] = "ignored"

    @staticmethod
    def of(framework: Framework) -> Loss:
        loss = Loss(unknown_velocity="zero")
        if framework == "openpcdet":  # it gives the rotation the small weight, not the velocity
            weights = (*[1.0] * 6, 0.2, 0.2, 1.0, 1.0)
            return replace(loss, weights=weights, normaliser="max", inside="centre_3d")
        if framework == "det3d":
            return replace(loss, positives="objects", inside="corner")
        return loss


@dataclass(frozen=True)
class Config:
    """A CenterPoint: a named network, for example ``Config.small()``, or a variation of one.

    >>> from dataclasses import replace
    >>> Config.pillar().map_size, Config.voxel(0.075).map_size
    ((128, 128), (180, 180))
    >>> replace(Config.small(), tasks=(("car", "truck"),)).classes
    ('car', 'truck')
    """

    tasks: tuple[tuple[str, ...], ...] = NUSCENES_TASKS
    point_range: tuple[float, ...] = (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0)
    voxel_size: tuple[float, ...] = (0.2, 0.2, 8.0)
    encoder: Pillars | Voxels = field(default_factory=Pillars)
    dense: Dense = field(default_factory=Dense)
    reporting: Reporting = field(default_factory=Reporting)
    loss: Loss = field(default_factory=Loss)
    sweeps: int | None = None  # per frame in training, the newest included; None: not known
    velocity: bool = True  # False: boxes are x y z w l h yaw, without a velocity branch

    def __post_init__(self) -> None:
        self._check_counts()
        dense = self.dense
        blocks = (dense.widths, dense.layers, dense.strides, dense.up_widths, dense.up_strides)
        if len({len(values) for values in blocks}) > 1:
            raise BoxcovError(
                f"widths, layers and strides of the blocks must have one length, got {dense}"
            )
        strides = [prod(dense.strides[: i + 1]) for i in range(len(dense.strides))]
        if len({round(s / up, 6) for s, up in zip(strides, dense.up_strides)}) != 1:
            raise BoxcovError(
                f"the neck's maps differ in size: strides {dense.strides}, "
                f"up_strides {dense.up_strides}"
            )
        nx, ny, _ = self.grid
        deepest = self._encoder_stride * prod(dense.strides)
        if nx % deepest or ny % deepest:
            raise BoxcovError(
                f"a grid of {nx} x {ny} cells is not divisible by the stride {deepest}: "
                "change point_range or voxel_size"
            )
        if self.reporting.nms == "circle" and len(self.reporting.radii) != len(self.tasks):
            raise BoxcovError(
                f"{len(self.tasks)} tasks, but {len(self.reporting.radii)} radii for circle NMS"
            )

    def _check_counts(self) -> None:
        """Raise if a number of layers, cells or boxes is out of range."""
        dense, rules = self.dense, self.reporting
        if 0 in (*self.voxel_size, *dense.up_strides):
            raise BoxcovError(
                f"no voxel_size ({self.voxel_size}) or up_strides ({dense.up_strides}) may be 0"
            )
        widths = (*dense.widths, *dense.up_widths, *self.encoder.widths, *dense.strides)
        ranges = {
            "number of blocks": (len(dense.widths), 1, MAX_LAYERS),
            "number of layers": (sum(dense.layers), 0, MAX_LAYERS),
            "smallest number of layers": (min(dense.layers, default=0), 0, MAX_LAYERS),
            "number of encoder layers": (len(self.encoder.widths), 1, MAX_LAYERS),
            "smallest width or stride": (min(*widths, dense.shared, dense.branch), 1, 1 << 20),
            **{f"number of cells along {a}": (n, 1, MAX_CELLS) for a, n in zip("xyz", self.grid)},
            "number of candidates": (rules.candidates, 1, MAX_CANDIDATES),
            "number of boxes": (rules.max_boxes, 1, MAX_CANDIDATES),
        }
        for name, (value, low, high) in ranges.items():
            if not low <= value <= high:
                raise BoxcovError(f"the {name} must be {low} to {high}, got {value}")

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for task in self.tasks for name in task)

    @property
    def box_fields(self) -> tuple[str, ...]:
        return ("x", "y", "z", "w", "l", "h", "yaw", *(("vx", "vy") if self.velocity else ()))

    @property
    def branches(self) -> dict[str, int]:
        """Channels of each regression branch of a task, in the order of the loss weights."""
        return {"reg": 2, "height": 1, "dim": 3, "rot": 2, **({"vel": 2} if self.velocity else {})}

    def first_class(self, task: int) -> int:
        """Return the label of a task's first class."""
        return sum(len(names) for names in self.tasks[:task])

    @property
    def grid(self) -> tuple[int, int, int]:
        """Cells along x, y and z."""
        low, high = self.point_range[:3], self.point_range[3:]
        nx, ny, nz = (round((b - a) / size) for a, b, size in zip(low, high, self.voxel_size))
        return nx, ny, nz

    def voxel_grid(self, training: bool) -> VoxelGrid:
        """Return the grid with the limits of training or of inference."""
        limits = self.encoder.max_cells
        max_cells = None if limits is None else limits[0 if training else 1]
        return VoxelGrid(
            self.point_range,
            self.voxel_size,
            self.grid,
            self.encoder.max_points,
            max_cells,
            any_height=isinstance(self.encoder, Pillars) and self.encoder.any_height,
            shuffled=isinstance(self.encoder, Voxels) and self.encoder.shuffled,
        )

    @property
    def bev_channels(self) -> int:
        """Channels of the encoder's map."""
        return self.encoder.widths[-1] * (2 if isinstance(self.encoder, Voxels) else 1)

    @property
    def stride(self) -> int:
        """Grid cells along one side of a cell of the head's map."""
        return round(self._encoder_stride * self.dense.strides[0] / self.dense.up_strides[0])

    @property
    def cell(self) -> tuple[float, float]:
        """Size of a cell of the head's map in metres, along x and y."""
        return self.stride * self.voxel_size[0], self.stride * self.voxel_size[1]

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows (y) and columns (x) of the head's map."""
        return self.grid[1] // self.stride, self.grid[0] // self.stride

    @property
    def _encoder_stride(self) -> int:
        return 8 if isinstance(self.encoder, Voxels) else 1

    # named networks

    @staticmethod
    def pillar(framework: Framework = "mmdet3d") -> Config:
        """A framework's network on pillars of 0.2 m.

        The encoder of mmdetection3d has one layer; those of det3d, which reports one class per
        cell, and of OpenPCDet, which has no limits and takes points of any height, have two.
        """
        encoder = Pillars()
        if framework == "det3d":
            encoder = Pillars((64, 64), centre_z=False, max_cells=(30000, 60000))
        if framework == "openpcdet":
            no_limits = Pillars(padded=False, max_points=None, max_cells=None, any_height=True)
            encoder = replace(no_limits, widths=(64, 64))
        rules, loss = Reporting.of(framework), Loss.of(framework)
        return Config(encoder=encoder, reporting=rules, loss=loss)

    @staticmethod
    def voxel(size: float = 0.1, framework: Framework = "mmdet3d") -> Config:
        """A framework's network on voxels of 0.1 m or 0.075 m; weights have the same shapes."""
        if size not in (0.1, 0.075):
            raise BoxcovError(
                f"the voxel networks have voxels of 0.1 or 0.075 m, got {size}: "
                "make others with dataclasses.replace"
            )
        few = framework == "openpcdet" and size == 0.1
        many = framework != "mmdet3d" and size == 0.075
        side = 51.2 if size == 0.1 else 54.0
        return Config(
            point_range=(-side, -side, -5.0, side, side, 3.0),
            voxel_size=(size, size, 0.2),
            encoder=Voxels(
                max_cells=(60000, 60000) if few else (120000, 160000) if many else (90000, 120000),
                shuffled=framework == "openpcdet",
            ),
            dense=Dense((128, 256), (5, 5), (1, 2), up_widths=(256, 256), up_strides=(1, 2)),
            reporting=Reporting.of(framework),
            loss=Loss.of(framework),
        )

    @staticmethod
    def small() -> Config:
        """A light network for 2 CPU cores: pillars of 0.4 m, a map of 128 x 128 cells of 0.8 m."""
        return Config(
            voxel_size=(0.4, 0.4, 8.0),
            encoder=Pillars(widths=(32,)),
            dense=Dense(
                widths=(48, 96, 128),
                layers=(2, 4, 4),
                up_widths=(64, 64, 64),
                up_strides=(1, 2, 4),
                shared=32,
                branch=16,
            ),
        )

    @staticmethod
    def kitti(tasks: tuple[tuple[str, ...], ...] = (("car",), ("pedestrian", "cyclist"))) -> Config:
        """A network that looks forward only and predicts no velocity, for data sets like KITTI."""
        return replace(
            Config.pillar(),
            tasks=tasks,
            point_range=(0.0, -40.0, -3.0, 70.4, 40.0, 1.0),
            voxel_size=(0.2, 0.2, 4.0),
            reporting=Reporting(
                radii=(4.0,) * len(tasks), centre_range=(-5.0, -45.0, -10.0, 75.0, 45.0, 10.0)
            ),
            velocity=False,
        )

    def to_json(self) -> str:
        """Return the config as text, which ``from_json`` reads."""
        return to_json({**asdict(self), "kind": type(self.encoder).__name__})

    @staticmethod
    def from_json(text: str) -> Config:
        """Return the config that ``to_json`` wrote; any error if the text is damaged."""
        given = conform(parse_metadata(text), dict[str, Any], "config")
        encoder = {"Pillars": Pillars, "Voxels": Voxels}[given.pop("kind")]
        if "most" in given["reporting"]:  # the name in files of version 0.1
            given["reporting"]["max_boxes"] = given["reporting"].pop("most")
        given["encoder"] = conform(given["encoder"], encoder, "encoder")
        return conform(given, Config, "config")
