"""The ray caster against exact answers: analytic distances, and brute force in float64."""

from __future__ import annotations

from math import pi

import numpy as np
import pytest
import torch

from boxcov.data.simulated import sensor
from boxcov.data.simulated.raycast import Fan, Prisms, cast, visible_columns
from boxcov.data.simulated.rng import make_rng


def prisms_of(*rows: tuple[float, ...]) -> Prisms:
    """Prisms in one view, each given as x y yaw half_length half_width bottom top round depth."""
    return Prisms(*torch.tensor(rows).T[:, None])


def fan_of(
    columns: int = 360,
    tangents: tuple[float, ...] = (-0.05, 0.05),
    origin: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> Fan:
    return Fan(torch.tensor([origin]), torch.zeros(1), torch.tensor(tangents), columns)


def cast_one(fan: Fan, prisms: Prisms, penetration: float = 0.0, reach: float = 70.0):
    return cast(fan, prisms, torch.full((1, fan.columns, len(fan.tangents)), penetration), reach)


def test_faces_of_a_box_lie_at_the_analytic_distances():
    fan = fan_of()
    hits = cast_one(fan, prisms_of((10.0, 0.0, 0.0, 1.0, 2.0, -5.0, 5.0, 0.0, 0.0)))
    angle = fan.angles()[0]
    angle = torch.where(angle > pi, angle - 2 * pi, angle)
    hit = hits.distance[0, :, 0].isfinite()
    # the front face, x = 9 and |y| <= 2, is all that can be seen
    assert torch.equal(hit, angle.abs() < np.arctan2(2.0, 9.0))
    torch.testing.assert_close(hits.distance[0, hit, 0], 9 / angle[hit].cos())
    torch.testing.assert_close(
        hits.cosine[0, hit, 0], angle[hit].cos() / np.sqrt(1 + 0.05**2), atol=1e-6, rtol=1e-6
    )


def test_beams_above_the_side_hit_the_top():
    hits = cast_one(
        fan_of(4, (-0.1, -0.3, -0.01)), prisms_of((10.0, 0.0, 0.0, 2.0, 2.0, -2.0, -1.0, 0.0, 0.0))
    )
    # from 8 to 12 m, top 1 m below: -0.1 hits the top at 10 m, -0.3 the ground before it,
    # -0.01 passes above
    torch.testing.assert_close(hits.distance[0, 0], torch.tensor([10.0, torch.inf, torch.inf]))
    assert float(hits.cosine[0, 0, 0]) == pytest.approx(0.1 / np.sqrt(1.01), rel=1e-5)


def test_nearer_prism_hides_the_other():
    wall, low = (
        (10.0, 0.0, 0.3, 0.5, 5.0, -2.0, 2.0, 0.0, 0.0),
        (5.0, 0.0, 0.0, 0.5, 0.5, -2.0, 0.0, 0.0, 0.0),
    )
    hits = cast_one(fan_of(4, (-0.05, 0.05)), prisms_of(wall, low))
    assert hits.prism[0, 0].tolist() == [
        1,
        0,
    ]  # the lower beam meets the low box, the upper one looks over it
    assert hits.prism[0, 1:].eq(-1).all()


def test_a_sensor_above_a_box_sees_its_top_all_around():
    hits = cast_one(
        fan_of(12, (-0.5, 0.5)), prisms_of((0.1, 0.2, 0.4, 1.5, 1.0, -2.0, -0.25, 0.0, 0.0))
    )
    torch.testing.assert_close(hits.distance[0, :, 0], torch.full((12,), 0.5))
    assert hits.distance[0, :, 1].isinf().all()


def test_rays_enter_prisms_that_are_not_solid():
    leaves = prisms_of((10.0, 0.0, 0.0, 1.0, 2.0, -5.0, 5.0, 0.0, 0.5))
    assert float(
        cast_one(fan_of(4, (1e-4,)), leaves, penetration=1.5).distance[0, 0, 0]
    ) == pytest.approx(9.75)
    assert cast_one(fan_of(4, (1e-4,)), leaves, penetration=4.5).distance.isinf().all()


def test_no_prism_in_reach_is_no_hit():
    hits = cast_one(fan_of(), prisms_of((100.0, 0.0, 0.0, 1.0, 2.0, -5.0, 5.0, 0.0, 0.0)))
    assert hits.distance.isinf().all()
    assert hits.prism.eq(-1).all()


def brute_force(fan: Fan, prisms: Prisms) -> np.ndarray:
    """Horizontal distances (C, b): every ray against every prism, in 3D and float64."""
    azimuth, tangents = fan.angles()[0].double().numpy(), fan.tangents.double().numpy()
    direction = np.stack(
        np.broadcast_arrays(np.cos(azimuth)[:, None], np.sin(azimuth)[:, None], tangents), -1
    )  # (C, b, 3)
    best = np.full(direction.shape[:2], np.inf)
    for x, y, yaw, a, b, bottom, top, is_round, _ in zip(
        *(getattr(prisms, f)[0].double().numpy() for f in Prisms.__dataclass_fields__)
    ):
        turn = np.array([[np.cos(yaw), np.sin(yaw), 0], [-np.sin(yaw), np.cos(yaw), 0], [0, 0, 1]])
        centre = np.array([x, y, (bottom + top) / 2])
        scale = np.array([a, b, (top - bottom) / 2])
        p = turn @ (fan.origins[0].double().numpy() - centre) / scale
        q = direction @ turn.T / scale
        with np.errstate(divide="ignore", invalid="ignore"):
            enter, leave = (
                np.minimum((-1 - p) / q, (1 - p) / q),
                np.maximum((-1 - p) / q, (1 - p) / q),
            )
            if is_round:
                A, B, C = (
                    (q[..., :2] ** 2).sum(-1),
                    (p[:2] * q[..., :2]).sum(-1),
                    (p[:2] ** 2).sum() - 1,
                )
                root = np.sqrt(B * B - A * C)
                enter = np.stack([(-B - root) / A, enter[..., 2]], -1)
                leave = np.stack([(-B + root) / A, leave[..., 2]], -1)
            first, last = np.maximum(enter.max(-1), 0), leave.min(-1)
            best = np.where((first < last) & (first < best), first, best)
    return best


@pytest.mark.parametrize("is_round", [0.0, 1.0])
def test_first_hits_equal_brute_force(is_round):
    rng = make_rng(4, int(is_round), "cpu")
    n = 60
    centre, yaw = rng.uniform(-45, 45, 2, n), rng.uniform(-7, 7, 1, n)
    extent = torch.cat([rng.uniform(0.05, 3, 1, n), rng.uniform(0.03, 6, 1, n)])
    bottom = rng.uniform(-2, 0, 1, n)
    rows = torch.cat(
        [
            centre,
            yaw,
            extent,
            bottom,
            bottom + rng.uniform(0.1, 3, 1, n),
            torch.full((1, n), is_round),
            torch.zeros(1, n),
        ]
    )
    prisms = Prisms(*rows[:, None])
    fan = Fan(
        torch.tensor([[3.0, -2.0, 0.4]]), torch.tensor([0.123]), torch.linspace(-0.6, 0.2, 15), 540
    )
    found, truth = cast_one(fan, prisms).distance[0].double().numpy(), brute_force(fan, prisms)
    assert np.isfinite(truth).mean() > 0.2
    # rays that graze an edge may fall on either side of it
    same = np.isclose(found, truth, rtol=0, atol=1e-3)  # two infinities are close
    assert same.mean() > 0.9995


def test_beams_meet_flat_ground_where_trigonometry_says():
    fan = fan_of(8, (-0.5, -0.1, -0.03, 0.1), origin=(1.0, 2.0, 0.16))
    expected = torch.tensor([4.0, 20.0, 2 / 0.03, torch.inf]).expand(1, 8, 4)
    torch.testing.assert_close(sensor.ground_distance(fan, torch.zeros(1, 2, 4)), expected)


def test_beams_meet_undulating_ground_on_its_surface():
    waves = torch.tensor([[[0.15, 0.05, 1.0, 0.09], [-0.02, 0.2, 2.0, 0.08]]])
    fan = fan_of(90, tuple(torch.linspace(-0.6, -0.04, 20).tolist()), origin=(5.0, 3.0, 0.1))
    distance, angle = sensor.ground_distance(fan, waves), fan.angles()[..., None]
    x, y, z = 5 + distance * angle.cos(), 3 + distance * angle.sin(), 0.1 + distance * fan.tangents
    torch.testing.assert_close(sensor.ground_height(waves, x, y), z, atol=2e-3, rtol=0)


def test_a_wall_is_seen_in_the_columns_that_it_covers() -> None:
    one = torch.ones(1, 1)
    wall = (10 * one, 0 * one, 0 * one, 1e-3 * one, 1.6 * one)
    fan = Fan(torch.zeros(1, 3), torch.zeros(1), torch.tensor([0.1]), columns=360)
    first, count = visible_columns(fan, wall, reach=70.0)
    assert (int(first), int(count)) == (-9, 19)
