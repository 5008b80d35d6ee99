"""The frames of one split as flat arrays, extracted from the tables."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from os.path import isdir  # False, not an error, for a path that is too long or has a NUL
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
import torch

from boxcov.data.nuscenes.classes import CATEGORIES, CLASSES
from boxcov.data.nuscenes.tables import Row, Table
from boxcov.data.points import check_objects
from boxcov.data.poses import rotation_matrix
from boxcov.data.sequence import leads_out
from boxcov.errors import BoxcovError, BoxcovWarning, join_names

Array = np.ndarray[Any, Any]
_LONGEST_NAME = 512  # characters: one array holds all names at the length of the longest
_LONGEST_GAP = 1.5  # seconds between annotations that give a velocity, as in nuScenes


@dataclass(frozen=True)
class Readings:
    """The s sweeps of LIDAR_TOP, key frames included."""

    file: Array  # (s,) bytes: path relative to the root
    time: Array  # (s,) microseconds
    R: Array  # (s, 3, 3) from the sensor to the global frame
    t: Array  # (s, 3)
    previous: Array  # (s,) the sweep before, or -1


@dataclass(frozen=True)
class Annotations:
    """The a boxes of the ten classes in the global frame, sorted by sample."""

    start: Array  # (samples + 1,)
    centre: Array  # (a, 3)
    size: Array  # (a, 3) w l h
    heading: Array  # (a, 3) unit vector
    velocity: Array  # (a, 2) NaN where unknown
    label: Array  # (a,)
    identity: Array  # (a,) row of instance.json
    points: Array  # (a,) num_lidar_pts


@dataclass(frozen=True)
class Index:
    """What is known about the samples of a split."""

    tokens: list[str]  # of the samples, by scene and time
    scene: Array  # (samples,) number of the scene, rising
    key: Array  # (samples,) the sweep that is the key frame
    readings: Readings
    annotations: Annotations


def read_index(root: Path, version: str, split: str) -> Index:
    """Read the samples of one split that the tables of this version hold."""
    folder = _folder(root, version)
    tokens, scenes, times, place = _samples(folder, split)
    readings, key = _readings(folder, place, len(tokens))
    if (key < 0).any():
        raise BoxcovError(
            f"{folder / 'sample_data.json'}: the sample {tokens[int(key.argmin())]!r} has no key "
            "frame of LIDAR_TOP"
        )
    return Index(tokens, scenes, key, readings, _annotations(folder, place, times))


def scene_names(split: str) -> list[str]:
    """Return the names of the scenes of an official split.

    >>> [len(scene_names(split)) for split in ("train", "val", "test", "mini_train", "mini_val")]
    [700, 150, 150, 8, 2]
    """
    splits = json.loads((Path(__file__).parent / "splits.json").read_text())
    del splits["source"]
    if split not in splits:
        raise BoxcovError(f"no split {split!r}: nuScenes has {', '.join(splits)}")
    return [f"scene-{number:04d}" for number in splits[split]]


def _folder(root: Path, version: str) -> Path:
    if not isdir(root):
        raise BoxcovError(
            f"{root}: no such folder: give the one that holds samples, sweeps and {version}"
        )
    if not isdir(root / version):
        there = sorted(path.parent.name for path in root.glob("*/sample_data.json"))
        raise BoxcovError(
            f"{root}: no version {version!r}: it holds "
            f"{', '.join(there) or 'no tables (v1.0-trainval, v1.0-mini ...)'}"
            + (": its splits are mini_train and mini_val" if there == ["v1.0-mini"] else "")
        )
    return root / version


def _samples(folder: Path, split: str) -> tuple[list[str], Array, Array, dict[str, int]]:
    """Return tokens, scenes and times (samples,) of the split, and the index of each sample.

    The index is -1 for samples of other splits.
    """
    wanted = set(scene_names(split))
    table = Table(folder, "scene")
    scenes: dict[str, int] = {}
    names: list[str] = []
    for row in table:
        names.append(table.text(row, "name"))
        scenes[table.text(row, "token")] = len(scenes) if names[-1] in wanted else -1
    if all(order < 0 for order in scenes.values()):
        raise BoxcovError(
            f"{table.path}: none of its {len(scenes)} scenes is of the split {split!r}: choose "
            "another version or split"
        )
    table, place = Table(folder, "sample"), {}
    chosen: list[tuple[int, int, str]] = []
    for row in table:
        token = table.text(row, "token")
        scene = table.refer(row, "scene_token", scenes, "scene.json")
        place[token] = -1
        if scene >= 0:
            chosen.append((scene, table.integer(row, "timestamp"), token))
    chosen.sort()
    # without a row in scene.json, or without samples
    if missing := sorted(wanted - {names[scene] for scene, _, _ in chosen}):
        warn(
            f"{folder}: the tables have {len(wanted) - len(missing)} of the {len(wanted)} scenes "
            f"of the split {split!r}, without {join_names(missing, 3)}: frames of the others are "
            f"left out. To have them, unpack the complete metadata archive of {folder.name}",
            BoxcovWarning,
            stacklevel=4,  # the caller of frames()
        )
    place.update((token, number) for number, (_, _, token) in enumerate(chosen))
    numbers, times = (np.array([row[i] for row in chosen], dtype=np.int64) for i in (0, 1))
    return [token for _, _, token in chosen], numbers, times, place


def _readings(folder: Path, place: dict[str, int], samples: int) -> tuple[Readings, Array]:
    """Return the sweeps of the split, and the key sweep (samples,) of each sample, or -1."""
    mounts, mount_R, mount_t = _mounts(folder)
    table = Table(folder, "sample_data")
    sweeps: dict[str, int] = {}
    slots: dict[str, int] = {}  # the ego poses in use
    files, previous = list[bytes](), list[str]()
    time, mount, slot = array("q"), array("q"), array("q")
    key = np.full(samples, -1, dtype=np.int64)
    for row in table:
        of_lidar = table.refer(row, "calibrated_sensor_token", mounts, "calibrated_sensor.json")
        sample = table.refer(row, "sample_token", place, "sample.json") if of_lidar >= 0 else -1
        if sample < 0:
            continue
        if table.flag(row, "is_key_frame"):
            key[sample] = len(files)
        sweeps[table.text(row, "token")] = len(files)
        files.append(_file_name(table, row))
        previous.append(table.text(row, "prev"))
        time.append(table.integer(row, "timestamp"))
        mount.append(of_lidar)
        slot.append(slots.setdefault(table.text(row, "ego_pose_token"), len(slots)))
    ego_R, ego_t = _ego_poses(folder, slots)
    order = _chain(table, sweeps, previous)
    when = np.array(time)
    if (when[order[order >= 0]] >= when[order >= 0]).any():
        raise BoxcovError(
            f"{table.path}: a prev token leads to a later sweep of LIDAR_TOP: unpack the metadata "
            "archive again"
        )
    R, t = ego_R[slot], ego_t[slot]
    t = (R @ mount_t[mount][..., None])[..., 0] + t
    return Readings(np.array(files), when, R @ mount_R[mount], t, order), key


def _mounts(folder: Path) -> tuple[dict[str, int], Array, Array]:
    """Return the k mounts of LIDAR_TOP: index by token, rotations (k, 3, 3), translations (k, 3).

    The index is -1 for other sensors.
    """
    table = Table(folder, "sensor")
    channels = {table.text(row, "token"): table.text(row, "channel") for row in table}
    table, numbers = Table(folder, "calibrated_sensor"), {}
    rotations, translations = list[list[float]](), list[list[float]]()
    for row in table:
        is_lidar = table.refer(row, "sensor_token", channels, "sensor.json") == "LIDAR_TOP"
        numbers[table.text(row, "token")] = len(rotations) if is_lidar else -1
        if is_lidar:
            rotations.append(table.quaternion(row, "rotation"))
            translations.append(table.vector(row, "translation"))
    if not rotations:
        raise BoxcovError(
            f"{table.path}: no sensor is named LIDAR_TOP: these are not the tables of nuScenes"
        )
    return numbers, _rotations(rotations), np.array(translations)


def _ego_poses(folder: Path, slots: dict[str, int]) -> tuple[Array, Array]:
    table, missing = Table(folder, "ego_pose"), set(slots)
    R, t = np.zeros((len(slots), 4)), np.zeros((len(slots), 3))
    for row in table:
        token = table.text(row, "token")
        if token in slots:
            R[slots[token]] = table.quaternion(row, "rotation")
            t[slots[token]] = table.vector(row, "translation")
            missing.discard(token)
    if missing:
        raise BoxcovError(
            f"{table.path}: no pose {min(missing)!r}, which sample_data.json refers to: the tables "
            "are of different versions"
        )
    return _rotations(R), t


def _annotations(folder: Path, place: dict[str, int], times: Array) -> Annotations:
    labels = _labels(folder)
    numbers = {token: number for number, token in enumerate(labels)}
    table, rows = Table(folder, "sample_annotation"), {}
    previous, following = list[str](), list[str]()
    sample, label, points, identity = array("q"), array("q"), array("q"), array("q")
    centre, size, rotation = array("d"), array("d"), array("d")
    for row in table:
        number = table.refer(row, "sample_token", place, "sample.json")
        kind = table.refer(row, "instance_token", labels, "instance.json") if number >= 0 else -1
        if kind < 0:
            continue
        rows[table.text(row, "token")] = len(sample)
        previous.append(table.text(row, "prev"))
        following.append(table.text(row, "next"))
        sample.append(number)
        label.append(kind)
        identity.append(numbers[table.text(row, "instance_token")])
        points.append(table.integer(row, "num_lidar_pts"))
        centre.extend(table.vector(row, "translation"))
        size.extend(table.size(row, "size"))
        rotation.extend(table.quaternion(row, "rotation"))
    centres, owner = np.array(centre).reshape(-1, 3), np.array(sample, dtype=np.int64)
    before, after = (_chain(table, rows, tokens) for tokens in (previous, following))
    velocity = _velocities(centres[:, :2], times[owner], before, after)
    order = np.argsort(owner, kind="stable")
    start = np.searchsorted(owner[order], np.arange(len(times) + 1))
    check_objects(int(np.diff(start).max(initial=0)), table.path)
    return Annotations(
        start=start,
        centre=centres[order],
        size=np.array(size).reshape(-1, 3)[order],
        heading=_rotations(np.array(rotation).reshape(-1, 4)[order])[:, :, 0],
        velocity=velocity[order],
        label=np.array(label, dtype=np.int64)[order],
        identity=np.array(identity, dtype=np.int64)[order],
        points=np.array(points, dtype=np.int64)[order],
    )


def _labels(folder: Path) -> dict[str, int]:
    """Return the class of each instance, -1 if it has none."""
    table = Table(folder, "category")
    names = {table.text(row, "token"): CATEGORIES.get(table.text(row, "name")) for row in table}
    table, labels = Table(folder, "instance"), {}
    for row in table:
        name = table.refer(row, "category_token", names, "category.json")
        labels[table.text(row, "token")] = -1 if name is None else CLASSES.index(name)
    return labels


def _velocities(centre: Array, time: Array, before: Array, after: Array) -> Array:
    """Return velocities (a, 2) from the annotations before and after each one.

    At the ends of a track the box itself replaces the missing neighbour. NaN means that there is
    no neighbour, or that it is too far away in time.
    """
    itself = np.arange(len(centre))
    first, last = np.where(before < 0, itself, before), np.where(after < 0, itself, after)
    seconds = 1e-6 * (time[last] - time[first])
    longest = np.where((before >= 0) & (after >= 0), 2 * _LONGEST_GAP, _LONGEST_GAP)
    usable = (seconds > 0) & (seconds <= longest)
    seconds[~usable] = np.nan
    return (centre[last] - centre[first]) / seconds[:, None]


def _chain(table: Table, rows: dict[str, int], tokens: list[str]) -> Array:
    """Return the rows that prev or next tokens lead to, -1 for none."""
    for token in tokens:
        if token and token not in rows:
            raise BoxcovError(
                f"{table.path}: a prev or next token leads to {token!r}, which is not a row of the "
                "same kind and split"
            )
    return np.array([rows[token] if token else -1 for token in tokens], dtype=np.int64)


def _file_name(table: Table, row: Row) -> bytes:
    """Return the file name of a row; raise if it leads out of the root, to files of others."""
    name = table.text(row, "filename")
    if len(name) > _LONGEST_NAME:
        raise table.unexpected(row, "filename", f"at most {_LONGEST_NAME} characters")
    if leads_out(name):
        raise BoxcovError(f"{table.path}: the file name {name!r} leads out of the root: refused")
    return name.encode()


def _rotations(quaternions: Any) -> Array:
    return rotation_matrix(torch.as_tensor(quaternions, dtype=torch.float64)).numpy()
