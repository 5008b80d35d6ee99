"""Frames from scenes: cast, measured, and labelled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from boxcov.data.nuscenes.classes import CLASSES
from boxcov.data.simulated import ground, views
from boxcov.data.simulated.draw import Draw, generator
from boxcov.data.simulated.raycast import Fan, cast, rows, seen
from boxcov.data.simulated.scenarios import Scenario
from boxcov.data.simulated.scene import Scene, build, stack
from boxcov.data.simulated.sensor import chance, measure

RANGE = 51.2  # metres: what lies beyond in x or y is seen but not labelled
TOLERANCE = 0.05  # metres: a point this far outside a box still counts, or range noise would lose half of the points on every face
_CLOSE = 1.0

Frame = tuple[list[Tensor], list[dict[str, Tensor]]]


def make(
    scenario: Scenario, seed: int, indices: Sequence[int], sweeps: int, device: str | torch.device
) -> Frame:
    """Frames of these indices, made together: as many point clouds and as many targets.

    >>> points, targets = make(Scenario(), 0, [0, 5], 1, "cpu")
    >>> len(points), points[0].shape[1], sorted(targets[1])
    (2, 5, ['boxes', 'labels', 'points'])
    """
    scenes = [build(Draw(generator(seed, 2 * index, "cpu")), scenario) for index in indices]
    # the street is drawn on the CPU, so that it is the same on every device; the rays' luck where they are cast
    draws = [Draw(generator(seed, 2 * index + 1, device)) for index in indices]
    return observe(stack(scenes, device), draws, scenario, sweeps)


def observe(scene: Scene, draws: Sequence[Draw], scenario: Scenario, sweeps: int) -> Frame:
    """What the sensor makes of a batch of scenes; one draw for each of them.

    >>> scene = stack([build(Draw(generator(0, 0, "cpu")), Scenario())], "cpu")
    >>> points, targets = observe(scene, [Draw(generator(0, 1, "cpu"))], Scenario(), sweeps=1)
    >>> points[0].shape[1], targets[0]["boxes"].shape[1]
    (5, 9)
    """
    luck = chance(draws, sweeps, views.COLUMNS, len(range(0, views.BEAMS, scenario.beam_step)))
    fan, heading = views.fan(scene, sweeps, luck.phase, scenario.beam_step)
    hits = cast(fan, views.prisms(scene, sweeps), luck.penetration, scenario.reach)
    floor = ground.meet(fan, scene.waves.repeat_interleave(sweeps, 0))
    returned, points, intensity = measure(fan, scene, hits, floor, luck, scenario)
    age = (
        torch.arange(sweeps, device=points.device)
        .repeat(len(scene.kind))[:, None, None]
        .expand_as(intensity)
    )  # (V, C, b) in sweeps
    returned = returned & ((age == 0) | ~_close(fan, heading, points))
    boxes = views.boxes(scene)  # (B, n, 9)
    count = _inside(fan, boxes, scene.kind, points, returned, sweeps)  # (B, n)
    cloud = torch.cat([points, intensity[..., None], age[..., None] * views.PERIOD], -1)[
        returned
    ]  # (N, 5)
    lengths = returned.reshape(len(scene.kind), -1).sum(1)  # (B,)
    return list(cloud.split(lengths.tolist())), _targets(boxes, scene.kind, count)


def _close(fan: Fan, heading: Tensor, points: Tensor) -> Tensor:
    """Points on the ego car: less than 1 m from the sensor both ways, in the axes of their own sweep."""
    dx, dy = (
        points[..., 0] - fan.origins[:, 0, None, None],
        points[..., 1] - fan.origins[:, 1, None, None],
    )
    cos, sin = heading.cos()[:, None, None], heading.sin()[:, None, None]
    return ((dx * cos + dy * sin).abs() < _CLOSE) & ((dy * cos - dx * sin).abs() < _CLOSE)


def _inside(
    fan: Fan, boxes: Tensor, kind: Tensor, points: Tensor, returned: Tensor, sweeps: int
) -> Tensor:
    """How many points of the key frame lie in each box, (B, n); tested in those columns only in which the box can be seen."""
    key = Fan(fan.origins[::sweeps], fan.starts[::sweeps], fan.tangents, fan.columns)
    x, y, z, width, length, height, yaw = boxes[..., :7].unbind(-1)
    half = [side / 2 + TOLERANCE for side in (length, width, height)]
    first, count = seen(key, x, y, yaw, half[0], half[1], reach=1e3)
    owner, column = rows(first, count * ((kind >= 0) & (kind < len(CLASSES))), fan.columns)  # (P,)
    frame = owner // boxes.shape[1]
    near, there = (
        points[::sweeps][frame, column],
        returned[::sweeps][frame, column],
    )  # (P, b, 3), (P, b)
    fields = torch.stack([x, y, z, yaw.cos(), yaw.sin(), *half]).flatten(1)[
        :, owner, None
    ]  # (8, P, 1)
    x, y, z, cos, sin, half_length, half_width, half_height = fields
    dx, dy, dz = near[..., 0] - x, near[..., 1] - y, near[..., 2] - z
    inside = (
        ((dx * cos + dy * sin).abs() <= half_length)
        & ((dy * cos - dx * sin).abs() <= half_width)
        & (dz.abs() <= half_height)
    )
    total = torch.zeros(boxes.shape[0] * boxes.shape[1], dtype=torch.long, device=boxes.device)
    return total.index_add_(0, owner, (inside & there).sum(1)).reshape(boxes.shape[:2])


def _targets(boxes: Tensor, kind: Tensor, count: Tensor) -> list[dict[str, Tensor]]:
    labelled = (
        (kind >= 0) & (kind < len(CLASSES)) & (count > 0) & (boxes[..., :2].abs().amax(-1) <= RANGE)
    )
    keep = labelled.cpu()  # one transfer for the batch, not one for each frame
    where = [mask.nonzero()[:, 0].to(boxes.device) for mask in keep]
    return [
        {"boxes": b[i], "labels": k[i], "points": c[i]}
        for b, k, c, i in zip(boxes, kind, count, where)
    ]
