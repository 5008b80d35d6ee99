"""What the sensor measures of a scene: points with intensities, and the labels of the objects.

Each of the S sweeps of B scenes is one view; V = B x S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from boxcov.data.nuscenes.classes import CLASSES
from boxcov.data.poses import into_axes, wrap_angle
from boxcov.data.simulated.layout import LANE
from boxcov.data.simulated.raycast import Fan, Hits, Prisms, cast, interval_rows, visible_columns
from boxcov.data.simulated.rng import Rng, make_rng
from boxcov.data.simulated.scenarios import Scenario
from boxcov.data.simulated.scene import Scene, build, stack

PERIOD = 0.05  # seconds between sweeps: 20 Hz
COLUMNS = 1080
BEAMS = 32
SENSOR_HEIGHT = 1.84  # metres above the ground, as on the nuScenes car
_LOWEST, _HIGHEST = -30.67, 10.67  # degrees, as of the HDL-32E
_FAR = 1e6  # metres: the place of padding
_NEWTON_STEPS = 3
RANGE = 51.2  # metres: objects beyond it in x or y have no label
TOLERANCE = 0.05  # metres: points this far outside a box count; range noise moves half of them out
_EGO = 1.0  # metres around the sensor: points of earlier sweeps there are on the ego car
# metres. A return has probability 1/2 at the range _GAIN * sqrt(reflectivity * cosine): the ground
# is lost at 40 to 50 m, dark cars at 60 m
_GAIN = 480.0
_ASPHALT, _PAVEMENT, _MARKING, _DROP = 0.09, 0.12, 0.35, 0.012  # reflectivities

Frame = tuple[list[Tensor], list[dict[str, Tensor]]]


@dataclass(frozen=True)
class RayNoise:
    """The random numbers of every ray; every field but ``phase`` is (V, C, b)."""

    phase: Tensor  # (V,) of the sensor's rotation, in columns
    penetration: Tensor  # mean free paths into a body that is not solid
    loss: Tensor  # uniform; compared with the probability of a return
    scatter: Tensor  # uniform; compared with the probability of a drop on the way
    drop: Tensor  # distance of the drop, in units of the mean
    range: Tensor  # standard normal
    intensity: Tensor  # standard normal


def make_frames(
    scenario: Scenario, seed: int, indices: Sequence[int], sweeps: int, device: str | torch.device
) -> Frame:
    """Return the point clouds and targets of these frames, computed as one batch."""
    # scenes are drawn on the CPU, so that every device shows the same; rays on the device
    scenes = [build(make_rng(seed, 2 * index, "cpu"), scenario) for index in indices]
    rngs = [make_rng(seed, 2 * index + 1, device) for index in indices]
    clouds, targets = observe(stack(scenes, device), rngs, scenario, sweeps)
    for target in targets:
        del target["rows"]
    return clouds, targets


def observe(scene: Scene, rngs: Sequence[Rng], scenario: Scenario, sweeps: int) -> Frame:
    """Return point clouds and targets of a batch of scenes, with one ``Rng`` per scene.

    The entry ``rows`` of a target is the number of each labelled object in its scene.
    """
    beams = len(range(0, BEAMS, scenario.beam_step))
    noise = _draw_noise(rngs, sweeps, beams)
    fan, heading = sensor_rays(scene, sweeps, noise.phase, scenario.beam_step)
    hits = cast(fan, body_prisms(scene, sweeps), noise.penetration, scenario.reach)
    ground = ground_distance(fan, scene.waves.repeat_interleave(sweeps, 0))
    returned, points, intensity = _measure(fan, scene, (hits, ground), noise, scenario)
    age = torch.arange(sweeps, device=points.device).repeat(len(scene.kind))  # (V,) in sweeps
    age = age[:, None, None].expand_as(intensity)
    returned = returned & ((age == 0) | ~_on_ego_car(fan, heading, points))
    boxes = key_boxes(scene)  # (B, n, 9)
    count = _count_points(fan, boxes, scene.kind, (points[::sweeps], returned[::sweeps]), sweeps)
    cloud = torch.cat([points, intensity[..., None], age[..., None] * PERIOD], -1)
    lengths = returned.reshape(len(scene.kind), -1).sum(1)  # (B,)
    clouds = list(cloud[returned].split(lengths.tolist()))
    return clouds, [
        {"boxes": b[i], "labels": k[i], "points": c[i], "rows": i}
        for b, k, c, i in zip(boxes, scene.kind, count, _labelled(boxes, scene.kind, count))
    ]


def _draw_noise(rngs: Sequence[Rng], sweeps: int, beams: int) -> RayNoise:
    shape = (sweeps, COLUMNS, beams)
    phase = torch.cat([rng.uniform(0, 1, sweeps) for rng in rngs])
    uniform = torch.cat([rng.uniform(0, 1, 4, *shape) for rng in rngs], 1)
    normal = torch.cat([rng.normal(0, 1, 2, *shape) for rng in rngs], 1)
    penetration, drop = -torch.log1p(-uniform[:2])
    return RayNoise(phase, penetration, uniform[2], uniform[3], drop, normal[0], normal[1])


def _measure(
    fan: Fan, scene: Scene, met: tuple[Hits, Tensor], noise: RayNoise, scenario: Scenario
) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether each ray returns (V, C, b), its point (V, C, b, 3) and intensity (V, C, b).

    ``met`` holds the hits on bodies, and the horizontal distance to the ground.
    """
    hits, ground = met
    is_ground = ground <= hits.distance
    flat = 1 / (1 + fan.tangents.square()).sqrt()  # cosine of the elevation
    # horizontal; the bound puts rays into the sky out of reach
    distance = torch.minimum(ground, hits.distance).clamp(max=1e4)
    reflectivity = torch.where(
        is_ground,
        _ground_reflectivity(fan, scene, distance, scenario.wet),
        _body_reflectivity(scene, hits.prism, scenario.wet),
    )
    cosine = torch.where(is_ground, (fan.tangents * flat).abs().expand_as(distance), hits.cosine)
    length = distance / flat  # of the ray
    fading = (-2 * scenario.extinction * length).exp()
    signal = (reflectivity * cosine * fading * (_GAIN / length).square()).clamp(min=1e-9)
    # probability of a return: signal^2 / (1 + signal^2), a logistic of the signal's logarithm
    probability = signal.square() / (1 + signal.square()) * (1 - scenario.dropout)
    returned = (noise.loss < probability) & (length < scenario.reach)
    brightness = reflectivity * (0.4 + 0.6 * cosine) * fading
    drop = 1 + noise.drop * scenario.scatter_distance
    scattered = (noise.scatter < scenario.scatter) & (drop < length) & (drop < scenario.reach)
    length = torch.where(scattered, drop, length)
    brightness = torch.where(scattered, _DROP, brightness)
    distance = (length + scenario.noise * noise.range).clamp(min=0.05) * flat
    intensity = (255 * brightness * (0.2 * noise.intensity).exp()).round().clamp(0, 255)
    angle = fan.angles()[..., None]
    x, y, z = (fan.origins[:, i, None, None] for i in range(3))
    points = torch.stack(
        [x + distance * angle.cos(), y + distance * angle.sin(), z + distance * fan.tangents], -1
    )
    return returned | scattered, points, intensity


def _body_reflectivity(scene: Scene, prism: Tensor, wet: bool) -> Tensor:
    views = scene.surface[..., 1].repeat_interleave(len(prism) // len(scene.surface), 0)  # (V, p)
    # rays without a hit read the first part; they are out of reach
    reflectivity = views.gather(1, prism.clamp(min=0).flatten(1)).reshape(prism.shape)
    return reflectivity * (0.8 if wet else 1.0)


def _ground_reflectivity(fan: Fan, scene: Scene, distance: Tensor, wet: bool) -> Tensor:
    """Return the reflectivity of asphalt with lane markings, and of the pavement."""
    sweeps = len(distance) // len(scene.road)
    road = scene.road.repeat_interleave(sweeps, 0)[:, :, None, None]
    heading, ego_s, ego_t, edge, crossing = road.unbind(1)
    angle = fan.angles()[..., None] - heading
    s, t = into_axes(fan.origins[:, 0, None, None], fan.origins[:, 1, None, None], heading)
    s, t = s + ego_s + distance * angle.cos(), t + ego_t + distance * angle.sin()
    open_road = (s - crossing).abs() > 2 * LANE
    line = (t - LANE * (t / LANE).round()).abs() < 0.09
    dashed = torch.remainder(s, 9.0) < 4.0
    border = t.abs() > edge - 0.5 * LANE
    reflectivity = torch.where((t.abs() > edge + 0.1) & open_road, _PAVEMENT, _ASPHALT)
    reflectivity = torch.where(
        line & (dashed | border) & (t.abs() < edge + 0.1) & open_road, _MARKING, reflectivity
    )
    return reflectivity * (0.3 if wet else 1.0)


def _on_ego_car(fan: Fan, heading: Tensor, points: Tensor) -> Tensor:
    """Return which points lie within 1 m of the sensor along both axes of their own sweep."""
    dx, dy = (points[..., i] - fan.origins[:, i, None, None] for i in (0, 1))
    along, across = into_axes(dx, dy, heading[:, None, None])
    return (along.abs() < _EGO) & (across.abs() < _EGO)


def _count_points(
    fan: Fan, boxes: Tensor, kind: Tensor, key_frame: tuple[Tensor, Tensor], sweeps: int
) -> Tensor:
    """Return the number of key frame points in each box, (B, n).

    ``key_frame`` holds its points and which of them returned. Boxes are tested only in columns
    in which they can be seen.
    """
    key = Fan(fan.origins[::sweeps], fan.starts[::sweeps], fan.tangents, fan.columns)
    x, y, z, width, length, height, yaw = boxes[..., :7].unbind(-1)
    half = [side / 2 + TOLERANCE for side in (length, width, height)]
    first, count = visible_columns(key, (x, y, yaw, half[0], half[1]), reach=1e3)
    count = count * ((kind >= 0) & (kind < len(CLASSES)))
    owner, column = interval_rows(first, count, fan.columns)  # (P,)
    frame = owner // boxes.shape[1]
    near, returned = (values[frame, column] for values in key_frame)  # (P, b, 3), (P, b)
    fields = torch.stack([x, y, z, yaw.cos(), yaw.sin(), *half]).flatten(1)[:, owner, None]
    x, y, z, cos, sin, half_length, half_width, half_height = fields  # (P, 1) each
    dx, dy, dz = near[..., 0] - x, near[..., 1] - y, near[..., 2] - z
    inside = (
        ((dx * cos + dy * sin).abs() <= half_length)
        & ((dy * cos - dx * sin).abs() <= half_width)
        & (dz.abs() <= half_height)
    )
    total = torch.zeros(boxes.shape[0] * boxes.shape[1], dtype=torch.long, device=boxes.device)
    return total.index_add_(0, owner, (inside & returned).sum(1)).reshape(boxes.shape[:2])


def _labelled(boxes: Tensor, kind: Tensor, count: Tensor) -> list[Tensor]:
    """Return the rows of the objects with a label, for each scene."""
    in_range = boxes[..., :2].abs().amax(-1) <= RANGE
    labelled = (kind >= 0) & (kind < len(CLASSES)) & (count > 0) & in_range
    keep = labelled.cpu()  # one transfer per batch, not one per frame
    return [mask.nonzero()[:, 0].to(boxes.device) for mask in keep]


# where the sensor, the objects and the ground are at the time of each sweep


def sensor_rays(scene: Scene, sweeps: int, phases: Tensor, beam_step: int) -> tuple[Fan, Tensor]:
    """Return the rays of every view, and the ego car's heading (V,), 0 in the key frame.

    ``phases`` (V,) are the fractions of a column by which each rotation of the sensor starts late.
    """
    pose = _poses(scene, sweeps)[:, 0]  # (V, 3)
    heading = pose[:, 2] - pi / 2
    waves = scene.waves.repeat_interleave(sweeps, 0)
    z = ground_height(waves, pose[:, 0], pose[:, 1]) + SENSOR_HEIGHT
    origins = torch.stack([pose[:, 0], pose[:, 1], z], 1)
    elevations = torch.linspace(_LOWEST, _HIGHEST, BEAMS, device=pose.device)[::beam_step]
    starts = heading + phases * (2 * pi / COLUMNS)
    return Fan(origins, starts, torch.deg2rad(elevations).tan(), COLUMNS), heading


def body_prisms(scene: Scene, sweeps: int) -> Prisms:
    """Return the prisms of all bodies in every view."""
    pose = _poses(scene, sweeps)  # (V, n, 3)
    waves = scene.waves.repeat_interleave(sweeps, 0)
    ground = ground_height(waves, pose[..., 0], pose[..., 1])  # (V, n)
    owner = scene.owner.repeat_interleave(sweeps, 0)  # (V, p)
    x, y, yaw, ground = (field.gather(1, owner) for field in (*pose.unbind(-1), ground))
    x0, x1, y0, y1, z0, z1 = scene.edges.repeat_interleave(sweeps, 0).unbind(-1)
    along, across, cos, sin = (x0 + x1) / 2, (y0 + y1) / 2, yaw.cos(), yaw.sin()
    is_round, _, depth = scene.surface.repeat_interleave(sweeps, 0).unbind(-1)
    return Prisms(
        x=torch.where(z1 > 0, x + cos * along - sin * across, _FAR),  # padding has no height
        y=y + sin * along + cos * across,
        yaw=yaw,
        half_length=((x1 - x0) / 2).clamp(min=1e-3),
        half_width=((y1 - y0) / 2).clamp(min=1e-3),
        bottom=ground + z0,
        top=ground + z1,
        round=is_round,
        depth=depth,
    )


def key_boxes(scene: Scene) -> Tensor:
    """Return x y z w l h yaw vx vy of every object in the key frame, (B, n, 9)."""
    x, y, yaw = scene.pose.unbind(-1)
    speed = scene.motion[..., 0]
    z = ground_height(scene.waves, x, y) + scene.size[..., 2] / 2
    centre = torch.stack([x, y, z], -1)
    heading = torch.stack([wrap_angle(yaw), speed * yaw.cos(), speed * yaw.sin()], -1)
    return torch.cat([centre, scene.size, heading], -1)


def ground_height(waves: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return z of the ground at ``x``, ``y`` (V, ...); z is 0 at the sensor above the origin.

    ``waves`` (V, W, 4) are kx, ky (radians per metre), phase and amplitude.
    """
    z = torch.full_like(x, -SENSOR_HEIGHT)
    for kx, ky, phase, amplitude in _broadcast_waves(waves, x.dim()):
        z = z + amplitude * ((kx * x + ky * y + phase).sin() - phase.sin())
    return z


def ground_distance(fan: Fan, waves: Tensor) -> Tensor:
    """Return the horizontal distance (V, C, b) to the ground; inf for beams that point upwards."""
    angle = fan.angles()
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]  # (V, C, 1)
    x, y, z = (fan.origins[:, i, None, None] for i in range(3))
    slope = fan.tangents.clamp(max=-1e-3)  # (b,)
    distance = ((z + SENSOR_HEIGHT) / -slope).expand(-1, fan.columns, -1)
    for _ in range(_NEWTON_STEPS):
        gap, climb = z + distance * slope + SENSOR_HEIGHT, torch.zeros_like(distance)
        for kx, ky, phase, amplitude in _broadcast_waves(waves, 3):
            argument = (kx * cos + ky * sin) * distance + (kx * x + ky * y + phase)
            gap = gap - amplitude * (argument.sin() - phase.sin())
            climb = climb + amplitude * (kx * cos + ky * sin) * argument.cos()
        # the bound keeps Newton's method from diverging where a beam nearly grazes the ground
        distance = (distance - gap / torch.minimum(slope - climb, slope / 2)).clamp(0, 1e4)
    return torch.where(fan.tangents < 0, distance, torch.inf)


def _broadcast_waves(waves: Tensor, dims: int) -> list[tuple[Tensor, ...]]:
    """Return kx, ky, phase and amplitude of each wave, to broadcast over (V, ...)."""
    shaped = waves.reshape(len(waves), -1, 4, *[1] * (dims - 1))
    return [wave.unbind(1) for wave in shaped.unbind(1)]


def _poses(scene: Scene, sweeps: int) -> Tensor:
    """Return x y yaw of every object in every view, (V, n, 3)."""
    past = torch.arange(sweeps, device=scene.pose.device)[:, None] * PERIOD  # (S, 1)
    x, y, yaw = scene.pose[:, None].unbind(-1)  # (B, 1, n)
    speed, rate = scene.motion[:, None].unbind(-1)
    chord = yaw - rate * past / 2
    x, y = x - speed * past * chord.cos(), y - speed * past * chord.sin()
    return torch.stack([x, y, yaw - rate * past], -1).flatten(0, 1)
