"""The words of the command line: which detector, which frames, where to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import pi
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from boxcov.data import batched, coco, kitti, loaded, nuscenes, simulated
from boxcov.data.poses import wrap_angle
from boxcov.data.sequence import Batches
from boxcov.detector import Detector
from boxcov.detectors import centerpoint, transformers, yolox
from boxcov.detectors.centerpoint import Config
from boxcov.errors import BoxcovError
from boxcov.files import check_writable, made_folder

CONFIGS = ("small", "pillar", "voxel", "kitti")
KITTI_AS_NUSCENES = {"Car": "car", "Pedestrian": "pedestrian", "Cyclist": "bicycle"}
SPLITS = {"train": 0, "test": 1000, "val": 2000}  # of simulated frames: what is added to the seed
Making = Callable[[int, int], None]
D = TypeVar("D", bound=Detector)


def config_named(name: str) -> Config:
    """The configuration that a word of ``boxcov train --config`` means.

    >>> config_named("pillar") == Config.mmdet3d_pillar()
    True
    """
    made = {
        "small": Config.small,
        "pillar": Config.mmdet3d_pillar,
        "voxel": Config.voxel,
        "kitti": Config.kitti,
    }
    if name not in made:
        raise BoxcovError(f"no configuration {name!r}: there are {', '.join(CONFIGS)}")
    return made[name]()


def detector_named(word: str, device: str = "cpu") -> Detector:
    """The detector that ``--detector KIND:WHICH`` means: ``centerpoint:small``, ``centerpoint:CHECKPOINT``, ``yolox:CHECKPOINT`` or
    ``transformers:FOLDER``.

    >>> len(detector_named("centerpoint:small").classes)
    10
    """
    kind, _, which = word.partition(":")
    loaders: dict[str, Callable[[str], Detector]] = {
        "centerpoint": centerpoint.load,
        "yolox": yolox.load,
        "transformers": transformers.load,
    }
    if kind not in loaders or not which:
        raise BoxcovError(
            f"no detector {word!r}: give centerpoint:small, or centerpoint: or yolox: and the path of a checkpoint, or transformers: and a folder"
        )
    return on_device(loaders[kind](which), device)


def on_device(detector: D, device: str) -> D:
    """The detector there, or an error that says what the machine lacks.

    >>> on_device(detector_named("centerpoint:small"), "abacus")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: no device 'abacus' on this machine: give cpu, or cuda where torch sees a GPU
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise BoxcovError(
            f"no device {device!r} on this machine: give cpu, or cuda where torch sees a GPU"
        ) from None
    return detector.to(device)


def check_folder(out: Path, folder: bool = False) -> None:
    """Whether ``out`` can be written, a file or a ``folder``: better before an hour's work than after it.

    >>> check_folder(Path("nowhere/posterior.safetensors"))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere/posterior.safetensors: there is no folder nowhere: make it first
    """
    if not out.name:
        raise BoxcovError(f"{out}: is a folder; give the name of a file")
    if folder and out.is_file():
        raise BoxcovError(f"{out}: is a file; the format kitti writes a folder")
    if not folder and out.is_dir():
        raise BoxcovError(f"{out}: is a folder; give the name of a file")
    if not out.absolute().parent.is_dir():
        raise BoxcovError(f"{out}: there is no folder {out.parent}: make it first")
    if out.is_dir():
        made_folder(out)
    else:
        check_writable(out)


@dataclass(frozen=True)
class Source:
    """Which frames, in words: enough to find them again.

    >>> Source("simulated:rain", "test", count=3).sweeps
    10
    """

    data: str
    split: str | None = None
    count: int | None = None
    seed: int = 0
    sweeps: int = 10

    def frames(
        self, device: str = "cpu", classes: Sequence[str] = simulated.CLASSES
    ) -> Sequence[Any]:
        return frames_named(
            self.data, self.split, self.count, self.seed, self.sweeps, device, classes
        )

    def read(
        self, device: str, classes: Sequence[str], workers: int = 0, batch: int = 1
    ) -> Sequence[Any]:
        """The frames in batches, read ahead by so many processes.

        >>> len(Source("simulated:rain", count=3).read("cpu", simulated.CLASSES, workers=2, batch=2))
        2
        """
        frames = self.frames(device, classes)
        return ahead(frames if batch == 1 else batched(frames, batch), workers, device, self.seed)


def ahead(frames: Sequence[Any], workers: int, device: str, seed: int = 0) -> Sequence[Any]:
    """Frames read ahead by so many processes, or as they are."""
    made = frames.frames if isinstance(frames, Batches) else frames
    if workers and isinstance(made, simulated.Simulated) and device.startswith("cuda"):
        raise BoxcovError(
            "--workers is for frames that are read from files: simulated ones are made on the GPU, leave it out"
        )
    return loaded(frames, workers, seed) if workers else frames


def source_of(path: Path, meta: Mapping[str, Any], data: str | None) -> Source:
    """The frames that a file of detections says it was made from, and where they are now, if ``data`` says so.

    >>> source_of(Path("d.safetensors"), {"source": {"data": "kitti:old", "split": "training"}}, "kitti:new").data
    'kitti:new'
    """
    given = meta.get("source")
    if not isinstance(given, Mapping):
        raise BoxcovError(
            f"{path}: does not say which frames it was made from: make it with boxcov predict"
        )
    source = Source(**given)
    if data is None:
        return source
    if data.partition(":")[0] != source.data.partition(":")[0] or (
        data.startswith("simulated") and data != source.data
    ):
        raise BoxcovError(
            f"{path}: predictions for {source.data}, not for {data}: --data says where a set of files is now"
        )
    return replace(source, data=data)


def unseen_split(data: str) -> str:
    """The split to try a detector on that was trained on the default one; KITTI has labels for one split only.

    >>> unseen_split("simulated:fog"), unseen_split("nuscenes:ROOT"), unseen_split("kitti:ROOT")
    ('test', 'val', 'training')
    """
    return {"nuscenes": "val", "kitti": "training", "coco": "val2017"}.get(
        data.partition(":")[0], "test"
    )


def held_out_split(data: str) -> str:
    """The split to calibrate on: unseen in training, and another than ``boxcov predict`` takes, where there are enough of them.

    >>> held_out_split("simulated:fog"), held_out_split("nuscenes:ROOT")
    ('val', 'val')
    """
    return "val" if data.startswith("simulated") else unseen_split(data)


def frames_named(
    data: str,
    split: str | None = None,
    count: int | None = None,
    seed: int = 0,
    sweeps: int = 10,
    device: str = "cpu",
    classes: Sequence[str] = simulated.CLASSES,
) -> Sequence[Any]:
    """The frames that ``--data KIND:WHERE`` means: ``simulated:clear``, ``nuscenes:ROOT``, ``kitti:ROOT``, ``coco:ROOT``.

    COCO's images are letterboxed to 416 pixels, or as in ``coco:ROOT@640``; ``coco:ROOT@whole`` gives them as they are, for transformers.

    split: of a real set, with a range of its frames if need be: ``train[:28]``, ``training[50:]``; of simulated frames, train, test or val,
    each from seeds of its own. count: so many simulated frames (100), or the first ones of the split (all). classes: the detector's;
    KITTI's frames are turned into the axes and classes of nuScenes for a detector that knows those.

    >>> len(frames_named("simulated:rain", count=3))
    3
    """
    kind, _, where = data.partition(":")
    name, part = _split_part(split)
    if kind == "simulated":
        if part != slice(None):
            raise BoxcovError(
                f"split {split!r}: simulated frames have no parts: --count says how many, --split is one of {', '.join(SPLITS)}"
            )
        if (name or "train") not in SPLITS:
            raise BoxcovError(
                f"no split {name!r} of simulated frames: there are {', '.join(SPLITS)}"
            )
        size = 100 if count is None else count
        made = simulated.frames(
            where or "clear",
            seed=seed + SPLITS[name or "train"],
            count=size,
            sweeps=sweeps,
            device=device,
        )
        return _known(made, simulated.CLASSES, classes, data)
    if kind == "nuscenes" and where:
        name = name or "train"
        version = (
            "v1.0-mini"
            if name.startswith("mini")
            else "v1.0-test"
            if name == "test"
            else "v1.0-trainval"
        )
        samples = nuscenes.frames(where, version, name, sweeps)
        return _known(
            samples[part][:count], simulated.CLASSES, classes, f"{data}, split {split or name}"
        )
    if kind == "kitti" and where:
        drive = kitti.frames(where, split=name or "training")[part][:count]
        there = f"{data}, split {split or 'training'}"
        if tuple(c.lower() for c in classes) == tuple(c.lower() for c in kitti.CLASSES):
            return _known(drive, kitti.CLASSES, kitti.CLASSES, there)
        return _known(Turned(drive), simulated.CLASSES, classes, there)
    if kind == "coco" and where:
        root, square = _sized(where)
        images = coco.frames(root, name or "train2017", square)
        return _known(
            images[part][:count], images.classes, classes, f"{data}, split {split or 'train2017'}"
        )
    raise BoxcovError(
        f"no data {data!r}: give simulated:SCENARIO, nuscenes:ROOT, kitti:ROOT or coco:ROOT"
    )


def _sized(where: str) -> tuple[str, int | None]:
    """A folder of images, and the pixels of the squares that they are letterboxed to; None for images as they are.

    >>> _sized("data/coco"), _sized("data/coco@640"), _sized("data/coco@whole")
    (('data/coco', 416), ('data/coco', 640), ('data/coco', None))
    """
    root, _, size = where.rpartition("@")
    if root and size == "whole":
        return root, None
    return (root, int(size)) if root and size.isdecimal() else (where, 416)


def _known(
    frames: Sequence[Any], theirs: Sequence[str], classes: Sequence[str], where: str
) -> Sequence[Any]:
    if not len(frames):
        raise BoxcovError(
            f"{where}: there are no frames: widen the part of the split, or raise the count"
        )
    if tuple(theirs) != tuple(classes):
        raise BoxcovError(
            f"{where}: labels mean {', '.join(theirs)}; the detector knows {', '.join(classes)}"
        )
    return frames


def _split_part(split: str | None) -> tuple[str, slice]:
    name, bracket, rest = (split or "").partition("[")
    if not bracket:
        return name, slice(None)
    try:
        start, stop = (int(end) if end else None for end in rest.removesuffix("]").split(":"))
    except ValueError:
        raise BoxcovError(
            f"split {split!r}: a part is given as in train[:28] or train[28:40]"
        ) from None
    return name, slice(start, stop)


class Turned(Sequence[Any]):
    """KITTI's frames in the axes and classes of nuScenes, turned when they are asked for."""

    def __init__(self, drive: kitti.Kitti) -> None:
        self.drive = drive

    def __len__(self) -> int:
        return len(self.drive)

    def __getitem__(self, item: Any) -> Any:
        return (
            Turned(self.drive[item]) if isinstance(item, slice) else as_nuscenes(self.drive[item])
        )


def as_nuscenes(frame: Any) -> Any:
    """A KITTI frame in the axes and classes of nuScenes: x to the right and y ahead; cars, people and bicycles.

    >>> ahead = torch.tensor([[10.0, 0.0, 0.0, 1.8, 4.2, 1.5, 0.0, float("nan"), float("nan")]])
    >>> _, targets = as_nuscenes(([torch.zeros(1, 5)], [{"boxes": ahead, "labels": torch.tensor([2])}]))
    >>> targets[0]["boxes"][0, :2].tolist(), simulated.CLASSES[targets[0]["labels"][0]]
    ([-0.0, 10.0], 'bicycle')
    """
    points, targets = frame
    classes = torch.tensor(
        [simulated.CLASSES.index(KITTI_AS_NUSCENES[name]) for name in kitti.CLASSES]
    )
    boxes = [target["boxes"] for target in targets]
    moved = [
        torch.cat([-b[:, 1:2], b[:, :1], b[:, 2:6], wrap_angle(b[:, 6:7] + pi / 2), b[:, 7:]], 1)
        for b in boxes
    ]
    return [turned(cloud) for cloud in points], [
        {**target, "boxes": b, "labels": classes[target["labels"]]}
        for target, b in zip(targets, moved)
    ]


def turned(cloud: Tensor) -> Tensor:
    """Points (N, 3 or more) in KITTI's axes, x ahead, in those of nuScenes, y ahead.

    >>> turned(torch.tensor([[10.0, 0.0, 1.0]]))
    tensor([[-0., 10.,  1.]])
    """
    return torch.cat([-cloud[:, 1:2], cloud[:, :1], cloud[:, 2:]], 1)


def kept(
    frames: Sequence[Any], device: str, together: int = 8, progress: Making | None = None
) -> list[Any]:
    """All frames, made once and held on ``device``: for training over many epochs.

    >>> len(kept(simulated.frames(count=3, sweeps=1), "cpu"))
    3
    """
    items: list[Any] = []
    for start in range(0, len(frames), together):
        numbers = range(start, min(start + together, len(frames)))
        if isinstance(frames, simulated.Simulated):  # a GPU makes several at a time
            points, targets = frames.batch(list(numbers))
            made = [([cloud], [target]) for cloud, target in zip(points, targets)]
        else:
            made = [frames[i] for i in numbers]
        items += tree_map_only(Tensor, lambda t: t.to(torch.device(device)), made)
        if progress is not None:
            progress(len(items), len(frames))
    return items
