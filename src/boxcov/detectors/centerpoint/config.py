"""What a CenterPoint is made of: ranges, sizes, rules and conventions, as frozen values that travel with its weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from boxcov.detectors.centerpoint.settings import Dense, Framework, Loss, Pillars, Reporting, Voxels
from boxcov.errors import BoxcovError

NUSCENES_TASKS = (
    ("car",),
    ("truck", "construction_vehicle"),
    ("bus", "trailer"),
    ("barrier",),
    ("motorcycle", "bicycle"),
    ("pedestrian", "traffic_cone"),
)


@dataclass(frozen=True)
class Config:
    """A CenterPoint. The named ones are constructors below; others are made with ``dataclasses.replace``.

    >>> from dataclasses import replace
    >>> Config.mmdet3d_pillar().map_size, Config.voxel(0.075).map_size
    ((128, 128), (180, 180))
    >>> replace(Config.mmdet3d_pillar(), voxel_size=(0.3, 0.3, 8.0))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: a grid of 341 x 341 cells does not divide by the network's stride of 8: change point_range or voxel_size
    """

    tasks: tuple[tuple[str, ...], ...] = NUSCENES_TASKS
    point_range: tuple[float, ...] = (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0)
    voxel_size: tuple[float, ...] = (0.2, 0.2, 8.0)
    encoder: Pillars | Voxels = field(default_factory=Pillars)
    dense: Dense = field(default_factory=Dense)
    reporting: Reporting = field(default_factory=Reporting)
    loss: Loss = field(default_factory=Loss)
    velocity: bool = (
        True  # False: boxes are x y z w l h yaw, and there is no branch for the velocity
    )

    def __post_init__(self) -> None:
        if (
            len(
                {
                    len(t)
                    for t in (
                        self.dense.widths,
                        self.dense.layers,
                        self.dense.strides,
                        self.dense.up_widths,
                        self.dense.up_strides,
                    )
                }
            )
            > 1
        ):
            raise BoxcovError(
                f"widths, layers and strides of the blocks must have one length, got {self.dense}"
            )
        outputs = {
            round(prod(self.dense.strides[: i + 1]) / up, 6)
            for i, up in enumerate(self.dense.up_strides)
        }
        if len(outputs) != 1:
            raise BoxcovError(
                f"the neck's maps differ in size: strides {self.dense.strides}, up_strides {self.dense.up_strides}"
            )
        nx, ny, _ = self.grid
        deepest = self._encoder_stride * prod(self.dense.strides)
        if nx % deepest or ny % deepest:
            raise BoxcovError(
                f"a grid of {nx} x {ny} cells does not divide by the network's stride of {deepest}: change point_range or voxel_size"
            )
        if self.reporting.nms == "circle" and len(self.reporting.radii) != len(self.tasks):
            raise BoxcovError(
                f"{len(self.tasks)} tasks, but {len(self.reporting.radii)} radii for circle NMS"
            )

    # what follows from it

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for task in self.tasks for name in task)

    @property
    def box_fields(self) -> tuple[str, ...]:
        return ("x", "y", "z", "w", "l", "h", "yaw", *(("vx", "vy") if self.velocity else ()))

    @property
    def branches(self) -> dict[str, int]:
        """The regression branches of a task and their channels, in the order of the loss weights."""
        return {"reg": 2, "height": 1, "dim": 3, "rot": 2, **({"vel": 2} if self.velocity else {})}

    def first_class(self, task: int) -> int:
        """The number in ``classes`` of a task's first one."""
        return sum(len(names) for names in self.tasks[:task])

    @property
    def grid(self) -> tuple[int, int, int]:
        """Cells along x, y and z."""
        nx, ny, nz = (
            round((self.point_range[3 + i] - self.point_range[i]) / self.voxel_size[i])
            for i in range(3)
        )
        return nx, ny, nz

    @property
    def bev_channels(self) -> int:
        """Channels of the map that the encoder gives."""
        return self.encoder.widths[-1] * (2 if isinstance(self.encoder, Voxels) else 1)

    @property
    def stride(self) -> int:
        """Cells of the grid along a side of a cell of the head's map."""
        return round(self._encoder_stride * self.dense.strides[0] / self.dense.up_strides[0])

    @property
    def cell(self) -> tuple[float, float]:
        """Metres of a cell of the head's map, along x and y."""
        return self.stride * self.voxel_size[0], self.stride * self.voxel_size[1]

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows (y) and columns (x) of the head's map."""
        return self.grid[1] // self.stride, self.grid[0] // self.stride

    @property
    def _encoder_stride(self) -> int:
        return 8 if isinstance(self.encoder, Voxels) else 1

    # the named ones

    @staticmethod
    def mmdet3d_pillar() -> Config:
        """mmdetection3d's pillars of 0.2 m: one layer in the encoder.

        >>> Config.mmdet3d_pillar().encoder.widths
        (64,)
        """
        return Config()

    @staticmethod
    def det3d_pillar() -> Config:
        """det3d's pillars of 0.2 m: two layers in the encoder, one class a cell.

        >>> Config.det3d_pillar().encoder.decorated
        10
        """
        encoder = Pillars(widths=(64, 64), centre_z=False, max_cells=(30000, 60000))
        return Config(
            encoder=encoder,
            reporting=Reporting(candidates=1000, per_class=False),
            loss=Loss.of("det3d"),
        )

    @staticmethod
    def openpcdet_pillar() -> Config:
        """OpenPCDet's pillars of 0.2 m: two layers in the encoder, no limits.

        >>> Config.openpcdet_pillar().encoder.max_points is None
        True
        """
        encoder = Pillars(widths=(64, 64), padded=False, max_points=None, max_cells=None)
        return Config(encoder=encoder, loss=Loss.of("openpcdet"))

    @staticmethod
    def voxel(size: float = 0.1, framework: Framework = "mmdet3d") -> Config:
        """Voxels of 0.1 m or 0.075 m; the weights of both have the same shapes.

        >>> Config.voxel(0.075, "det3d").encoder.max_cells
        (120000, 160000)
        """
        if size not in (0.1, 0.075):
            raise BoxcovError(
                f"the voxel networks have voxels of 0.1 or 0.075 m, got {size}: make others with dataclasses.replace"
            )
        few = framework == "openpcdet" and size == 0.1
        many = framework != "mmdet3d" and size == 0.075
        side = 51.2 if size == 0.1 else 54.0
        return Config(
            point_range=(-side, -side, -5.0, side, side, 3.0),
            voxel_size=(size, size, 0.2),
            encoder=Voxels(
                max_cells=(60000, 60000) if few else (120000, 160000) if many else (90000, 120000)
            ),
            dense=Dense(
                widths=(128, 256),
                layers=(5, 5),
                strides=(1, 2),
                up_widths=(256, 256),
                up_strides=(1, 2),
            ),
            reporting=Reporting(candidates=1000, per_class=False)
            if framework == "det3d"
            else Reporting(),
            loss=Loss.of(framework),
        )

    @staticmethod
    def small() -> Config:
        """A light pillar network for 2 CPU cores: pillars of 0.4 m, a map of 128 x 128 cells of 0.8 m.

        >>> Config.small().map_size
        (128, 128)
        """
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
        """Looking forward only, no velocities: for sets like KITTI.

        >>> Config.kitti().classes
        ('car', 'pedestrian', 'cyclist')
        """
        return replace(
            Config.mmdet3d_pillar(),
            tasks=tasks,
            point_range=(0.0, -40.0, -3.0, 70.4, 40.0, 1.0),
            voxel_size=(0.2, 0.2, 4.0),
            reporting=Reporting(
                radii=(4.0,) * len(tasks), centre_range=(-5.0, -45.0, -10.0, 75.0, 45.0, 10.0)
            ),
            velocity=False,
        )

    # as text

    def to_json(self) -> str:
        """
        >>> Config.from_json(Config.small().to_json()) == Config.small()
        True
        """
        return json.dumps({**asdict(self), "kind": type(self.encoder).__name__})

    @staticmethod
    def from_json(text: str) -> Config:
        try:
            given = _tuples(json.loads(text))
            encoder = {"Pillars": Pillars, "Voxels": Voxels}[given.pop("kind")](
                **given.pop("encoder")
            )
            parts = {"dense": Dense, "reporting": Reporting, "loss": Loss}
            inner = {name: kind(**given.pop(name)) for name, kind in parts.items()}
            return Config(encoder=encoder, **inner, **given)
        except (
            LookupError,
            TypeError,
            AttributeError,
            ValueError,
            ArithmeticError,
            RecursionError,
        ) as error:
            if isinstance(error, BoxcovError):
                raise
            raise BoxcovError(
                f"not the description of a CenterPoint, or one of another version ({type(error).__name__}: {error})"
            ) from None


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(entry) for key, entry in value.items()}
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value
