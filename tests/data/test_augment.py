from __future__ import annotations

import torch

from boxcov.data.augment import Augmentation
from boxcov.data.points import points_in_boxes


def frame() -> tuple[list, list]:
    boxes = torch.tensor(
        [
            [5.0, 3.0, 1.0, 2.0, 4.5, 1.6, 0.7, 3.0, 1.0],
            [-8.0, 2.0, 0.5, 0.7, 0.8, 1.8, -2.0, float("nan"), float("nan")],
        ]
    )
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(4000, 5, generator=generator) * torch.tensor([8.0, 8.0, 1.5, 1.0, 0.1])
    return [points], [{"boxes": boxes, "labels": torch.tensor([0, 8]), "token": "a"}]


def test_the_points_in_a_box_stay_in_it() -> None:
    points, targets = frame()
    before = points_in_boxes(points[0], targets[0]["boxes"])
    generator = torch.Generator().manual_seed(3)
    for _ in range(8):
        moved, changed = Augmentation(turn=3.0, scale=0.1)(points, targets, generator)
        after = points_in_boxes(moved[0], changed[0]["boxes"])
        assert int((before != after).sum()) <= 2  # on a face
        assert int(before.sum()) > 10
        assert torch.equal(moved[0][:, 3:], points[0][:, 3:])
        assert changed[0]["token"] == "a"
        assert bool(changed[0]["boxes"][1, 7:].isnan().all())


def test_velocities_turn_and_mirror_with_the_heading() -> None:
    """A box that drives where it points goes on doing so."""
    boxes = torch.tensor([[0.0, 0, 0, 2, 4, 1.5, 0.6, 5 * 0.8253, 5 * 0.5646]])
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        _, (changed,) = Augmentation(turn=3.0)([torch.zeros(1, 5)], [{"boxes": boxes}], generator)
        _, _, _, _, _, _, yaw, vx, vy = changed["boxes"][0].tolist()
        assert abs(torch.atan2(torch.tensor(vy), torch.tensor(vx)).item() - yaw) < 1e-3


def test_boxes_without_velocity_keep_seven_numbers() -> None:
    points, targets = frame()
    seven = [{**targets[0], "boxes": targets[0]["boxes"][:, :7]}]
    _, (nine,) = Augmentation()(points, targets, torch.Generator().manual_seed(4))
    _, (changed,) = Augmentation()(points, seven, torch.Generator().manual_seed(4))
    assert torch.equal(changed["boxes"], nine["boxes"][:, :7])


def test_the_draw_follows_the_generator() -> None:
    points, targets = frame()
    first, again = (
        Augmentation()(points, targets, torch.Generator().manual_seed(5))[0][0] for _ in range(2)
    )
    assert torch.equal(first, again)
