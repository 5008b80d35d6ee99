"""Targets and loss against loops over objects and cells, written from the definitions."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, cos, exp, log, sin, sqrt

import pytest
import torch

import boxcov
from boxcov.detectors.centerpoint import Config
from boxcov.detectors.centerpoint.config import Loss
from boxcov.detectors.centerpoint.loss import encode, frame_losses, gaussian_radius
from helpers.centerpoint_cases import detector_of, frames, pillar_config, target, task_targets

CONFIG = pillar_config()
FRAMEWORKS = ("mmdet3d", "det3d", "openpcdet")


def slow_radius(l, w, o=0.1):
    r1 = (l + w + sqrt((l + w) ** 2 - 4 * w * l * (1 - o) / (1 + o))) / 2
    r2 = (2 * (l + w) + sqrt(4 * (l + w) ** 2 - 16 * (1 - o) * w * l)) / 2
    r3 = (-2 * o * (l + w) + sqrt(4 * o * o * (l + w) ** 2 + 16 * o * (1 - o) * w * l)) / 2
    return min(r1, r2, r3)


def kept(box, config):
    """Return whether a framework's data pipeline keeps an object, before the targets."""
    x, y, z, w, l, _, yaw = box[:7]
    low, high = config.point_range[:3], config.point_range[3:]
    if config.loss.inside == "corner":  # det3d: a corner in the range
        ends = [(a * l / 2, b * w / 2) for a in (1, -1) for b in (1, -1)]
        turn = (cos(yaw), sin(yaw))
        corners = [(x + a * turn[0] - b * turn[1], y + a * turn[1] + b * turn[0]) for a, b in ends]
        return any(all(low[i] < c[i] < high[i] for i in (0, 1)) for c in corners)
    axes = (0, 1, 2) if config.loss.inside == "centre_3d" else (0, 1)
    return all(low[i] <= (x, y, z)[i] <= high[i] for i in axes)


def slow_targets(targets, config, task, dtype=torch.float64):
    """Heat map and a list of (frame, class, row, column, values) of one task."""
    rows, columns = config.map_size
    names = config.tasks[task]
    heat = torch.zeros(len(targets), len(names), rows, columns, dtype=dtype)
    objects = []
    for b, frame in enumerate(targets):
        for box, label in zip(frame["boxes"].tolist(), frame["labels"].tolist()):
            if config.classes[label] not in names:
                continue
            c = names.index(config.classes[label])
            x, y, z, w, l, h, yaw, vx, vy = box
            px, py = (
                (x - config.point_range[0]) / config.cell[0],
                (y - config.point_range[1]) / config.cell[1],
            )
            row, column = int(py), int(px)  # towards zero, as in the frameworks
            if not (0 <= column < columns and 0 <= row < rows and kept(box, config)):
                continue
            radius = max(2, int(slow_radius(l / config.cell[0], w / config.cell[1])))
            sigma = (2 * radius + 1) / 6
            for i in range(rows):
                for j in range(columns):
                    if max(abs(i - row), abs(j - column)) <= radius:
                        g = exp(-((i - row) ** 2 + (j - column) ** 2) / (2 * sigma**2))
                        heat[b, c, i, j] = max(float(heat[b, c, i, j]), g)
            if config.loss.unknown_velocity == "zero":
                vx, vy = (0.0 if v != v else v for v in (vx, vy))
            values = [px - column, py - row, z, log(l), log(w), log(h), sin(yaw), cos(yaw), vx, vy]
            objects.append((b, c, row, column, values))
    return heat, objects


def slow_loss(tasks, targets, config, rules):
    losses = [0.0] * len(targets)
    for t, maps in enumerate(tasks):
        heat, objects = slow_targets(targets, config, t)
        p = maps["heatmap"].sigmoid().clamp(1e-4, 1 - 1e-4)
        for b in range(len(targets)):
            mine = [o for o in objects if o[0] == b]
            focal, positives = 0.0, 0
            for c, i, j in [
                (c, i, j)
                for c in range(p.shape[1])
                for i in range(p.shape[2])
                for j in range(p.shape[3])
            ]:
                q, g = float(p[b, c, i, j]), float(heat[b, c, i, j])
                times = (
                    sum(o[1:4] == (c, i, j) for o in mine)
                    if rules.positives == "objects"
                    else int(g == 1)
                )
                positives += times
                focal += -log(q) * (1 - q) ** 2 * times
                focal += -log(1 - q) * q**2 * (1 - g) ** 4
            l1 = 0.0
            for _, _, i, j, values in mine:
                found = torch.cat(
                    [maps[name][b, :, i, j] for name in ("reg", "height", "dim", "rot", "vel")]
                ).tolist()
                l1 += sum(w * abs(f - v) for f, v, w in zip(found, values, rules.weights) if v == v)
            n = len(mine) + 1e-4 if rules.normaliser == "plus" else max(len(mine), 1)
            losses[b] += focal / max(1, positives) + 0.25 * l1 / n
    return torch.tensor(losses, dtype=torch.float64)


def test_the_gaussian_radius():
    generator = torch.Generator().manual_seed(0)
    l, w = 20 * torch.rand(2, 200, generator=generator, dtype=torch.float64)
    expected = torch.tensor(
        [slow_radius(float(a), float(b)) for a, b in zip(l, w)], dtype=torch.float64
    )
    torch.testing.assert_close(gaussian_radius(l, w), expected)


def some_targets(count=2):
    targets = [target(CONFIG, seed=i, each=3) for i in range(count)]
    for t in targets:
        t["boxes"] = t["boxes"].double()
        t["boxes"][3, 0] = 99.0  # off the map
        t["boxes"][7, :2] = t["boxes"][17, :2]  # two objects of a class in a cell
        t["boxes"][5, 3:5] = 15.0  # a Gaussian that reaches over the border
        t["boxes"][2, 2] = 4.0  # above the range
        t["boxes"][4, :2] = torch.tensor([-6.9, 1.0])  # half a cell outside, with corners inside
        t["boxes"][8, 1] = -6.41
        t["boxes"][8, 3:5] = 0.01  # just outside, with all corners
    return targets


@pytest.mark.parametrize("rules", [Loss(), *map(Loss.of, FRAMEWORKS)], ids=["", *FRAMEWORKS])
def test_targets_are_those_of_the_loop(rules):
    targets, config = some_targets(), replace(CONFIG, loss=rules)
    encoded = encode(targets, config, torch.zeros(2, dtype=torch.float64))
    for t, found in enumerate(task_targets(encoded)):
        heat, objects = slow_targets(targets, config, t)
        torch.testing.assert_close(found.heat, heat)
        assert [tuple(o[:4]) for o in objects] == list(
            zip(
                found.frame.tolist(),
                found.label.tolist(),
                found.row.tolist(),
                found.column.tolist(),
            )
        )
        torch.testing.assert_close(
            found.values, torch.tensor([o[4] for o in objects], dtype=torch.float64), equal_nan=True
        )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_loss_is_that_of_the_loop(framework):
    config = replace(CONFIG, loss=Loss.of(framework))
    detector = detector_of(config, dtype=torch.float64)
    clouds = [inputs[0].double() for inputs, _ in frames(config)]
    with torch.no_grad():
        raw = detector(clouds)
        targets = some_targets()
        targets[1] = {
            "boxes": torch.zeros(0, 9),
            "labels": torch.zeros(0, dtype=torch.long),
        }  # a frame without objects
        torch.testing.assert_close(
            detector.loss(raw, targets), slow_loss(raw["tasks"], targets, config, config.loss)
        )
        assert torch.equal(
            frame_losses(raw["tasks"], detector.encode(targets, raw["features"]), config),
            detector.loss(raw, targets),
        )


def test_the_frameworks_differ():
    detector = detector_of(CONFIG, dtype=torch.float64)
    raw = detector([inputs[0].double() for inputs, _ in frames(CONFIG)])
    values = []
    for framework in ("mmdet3d", "det3d", "openpcdet"):
        encoded = encode(some_targets(), CONFIG, raw["features"])
        values.append(frame_losses(raw["tasks"], encoded, replace(CONFIG, loss=Loss.of(framework))))
    assert not torch.allclose(values[0], values[1])
    assert not torch.allclose(values[0], values[2])


def test_no_more_objects_than_the_limit():
    config = replace(CONFIG, loss=Loss(max_objects=2))
    encoded = encode([target(CONFIG, each=5)] * 2, config, torch.zeros(2))
    assert all(torch.bincount(task.frame).max() <= 2 for task in task_targets(encoded))


def test_a_perfect_prediction_has_a_small_loss():
    targets = [target(CONFIG, each=1)]
    encoded = encode(targets, CONFIG, torch.zeros(1))
    tasks = []
    for task in task_targets(encoded):
        maps = {"heatmap": torch.where(task.heat == 1, 12.0, -12.0)}
        start = 0
        for name, n in CONFIG.branches.items():
            maps[name] = torch.zeros(1, n, *CONFIG.map_size)
            maps[name][task.frame, :, task.row, task.column] = task.values[
                :, start : start + n
            ].nan_to_num()
            start += n
        tasks.append(maps)
    assert float(frame_losses(tasks, encoded, CONFIG)) < 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {**t, "labels": t["labels"] + 9}, "labels from 9 to 18, but 10 classes"),
        (lambda t: {**t, "labels": t["labels"] + 0.5}, "labels must be whole numbers, got 0.5"),
        (lambda t: {**t, "boxes": t["boxes"][:, :7]}, r"boxes must have the shape \(n, 9\)"),
        (lambda t: {**t, "labels": t["labels"][1:]}, r"labels \(n,\), got \(20, 9\) and \(19,\)"),
        (lambda t: [t["boxes"], t["labels"]], "must be a dict with boxes and labels, got a list"),
        (
            lambda t: {**t, "boxes": t["boxes"] * torch.inf},
            "boxes must be finite; only velocities may be NaN",
        ),
    ],
)
def test_impossible_targets(change, message):
    with pytest.raises(boxcov.BoxcovError, match=f"targets of frame 0: .*{message}"):
        encode([change(target(CONFIG))], CONFIG, torch.zeros(1))


def test_each_framework_has_its_own_objects():
    """An object just below the range, one above it in z, and one of unknown velocity."""
    boxes = torch.tensor([[0.0, 0.0, 0.0, 2.0, 4.0, 1.5, 0.0, 1.0, 1.0]]).repeat(3, 1)
    boxes[0, 0] = -51.5
    boxes[1, 2] = 3.5
    boxes[2, 7:] = torch.nan
    targets = [{"boxes": boxes, "labels": torch.zeros(3, dtype=torch.long)}]
    found = {}
    for framework in FRAMEWORKS:
        config = Config.voxel(0.1, framework)
        cars = task_targets(encode(targets, config, torch.zeros(1)))[0]
        found[framework] = [tuple(row) for row in cars.values[:, [0, 2, 8]].tolist()]
        assert cars.values.isfinite().all()
    assert found["det3d"][0][0] == pytest.approx(-0.375, abs=1e-5)  # a cell of 0.8 m, truncated
    assert [row[1] for row in found["mmdet3d"]] == [3.5, 0.0]
    assert [row[1] for row in found["openpcdet"]] == [0.0]
    assert found["openpcdet"][0][2] == 0.0


def test_boxes_on_the_border_of_the_map():
    config = Config.pillar()
    boxes = torch.zeros(4, 9) + 1.0
    boxes[:, 0] = torch.tensor([-51.2, 51.1999, 51.2, -51.3])
    encoded = encode(
        [{"boxes": boxes, "labels": torch.zeros(4, dtype=torch.long)}], config, torch.zeros(1)
    )
    assert task_targets(encoded)[0].column.tolist() == [0, 127]
    assert ceil(float(task_targets(encoded)[0].heat.max())) == 1
