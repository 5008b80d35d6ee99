"""Weights of the losses of frames."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from boxcov import BoxcovError, FitOptions, fit
from boxcov.data import batched, shapes
from boxcov.detectors.centerpoint.loss import box_losses, heat_losses
from boxcov.detectors.tiny import TinyCenter
from boxcov.kfac.losses import most_frames
from helpers.centerpoint_cases import cloud, detector_of, pillar_config, target, task_targets
from helpers.nets import NetDetector
from oracles.dense import relative


class Undivided(TinyCenter):
    """The loss of the reference detector without its normaliser."""

    def loss(self, raw, targets) -> Tensor:
        if not hasattr(targets, "mask"):
            targets = self.encode(targets, raw["heatmap"])
        return super().loss(raw, targets) * targets.mask.sum((1, 2)).clamp(min=1)


def cells(targets: list[dict[str, Tensor]]) -> Tensor:
    return (
        TinyCenter()
        .encode(targets, torch.zeros(len(targets), 2, 32, 32))
        .mask.sum((1, 2))
        .clamp(min=1)
    )


@pytest.mark.parametrize("options", [{}, {"locations": "gradient"}, {"ekfac": True}], ids=str)
def test_weights_undo_a_normaliser(options: dict) -> None:
    frames = batched(shapes.frames(count=6, seed=2), 3)
    assert len({float(n) for _, targets in frames for n in cells(targets)}) > 1
    weighed = fit(TinyCenter(), frames, options=FitOptions(frame_weight=cells, **options))
    expected = fit(Undivided(), frames, options=FitOptions(**options))
    assert weighed.loss == pytest.approx(expected.loss, rel=1e-6)
    plain = fit(TinyCenter(), frames, options=FitOptions(**options))
    for name, block in expected.blocks.items():
        for found, right, other in (
            (weighed.blocks[name].Q.matrix, block.Q.matrix, None),
            (weighed.blocks[name].H.matrix, block.H.matrix, plain.blocks[name].H.matrix),
        ):
            assert relative(found, right) < 1e-4
            assert other is None or relative(other, right) > 0.1
        trace = float(weighed.blocks[name].curvature.sum())
        assert trace == pytest.approx(float(block.curvature.sum()), rel=1e-4)


def test_weights_of_drawn_targets_are_those_of_the_loss() -> None:
    frames = [(inputs, None) for inputs, _ in shapes.frames(count=3)]
    seen = []

    def weight(targets) -> Tensor:
        seen.append(targets)
        return targets.mask.sum((1, 2)).clamp(min=1)

    weighed, expected = (
        fit(TinyCenter(), frames, options=FitOptions(frame_weight=weight), fisher="mc"),
        fit(Undivided(), frames, fisher="mc"),
    )
    assert len(seen) == 3
    assert all(
        relative(weighed.blocks[name].H.matrix, block.H.matrix) < 1e-4
        for name, block in expected.blocks.items()
    )


def test_a_weight_of_0_leaves_a_frame_out_of_h_alone() -> None:
    torch.manual_seed(0)
    detector = NetDetector(nn.Conv2d(2, 2, 1)).double()
    x, y = torch.randn(4, 2, 5, 5, dtype=torch.float64), torch.randn(4, 2, 25, dtype=torch.float64)
    half = fit(detector, [(x, y)], options=FitOptions(frame_weight=lambda _: [1.0, 1.0, 0.0, 0.0]))
    alone = fit(detector, [(x[:2], y[:2])])
    assert relative(2 * half.blocks["net"].H.matrix, alone.blocks["net"].H.matrix) < 1e-12
    assert half.frames == 4


@pytest.mark.parametrize(
    "given", [[1.0], [1.0, float("nan")], [1.0, -1.0], 2.0, [[1.0], [1.0]]], ids=str
)
def test_bad_weights_are_named(given) -> None:
    detector = NetDetector(nn.Conv2d(2, 2, 1))
    with pytest.raises(
        BoxcovError,
        match="frame_weight must return a finite number of at least 0 for each of the 2 frames "
        "of item 0, got",
    ):
        fit(
            detector,
            [(torch.randn(2, 2, 5, 5), torch.randn(2, 2, 25))],
            options=FitOptions(frame_weight=lambda _: given),
        )


# CenterPoint's objects


@pytest.mark.parametrize("positives", ["objects", "peaks"])
def test_no_normaliser_is_every_task_times_its_own_number(positives: str) -> None:
    config = pillar_config(tasks=(("car",), ("truck", "bus"), ("barrier",)))
    detector = detector_of(
        replace(config, loss=replace(config.loss, positives=positives, normaliser="max"))
    )
    # the last task has no object
    few = {
        "boxes": target(config)["boxes"][:3],
        "labels": torch.tensor([0, 1, 1]),
    }
    with torch.no_grad():
        raw = detector([cloud(config, 0), cloud(config, 1)])
        encoded = detector.encode([target(config, 1, each=3), few], raw["tasks"][0]["heatmap"])
        heat = heat_losses(raw["tasks"], encoded, detector.config.loss)
        box = box_losses(raw["tasks"], encoded, detector.config)
        expected = 0
        for t, task in enumerate(task_targets(encoded)):
            objects = torch.bincount(task.frame, minlength=2).clamp(min=1)
            peaks = (task.heat == 1).sum((1, 2, 3)).clamp(min=1)
            count = objects if positives == "objects" else peaks
            expected = expected + heat[t] * count + box[t] * objects
        divided = detector.loss(raw, encoded)
        detector.config = replace(
            detector.config, loss=replace(detector.config.loss, normaliser="none")
        )
        assert torch.allclose(detector.loss(raw, encoded), expected)
        assert not torch.allclose(divided, expected)


def test_weights_undo_the_normaliser_of_one_task() -> None:
    config = pillar_config(tasks=(("car", "truck"),))
    detector = detector_of(config)
    frames = [([cloud(config, i)], [target(config, i, each=i + 1)]) for i in range(2)]
    inputs = frames[0][0] + frames[1][0]
    targets = frames[0][1] + frames[1][1]
    raw = detector(inputs)
    losses = detector.loss(raw, targets)
    options = FitOptions(frame_weight=lambda t: torch.tensor([float(len(x["labels"])) for x in t]))
    posterior = fit(detector, [(inputs, targets)], options=options)
    assert posterior.loss == pytest.approx(
        float((losses.detach() * torch.tensor([2.0, 4.0])).mean()), rel=1e-5
    )


def test_frames_are_counted_where_the_inputs_tell() -> None:
    images, cloud_, other = torch.zeros(4, 3, 8, 8), torch.zeros(900, 5), torch.zeros(4, 2)
    assert most_frames(images, None) == 4
    assert most_frames([cloud_], [{}]) == 1
    assert most_frames([images, other], None) is None  # parts of one input, or frames
