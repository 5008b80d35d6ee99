"""First hits of a rotating sensor's rays on upright prisms: oriented boxes, elliptic cylinders.

All rays of a column (one azimuth of one view) share their horizontal direction: a prism's outline
is intersected once per column, and its height range once per beam. A prism is tested only against
the columns in which it can be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from boxcov.data.poses import into_axes

CHUNK = 1 << 16  # (prism, column) rows at a time: bounds the memory at about 80 MB for 32 beams
_NO_HIT = torch.iinfo(torch.int64).max
_ROW = (1 << 32) - 1


@dataclass(frozen=True)
class Prisms:
    """M upright prisms in each of V views; every field is (V, M)."""

    x: Tensor  # centre
    y: Tensor
    yaw: Tensor
    half_length: Tensor  # along yaw
    half_width: Tensor
    bottom: Tensor  # z
    top: Tensor
    round: Tensor  # 1 for an elliptic cylinder, 0 for a box
    depth: Tensor  # mean free path of a ray inside, metres; 0 for a solid


@dataclass(frozen=True)
class Fan:
    """The rays of V views, with C columns of beams each."""

    origins: Tensor  # (V, 3)
    starts: Tensor  # (V,) azimuth of column 0
    tangents: Tensor  # (b,) of the elevations, not 0
    columns: int

    def angles(self) -> Tensor:
        """Return the azimuth of each column, (V, C)."""
        steps = torch.arange(self.columns, device=self.starts.device, dtype=self.starts.dtype)
        return self.starts[:, None] + steps * (2 * pi / self.columns)


@dataclass(frozen=True)
class Hits:
    """The first hit of each ray; every field is (V, C, b)."""

    distance: Tensor  # horizontal; inf without a hit
    prism: Tensor  # index into the M prisms, -1 without a hit
    cosine: Tensor  # of the angle of incidence


def cast(fan: Fan, prisms: Prisms, penetration: Tensor, reach: float) -> Hits:
    """Return the first hit of every ray.

    ``penetration`` (V, C, b) is the depth in mean free paths that a ray reaches in a prism that is
    not solid.
    """
    views, columns, beams = penetration.shape
    outlines = (prisms.x, prisms.y, prisms.yaw, prisms.half_length, prisms.half_width)
    first, count = visible_columns(fan, outlines, reach)
    owner, column = interval_rows(first, count, columns)  # (P,) each
    entry, leave, cosine = _outline(fan, prisms, owner, column)  # (P,) each
    cell = owner // prisms.x.shape[1] * columns + column  # (P,) which column of which view
    nearest = penetration.new_full((views * columns, beams), _NO_HIT, dtype=torch.int64)
    height = fan.origins[:, 2:]  # (V, 1)
    heights = (prisms.bottom - height, prisms.top - height, prisms.depth)
    bottom, top, depth = (field.flatten()[owner] for field in heights)
    for begin in range(0, len(owner), CHUNK):
        part = slice(begin, begin + CHUNK)
        inside = depth[part, None] * penetration.reshape(-1, beams)[cell[part]]
        distance = _slab_distance(
            entry[part], leave[part], bottom[part], top[part], fan.tangents, inside
        )
        # bits of positive floats are ordered as the floats: one integer minimum finds the
        # nearest hit and its row
        row = torch.arange(begin, begin + len(distance), device=owner.device)
        key = (distance.view(torch.int32).long() << 32) | row[:, None]
        key = torch.where(distance.isfinite(), key, _NO_HIT)
        nearest.scatter_reduce_(0, cell[part, None].expand_as(key), key, "amin")
    nearest = nearest.reshape(views, columns, beams)
    return _hits(nearest, fan.tangents, owner % prisms.x.shape[1], entry, cosine)


def visible_columns(fan: Fan, outlines: Sequence[Tensor], reach: float) -> tuple[Tensor, Tensor]:
    """Return the first column in which each oriented rectangle (V, M) is seen, and their number.

    outlines: x, y, yaw, half of the length along the yaw and half of the width, (V, M) each.
    """
    x, y, yaw, half_length, half_width = outlines
    dx, dy = x - fan.origins[:, :1], y - fan.origins[:, 1:2]
    cos, sin = yaw.cos(), yaw.sin()
    signs = torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0]], device=x.device)
    along, across = half_length[..., None] * signs[0], half_width[..., None] * signs[1]  # (V, M, 4)
    cx = dx[..., None] + cos[..., None] * along - sin[..., None] * across
    cy = dy[..., None] + sin[..., None] * along + cos[..., None] * across
    # azimuths relative to the centre's: they do not wrap around when seen from outside
    turn = torch.atan2(
        dx[..., None] * cy - dy[..., None] * cx, dx[..., None] * cx + dy[..., None] * cy
    )
    ahead, left = into_axes(dx, dy, yaw)  # of the sensor
    within = (ahead.abs() <= half_length) & (left.abs() <= half_width)
    near = torch.hypot(dx, dy) - torch.hypot(half_length, half_width) <= reach
    scale = fan.columns / (2 * pi)
    middle = torch.atan2(dy, dx) - fan.starts[:, None]
    margin = 1e-3  # in columns, for rounding
    first = ((middle + turn.amin(-1)) * scale - margin).ceil().long()
    last = ((middle + turn.amax(-1)) * scale + margin).floor().long()
    count = torch.where(within, fan.columns, (last - first + 1).clamp(0, fan.columns))
    return first, count * near


def interval_rows(first: Tensor, count: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return one row per column of each interval: the interval's flat index, and the column.

    >>> interval_rows(torch.tensor([-1, 2]), torch.tensor([2, 1]), columns=4)
    (tensor([0, 0, 1]), tensor([3, 0, 2]))
    """
    count = count.flatten()
    total = int(count.sum())  # the only synchronization with the device
    owner = torch.repeat_interleave(
        torch.arange(len(count), device=count.device), count, output_size=total
    )
    begin = count.cumsum(0) - count
    step = torch.arange(total, device=count.device) - begin[owner]
    return owner, (first.flatten()[owner] + step) % columns


def _outline(
    fan: Fan, prisms: Prisms, owner: Tensor, column: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's entry and exit distance and horizontal cosine of incidence, (P,) each."""
    dx, dy = prisms.x - fan.origins[:, :1], prisms.y - fan.origins[:, 1:2]
    ahead, left = into_axes(dx, dy, prisms.yaw)
    # the origin in the prism's axes, in half extents
    px, py = -ahead / prisms.half_length, -left / prisms.half_width
    start = fan.starts[:, None] - prisms.yaw
    fields = (px, py, start, prisms.half_length, prisms.half_width, prisms.round)
    px, py, start, half_length, half_width, is_round = torch.stack(fields).flatten(1)[:, owner]
    angle = start + column * (2 * pi / fan.columns)
    qx, qy = angle.cos(), angle.sin()
    box = _square(px, py, qx / half_length, qy / half_width)
    tube = _circle(px, py, qx / half_length, qy / half_width)
    is_box = is_round == 0
    entry, leave = torch.where(is_box, box[0], tube[0]), torch.where(is_box, box[1], tube[1])
    # normals: the axis of the entry of a box, the gradient of the ellipse of a tube
    nx = torch.where(is_box, box[2], (px + entry * qx / half_length) / half_length)
    ny = torch.where(is_box, 1 - box[2], (py + entry * qy / half_width) / half_width)
    cosine = (nx * qx + ny * qy).abs() / torch.hypot(nx, ny).clamp(min=1e-6)
    return entry.clamp(min=0), leave, cosine


def _square(px: Tensor, py: Tensor, qx: Tensor, qy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return entry and exit of p + r q in [-1, 1]^2, and 1 if it enters through x = +-1."""
    qx, qy = (torch.where(q.abs() < 1e-9, 1e-9, q) for q in (qx, qy))
    x1, x2, y1, y2 = (-1 - px) / qx, (1 - px) / qx, (-1 - py) / qy, (1 - py) / qy
    enter_x, enter_y = torch.minimum(x1, x2), torch.minimum(y1, y2)
    leave = torch.minimum(torch.maximum(x1, x2), torch.maximum(y1, y2))
    return torch.maximum(enter_x, enter_y), leave, (enter_x > enter_y).to(px.dtype)


def _circle(px: Tensor, py: Tensor, qx: Tensor, qy: Tensor) -> tuple[Tensor, Tensor]:
    """Return entry and exit of p + r q in the unit circle; exit < entry if it misses."""
    # by the point closest to the centre: the discriminant of the quadratic equation loses all
    # digits for a thin pole far away
    square = qx * qx + qy * qy
    closest = -(px * qx + py * qy) / square
    miss = (px + closest * qx).square() + (py + closest * qy).square()
    half = ((1 - miss).clamp(min=0) / square).sqrt()
    return torch.where(miss < 1, closest - half, torch.inf), closest + half


def _slab_distance(
    entry: Tensor, leave: Tensor, bottom: Tensor, top: Tensor, tangents: Tensor, inside: Tensor
) -> Tensor:
    """Return the horizontal distance (P, b) to each beam's hit on its row's prism, or inf."""
    slope = 1 / tangents
    low, high = bottom[:, None] * slope, top[:, None] * slope
    distance = torch.maximum(torch.minimum(low, high), entry[:, None]) + inside
    leave = torch.minimum(torch.maximum(low, high), leave[:, None])
    return torch.where((distance < leave) & (distance > 0), distance, torch.inf)


def _hits(nearest: Tensor, tangents: Tensor, prism: Tensor, entry: Tensor, cosine: Tensor) -> Hits:
    hit = nearest != _NO_HIT
    # rays without a hit read an additional row at the end
    row = torch.where(hit, nearest & _ROW, len(prism))
    ends = zip((prism, entry, cosine), (-1, 0, 1))
    prism, entry, cosine = (torch.cat([x, x.new_full((1,), end)]) for x, end in ends)
    distance = (nearest >> 32).int().view(torch.float32)
    distance = torch.where(hit, distance, torch.inf)
    flat = 1 / (1 + tangents.square()).sqrt()  # (b,) cosine of the elevation
    # otherwise through the top or bottom, or inside a prism that is not solid
    side = distance <= entry[row] * (1 + 1e-6)
    return Hits(
        distance,
        prism[row],
        torch.where(side, cosine[row] * flat, (tangents * flat).abs().expand_as(distance)),
    )
