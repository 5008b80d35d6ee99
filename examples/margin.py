"""Drive past parked boxes with a margin for each box, and with constant margins.

    python examples/margin.py --passes 100

The ego car drives straight on (y) and passes each parked vehicle at the side of its reported box,
with a margin. A margin from ``found.region(0.99)`` is wide for a box that may be far off, and
narrow for one that is sure. A pass with too small a margin is a collision; room between the ego car
and the vehicle that was not needed is distance lost.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from math import pi

import numpy as np
import torch
from torch import Tensor

import boxcov
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.evaluate.ground_truth import GroundTruth, match_detections

LEVEL = 0.99
CONSTANT = (0.5, 1.0, 2.0)  # metres
PARKED = ("car", "truck", "bus", "trailer", "construction_vehicle")
NEAR, FAR, SLOW = 4.0, 40.0, 0.5  # metres, metres, metres per second
SCORE = 0.3
MOST = 3.0  # metres: a lane is not wider


def edge(boxes: Tensor) -> Tensor:
    """Return how far the side of each box (m, 9) towards the ego car's path is from it, (m,)."""
    x, w, l, yaw = boxes[:, 0], boxes[:, 3], boxes[:, 4], boxes[:, 6]
    return x.abs() - (l * yaw.cos().abs() + w * yaw.sin().abs()) / 2


def region_margin(found: boxcov.Detections, level: float = LEVEL) -> Tensor:
    """Return the margin (m,) that covers every box in the region: moved, larger and turned.

    It is at most ``MOST``.
    """
    half = dict(zip(found.fields, found.region(level).unbind(1)))
    larger = found.boxes.clone()
    for name in ("w", "l"):
        larger[:, found.fields.index(name)] += half[name]
    turned = [edge(larger)]
    for share in (-1.0, -0.5, 0.5, 1.0):
        some = larger.clone()
        some[:, 6] += share * half["yaw"].clamp(max=pi / 2)
        turned.append(edge(some))
    margin = edge(found.boxes) - torch.stack(turned).amin(0) + half["x"]
    # a region is infinite where a class has too few calibration boxes for the level
    return margin.clamp(max=MOST)


def parked(found: boxcov.Detections) -> Tensor:
    """Return which boxes (m,) are reported as standing vehicles beside the path."""
    known = [name for name in PARKED if name in found.classes]
    labels = torch.tensor([found.classes.index(name) for name in known])
    away = found.boxes[:, :2].norm(dim=1)
    slow = found.boxes[:, 7:].norm(dim=1) < SLOW
    beside = (edge(found.boxes) > 0) & (away > NEAR) & (away < FAR)
    return torch.isin(found.labels, labels) & slow & beside & (found.scores > SCORE)


def sight(found: boxcov.Detections, target: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return margin, reported edge and true edge (n,) of the parked vehicles of a frame."""
    found = found[parked(found)]
    found = replace(found, frame=torch.zeros_like(found.frame))
    truth = GroundTruth.from_frames([(None, [target])])
    records = match_detections(found, truth, threshold=-1.0)
    has_object = torch.as_tensor(records.paired)
    true = torch.as_tensor(records.boxes - records.errors)[has_object]
    margin = region_margin(found)[has_object]
    return margin, edge(found.boxes)[has_object], edge(true).to(margin)


def sights() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield what ``sight`` returns for one simulated frame after another."""
    detector = centerpoint.load("small")
    model = boxcov.ExactGLM(detector, boxcov.Posterior.load("small", detector))
    frames = simulated.frames("clear", seed=6101, count=10_000)
    for number in range(len(frames)):
        inputs, (target,) = frames[number]
        yield sight(model(inputs), target)


def outcome(margin: Tensor, reported: Tensor, true: Tensor) -> dict[str, float]:
    """Return collisions per 1,000 passes, and the mean room in metres that was not needed."""
    room = true - (reported - margin)
    lost = room.clamp(min=0)
    return {
        "collisions": 1000 * float((room < 0).double().mean()),
        "lost": float(lost.mean()),
        "margin": float(margin.mean()),
    }


def outcomes(seen: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """Return the outcome of each kind of margin over all passes."""
    if not sum(len(one[0]) for one in seen):
        raise boxcov.BoxcovError("no parked vehicle was reported: there is nothing to pass")
    margin, reported, true = (torch.cat(column).double() for column in zip(*seen))
    rows = {f"region({LEVEL})": outcome(margin, reported, true)}
    collisions = rows[f"region({LEVEL})"]["collisions"]
    for constant in CONSTANT:
        rows[f"{constant:g} m"] = outcome(torch.full_like(margin, constant), reported, true)
    short = np.sort((reported - true).numpy())  # the margin that each pass needs
    enough = float(short[max(0, len(short) - 1 - int(collisions * len(short) / 1000))]) + 1e-6
    rows["constant, as few collisions"] = outcome(
        torch.full_like(margin, max(enough, 0.0)), reported, true
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=100, help="number of passes")
    given = parser.parse_args()
    if given.passes < 1:
        parser.error(f"--passes must be at least 1, got {given.passes}")
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    for one in sights():
        seen.append(one)
        if sum(len(s[0]) for s in seen) >= given.passes:
            break
    print(f"{sum(len(s[0]) for s in seen)} passes")
    for name, row in outcomes(seen).items():
        print(
            f"{name:28s} {row['collisions']:6.1f} collisions per 1,000, {row['lost']:.2f} m lost, "
            f"mean margin {row['margin']:.2f} m"
        )


if __name__ == "__main__":
    main()
