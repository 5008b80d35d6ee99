"""The simulated LiDAR against analytic distances, brute force in float64, and counts."""

from __future__ import annotations

from math import pi

import numpy as np
import pytest
import torch
from torch import Tensor

import boxcov
from boxcov.data import batched, simulated
from boxcov.data.simulated import catalogue
from boxcov.data.simulated import sensor as views
from boxcov.data.simulated.raycast import cast
from boxcov.data.simulated.rng import make_rng
from boxcov.data.simulated.scenarios import Scenario
from boxcov.data.simulated.scene import Scene, build, stack
from boxcov.data.simulated.sensor import TOLERANCE, observe

PERFECT = Scenario(dropout=0.0, noise=0.0)
FAR_ROAD = [pi / 2, 0.0, 0.0, 3.6, 1e3]


# --- sweeps


def scene_of(*objects: tuple[float, ...], ego: tuple[float, float] = (0.0, 0.0)) -> Scene:
    """Flat ground, the ego car, and bright boxes that are cars: each x y yaw w l h speed rate."""
    rows = torch.tensor([(0.0, 0.0, pi / 2, 1.2, 1.8, 1.54, *ego), *objects])
    kind = torch.tensor([catalogue.KINDS.index("ego")] + [0] * len(objects))
    width, length, height = rows[:, 3:6].T
    edges = torch.stack([-length / 2, length / 2, -width / 2, width / 2, 0 * height, height], 1)
    surface = torch.tensor([[0.0, 1.0, 0.0]]).repeat(len(rows), 1)
    owner = torch.arange(len(rows))
    scene = Scene(
        kind,
        rows[:, :3],
        rows[:, 3:6],
        rows[:, 6:],
        owner,
        edges,
        surface,
        torch.zeros(2, 4),
        torch.tensor(FAR_ROAD),
    )
    return stack([scene], "cpu")


def look(
    scene: Scene, sweeps: int, scenario: Scenario = PERFECT
) -> tuple[Tensor, dict[str, Tensor]]:
    clouds, targets = observe(scene, [make_rng(1, 1, "cpu")], scenario, sweeps)
    return clouds[0], targets[0]


def above_ground(cloud: Tensor) -> Tensor:
    return cloud[(cloud[:, 2] > -1.8) & (cloud[:, :2].abs().amax(1) > 1.5)]


def test_standing_objects_are_sharp_from_a_moving_ego_car():
    cloud, target = look(
        scene_of((-6.0, 15.0, 0.4, 2.0, 5.0, 3.0, 0.0, 0.0), ego=(12.0, 0.4)), sweeps=10
    )
    points = above_ground(cloud)
    assert len(points[:, 4].unique()) == 10
    assert len(points) > 3000
    outside = distance_outside(points[:, :3], target["boxes"][0])
    assert float(outside.abs().max()) < 2e-3  # on the surface, from wherever it was seen


def test_moving_objects_are_smeared_by_their_velocity():
    speed = 8.0
    cloud, target = look(
        scene_of((0.0, 15.0, pi / 2, 2.0, 4.0, 1.5, speed, 0.0), ego=(5.0, 0.0)), sweeps=10
    )
    points = above_ground(cloud)
    torch.testing.assert_close(
        target["boxes"][0, 7:], torch.tensor([0.0, speed]), atol=1e-5, rtol=0
    )
    for k in range(10):
        now = points[(points[:, 4] - 0.05 * k).abs() < 1e-6]
        assert float(now[:, 1].min()) == pytest.approx(13 - speed * 0.05 * k, abs=1e-3)  # the rear


def test_turning_objects_follow_an_arc():
    speed, rate, past = 6.0, 0.5, 9 * 0.05
    scene = scene_of((0.0, 15.0, 0.3, 2.0, 4.0, 1.5, speed, rate))
    prisms = views.body_prisms(scene, 10)
    before = 0.3 - rate * past
    x = 0.0 - speed / rate * (np.sin(0.3) - np.sin(before))
    y = 15.0 + speed / rate * (np.cos(0.3) - np.cos(before))
    found = [float(getattr(prisms, name)[9, 1]) for name in ("x", "y", "yaw")]
    assert found == pytest.approx([x, y, before], abs=0.01)


def test_ego_car_points_are_dropped_from_earlier_sweeps():
    cloud, _ = look(scene_of(ego=(10.0, 0.1)), sweeps=3)
    close = cloud[:, :2].abs().amax(1) < 1.0
    assert int((close & (cloud[:, 4] == 0)).sum()) > 1000
    assert not (close & (cloud[:, 4] > 0)).any()


def test_range_noise_has_its_standard_deviation():
    cloud, _ = look(
        scene_of((0.0, 10.0, 0.0, 0.2, 8.0, 3.0, 0.0, 0.0)),
        sweeps=5,
        scenario=Scenario(dropout=0.0, noise=0.02),
    )
    wall = above_ground(cloud)
    assert float((wall[:, :3].norm(dim=1) * (1 - 9.9 / wall[:, 1])).std()) == pytest.approx(
        0.02, rel=0.1
    )


def test_hidden_objects_have_no_label():
    wall, car = (
        (0.0, 10.0, 0.0, 1.0, 20.0, 4.0, 0.0, 0.0),
        (0.0, 20.0, 0.0, 2.0, 4.0, 1.5, 0.0, 0.0),
    )
    _, target = look(scene_of(wall, car), sweeps=2)
    assert target["boxes"].shape == (1, 9)
    assert float(target["boxes"][0, 1]) == 10.0
    _, target = look(scene_of(car), sweeps=2)
    assert target["labels"].tolist() == [0]


def test_returns_grow_rare_with_range_and_grazing_angle():
    cloud, _ = look(scene_of(), sweeps=5, scenario=Scenario(dropout=0.0))
    rings = cloud[:, :2].norm(dim=1)
    counts = [
        int(((rings > low) & (rings < high)).sum()) for low, high in ((7, 8), (24, 28), (40, 70))
    ]
    assert counts[0] > 5 * 1080 * 0.8
    assert counts[0] > counts[1] > counts[2]


# --- bodies and scenes

SEEN, UNSEEN = catalogue.read_bodies(), catalogue.read_bodies(unseen=True)


@pytest.mark.parametrize("body", [*SEEN, *UNSEEN], ids=lambda body: f"{body.kind}, {body.name}")
def test_parts_of_a_body_fill_its_box_exactly(body):
    edges = np.array([part[:6] for part in body.parts])
    low, high = edges[:, ::2].min(0), edges[:, 1::2].max(0)
    assert low.tolist() == pytest.approx([-0.5, -0.5, 0.0])
    assert high.tolist() == pytest.approx([0.5, 0.5, 1.0])
    assert (edges[:, ::2] < edges[:, 1::2]).all()


def test_every_kind_has_a_body_and_the_unseen_ones_are_new():
    assert {body.kind for body in SEEN} == {body.kind for body in UNSEEN} == set(catalogue.KINDS)
    seen = {body.parts for body in SEEN if body.kind in catalogue.CLASSES}
    assert not seen & {body.parts for body in UNSEEN}


def test_moving_bicycles_have_riders():
    for i in range(30):
        _, targets = simulated.frames(seed=8, count=30, sweeps=1)[i]
        boxes = targets[0]["boxes"][targets[0]["labels"] == simulated.CLASSES.index("bicycle")]
        riding = boxes[:, 7:].norm(dim=1) > 0
        assert (boxes[riding, 5] > 1.3).all()  # with its rider


@pytest.mark.parametrize("scenario", ["clear", "unseen"])
def test_boxes_enclose_bodies_and_all_hits(scenario):
    scene = stack([build(make_rng(2, 0, "cpu"), simulated.SCENARIOS[scenario])], "cpu")
    size, owner = scene.size[0][:, [1, 0, 2]], scene.owner[0]
    index = owner[:, None].expand(-1, 3)
    high = torch.zeros_like(size).scatter_reduce(0, index, scene.edges[0, :, 1::2], "amax")
    torch.testing.assert_close(high, size * torch.tensor([0.5, 0.5, 1.0]))
    fan, _ = views.sensor_rays(scene, 1, torch.zeros(1), 1)
    hits = cast(fan, views.body_prisms(scene, 1), torch.zeros(1, views.COLUMNS, views.BEAMS), 70.0)
    met = hits.prism >= 0
    angle = fan.angles()[..., None]
    x, y, z = hits.distance * angle.cos(), hits.distance * angle.sin(), hits.distance * fan.tangents
    boxes = views.key_boxes(scene)[0][owner[hits.prism[met]]]
    assert float(distance_outside(torch.stack([x[met], y[met], z[met]], 1), boxes).max()) < 1e-3


def distance_outside(points: Tensor, boxes: Tensor) -> Tensor:
    """How far each point is outside its box along the worst axis; negative inside."""
    x, y, z, width, length, height, yaw = boxes[..., :7].unbind(-1)
    dx, dy = points[:, 0] - x, points[:, 1] - y
    along, across = dx * yaw.cos() + dy * yaw.sin(), dy * yaw.cos() - dx * yaw.sin()
    return torch.stack(
        [along.abs() - length / 2, across.abs() - width / 2, (points[:, 2] - z).abs() - height / 2]
    ).amax(0)


def test_objects_do_not_overlap():
    for i in range(20):
        _, targets = simulated.frames("crowd", seed=1, count=20, sweeps=1)[i]
        boxes = targets[0]["boxes"]
        grid = torch.cartesian_prod(
            torch.linspace(-0.5, 0.5, 9), torch.linspace(-0.5, 0.5, 9)
        )  # (81, 2) over each outline
        cos, sin = boxes[:, 6, None].cos(), boxes[:, 6, None].sin()
        along, across = grid[:, 0] * boxes[:, 4, None], grid[:, 1] * boxes[:, 3, None]
        x, y = (
            boxes[:, :1] + cos * along - sin * across,
            boxes[:, 1:2] + sin * along + cos * across,
        )  # (n, 81)
        for j, box in enumerate(boxes):
            points = torch.stack([x, y, box[2].expand_as(x)], -1).reshape(-1, 3)
            inside = (distance_outside(points, box) < 0).reshape(x.shape)
            inside[j] = False
            assert not inside.any()


# --- frames


@pytest.mark.parametrize("scenario", simulated.SCENARIOS)
def test_every_scenario_gives_sane_frames(scenario):
    for i in (0, 1):
        clouds, targets = simulated.frames(scenario, seed=7, count=2, sweeps=3)[i]
        cloud, target = clouds[0], targets[0]
        assert len(clouds) == len(targets) == 1
        assert cloud.dtype == target["boxes"].dtype == torch.float32
        assert cloud.isfinite().all()
        assert target["boxes"].isfinite().all()
        assert 20_000 < len(cloud) < 3 * 32 * 1080
        assert float(cloud[:, :3].norm(dim=1).max()) < 71
        assert 0 <= float(cloud[:, 3].min()) < float(cloud[:, 3].max()) <= 255
        torch.testing.assert_close(cloud[:, 4].unique(), torch.tensor([0.0, 0.05, 0.1]))
        assert (target["boxes"][:, 3:6] > 0.05).all()
        assert target["boxes"][:, 6].abs().max() <= pi
        assert target["boxes"][:, :2].abs().max() <= 51.2
        assert 0 <= target["labels"].min() <= target["labels"].max() < len(simulated.CLASSES)
        assert len(target["labels"]) == len(target["points"]) == len(target["boxes"]) > 5


@pytest.mark.parametrize("scenario", ["clear", "rain", "crowd"])
def test_points_counts_the_key_sweep_inside_each_box(scenario):
    clouds, targets = simulated.frames(scenario, seed=2, count=1, sweeps=2)[0]
    key = clouds[0][clouds[0][:, 4] == 0][:, :3]
    for box, count in zip(targets[0]["boxes"], targets[0]["points"]):
        inside = int((distance_outside(key.double(), box.double()) <= TOLERANCE).sum())
        assert abs(inside - int(count)) <= 1  # a point may lie on the bound to within rounding
        assert count > 0


def test_a_frame_depends_on_scenario_seed_and_index_alone():
    frames = simulated.frames(seed=5, count=4, sweeps=2)
    expected = [frames[i] for i in range(3)]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for i in (2, 0, 1):
        assert_same(frames[i], expected[i])
    assert_same(simulated.frames(seed=5, count=99, sweeps=2)[2], expected[2])
    assert_same(frames[-2], expected[2])
    assert torch.equal(torch.get_rng_state(), before)
    other = simulated.frames(seed=6, count=4, sweeps=2)[0]
    assert other[0][0].shape != expected[0][0][0].shape or not torch.equal(
        other[0][0], expected[0][0][0]
    )


def test_batch_equals_single_frames():
    frames = simulated.frames("rain", seed=5, count=4, sweeps=2)
    together = frames.batch([3, 1])
    for k, i in enumerate((3, 1)):
        assert_same(([together[0][k]], [together[1][k]]), frames[i])
    assert_same(batched(frames, 2)[0], frames.batch([0, 1]))


def test_an_empty_batch_is_empty():
    assert simulated.frames(count=2).batch([]) == ([], [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_sees_the_same_street():
    cpu, gpu = (
        simulated.frames("rain", seed=5, count=3, sweeps=3, device=device)
        for device in ("cpu", "cuda")
    )
    together = gpu.batch([2, 0])
    for k, i in enumerate((2, 0)):
        clouds, targets = gpu[i]
        assert clouds[0].is_cuda
        assert_same(([together[0][k]], [together[1][k]]), (clouds, targets))
        expected_clouds, expected = cpu[i]
        assert len(clouds[0]) == pytest.approx(len(expected_clouds[0]), rel=0.01)
        seen = (
            targets[0]["points"].cpu() >= 10
        )  # an object with few points may be labelled on one of them only: their noise differs
        near = (
            torch.cdist(targets[0]["boxes"].cpu().double(), expected[0]["boxes"].double()).amin(1)
            < 1e-3
        )  # float32 is centimetres off
        assert near[seen].float().mean() > 0.95


def assert_same(frame, other):
    assert len(frame[0]) == len(other[0])
    for cloud, cloud2, target, target2 in zip(frame[0], other[0], frame[1], other[1]):
        assert torch.equal(cloud, cloud2)
        assert all(torch.equal(target[key], target2[key]) for key in ("boxes", "labels", "points"))


def test_weather_and_fewer_beams_thin_the_same_street():
    def totals(scenario: str) -> tuple[int, int]:
        frames = simulated.frames(scenario, seed=3, count=4, sweeps=1)
        pairs = [frames[i] for i in range(4)]
        far = sum(int((cloud[0][:, :2].norm(dim=1) > 15).sum()) for cloud, _ in pairs)
        return sum(len(cloud[0]) for cloud, _ in pairs), far

    clear, rain, fog, sparse = (totals(name) for name in ("clear", "rain", "fog", "sparse"))
    assert rain[0] < 0.95 * clear[0]
    assert fog[0] < 0.99 * clear[0]  # drops give points of their own
    assert sparse[0] < 0.55 * clear[0]
    assert fog[1] < 0.8 * clear[1]
    # a box of the foggy street is a box of the clear one
    foggy = simulated.frames("fog", seed=3, count=1, sweeps=1)[0][1][0]["boxes"]
    plain = simulated.frames("clear", seed=3, count=1, sweeps=1)[0][1][0]["boxes"]
    assert sum(bool((plain == box).all(1).any()) for box in foggy) > 0.9 * len(foggy)


def test_all_classes_occur_often_enough_to_learn():
    frames = simulated.frames(seed=11, count=60, sweeps=1)
    labels = torch.cat([frames[i][1][0]["labels"] for i in range(60)])
    assert 20 < len(labels) / 60 < 45
    assert (torch.bincount(labels, minlength=10) >= 0.6 * 60).all()
    crowd = simulated.frames("crowd", seed=11, count=10, sweeps=1)
    people = sum(int((crowd[i][1][0]["labels"] == 8).sum()) for i in range(10)) / 10
    assert people > 4 * int((labels == 8).sum()) / 60


def test_some_objects_and_the_ego_car_move():
    frames = simulated.frames(seed=12, count=10, sweeps=1)
    speed = torch.cat([frames[i][1][0]["boxes"][:, 7:].norm(dim=1) for i in range(10)])
    assert 0.15 < float((speed > 0.5).float().mean()) < 0.7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"scenario": "snow"},
            "unknown scenario 'snow': choose one of clear, rain, fog, sparse, crowd, unseen",
        ),
        ({"seed": -1}, "seed must be a whole number of at least 0 .*got -1"),
        ({"seed": 0.5}, "seed must be a whole number of at least 0 .*got 0.5"),
        ({"count": -3}, "count must be a whole number of at least 0 .*got -3"),
        ({"sweeps": 0}, "sweeps must be a whole number from 1 to 10"),
        ({"sweeps": 11}, "sweeps must be a whole number from 1 to 10"),
        ({"sweeps": True}, "got True"),
        ({"seed": 2**63}, "below 2\\^63"),
        ({"count": 2**62 + 1}, "at most"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(boxcov.BoxcovError, match=message):
        simulated.frames(**arguments)


def test_an_index_out_of_range_is_an_index_error():
    frames = simulated.frames(count=2, sweeps=1)
    with pytest.raises(IndexError):
        frames[2]
    assert len(list(frames)) == 2
