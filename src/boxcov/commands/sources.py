"""The words of the command line: which detector, which frames."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from boxcov.data import kitti, nuscenes, simulated
from boxcov.data.poses import wrapped
from boxcov.detector import Detector
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint import Config
from boxcov.errors import BoxcovError

CONFIGS = ("small", "pillar", "voxel", "kitti")


def config_named(name: str) -> Config:
    """The configuration that a word of ``boxcov train --config`` means.

    >>> config_named("pillar") == Config.mmdet3d_pillar()
    True
    """
    made = {"small": Config.small, "pillar": Config.mmdet3d_pillar, "voxel": Config.voxel, "kitti": Config.kitti}
    if name not in made:
        raise BoxcovError(f"no configuration {name!r}: there are {', '.join(CONFIGS)}")
    return made[name]()


def detector_named(name: str, device: str = "cpu") -> Detector:
    """The detector that ``--detector FAMILY:WHERE`` means, frozen and on ``device``: ``centerpoint:small`` or ``centerpoint:PATH``.

    >>> detector_named("centerpoint:small").classes[0]
    'car'
    """
    family, _, where = name.partition(":")
    if family != "centerpoint" or not where:
        raise BoxcovError(f"no detector {name!r}: give centerpoint:small or centerpoint:PATH")
    return centerpoint.load(where).to(device).eval()


def frames_named(
    data: str, split: str | None = None, count: int = 100, seed: int = 0, sweeps: int = 10, device: str = "cpu"
) -> Sequence[Any]:
    """The frames that ``--data KIND:WHERE`` means: ``simulated:clear``, ``nuscenes:ROOT``, ``kitti:ROOT``.

    ``count`` and ``seed`` are for the simulator; ``split`` names a split of a real set, with a range of its frames if need be:
    ``train[:28]``, ``training[50:]``.

    >>> len(frames_named("simulated:rain", count=3))
    3
    """
    kind, _, where = data.partition(":")
    if kind == "simulated":
        return simulated.frames(where or "clear", seed=seed, count=count, sweeps=sweeps, device=device)
    name, part = _split_part(split)
    if kind == "nuscenes" and where:
        frames: Sequence[Any] = nuscenes.frames(where, split=name or "train", sweeps=sweeps)
        return frames[part]
    if kind == "kitti" and where:
        drive = kitti.frames(where, split=name or "training")
        return [as_nuscenes(drive[i]) for i in range(len(drive))[part]]
    raise BoxcovError(f"no data {data!r}: give simulated:SCENARIO, nuscenes:ROOT or kitti:ROOT")


def _split_part(split: str | None) -> tuple[str, slice]:
    name, bracket, rest = (split or "").partition("[")
    if not bracket:
        return name, slice(None)
    try:
        start, stop = (int(end) if end else None for end in rest.removesuffix("]").split(":"))
    except ValueError:
        raise BoxcovError(f"split {split!r}: a part is given as in train[:28] or train[28:40]") from None
    return name, slice(start, stop)


def as_nuscenes(frame: Any) -> Any:
    """A KITTI frame in the axes and classes of nuScenes: x to the right and y ahead; cars, people and bicycles.

    >>> ahead = torch.tensor([[10.0, 0.0, 0.0, 1.8, 4.2, 1.5, 0.0, float("nan"), float("nan")]])
    >>> _, targets = as_nuscenes(([torch.zeros(1, 5)], [{"boxes": ahead, "labels": torch.tensor([2])}]))
    >>> targets[0]["boxes"][0, :2].tolist(), simulated.CLASSES[targets[0]["labels"][0]]
    ([-0.0, 10.0], 'bicycle')
    """
    points, targets = frame
    classes = torch.tensor([simulated.CLASSES.index(name) for name in ("car", "pedestrian", "bicycle")])  # Car, Pedestrian, Cyclist
    turned = [torch.cat([-cloud[:, 1:2], cloud[:, :1], cloud[:, 2:]], 1) for cloud in points]
    boxes = [target["boxes"] for target in targets]
    moved = [torch.cat([-b[:, 1:2], b[:, :1], b[:, 2:6], wrapped(b[:, 6:7] + pi / 2), b[:, 7:]], 1) for b in boxes]
    return turned, [{**target, "boxes": b, "labels": classes[target["labels"]]} for target, b in zip(targets, moved)]


def kept(frames: Sequence[Any], device: str, together: int = 8) -> list[Any]:
    """All frames, made once and held on ``device``: for training over many epochs.

    >>> len(kept(simulated.frames(count=3, sweeps=1), "cpu"))
    3
    """
    items = []
    for start in range(0, len(frames), together):
        numbers = range(start, min(start + together, len(frames)))
        if isinstance(frames, simulated.Simulated):  # a GPU makes several at a time
            points, targets = frames.batch(list(numbers))
            made = [([cloud], [target]) for cloud, target in zip(points, targets)]
        else:
            made = [frames[i] for i in numbers]
        items += tree_map_only(Tensor, lambda t: t.to(torch.device(device)), made)
    return items
