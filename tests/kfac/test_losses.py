"""Weights of the losses of frames."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from boxcov.detectors.centerpoint.loss import box_losses, heat_losses
from boxcov.kfac.losses import most_frames
from helpers.centerpoint_cases import cloud, detector_of, pillar_config, target, task_targets

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


def test_frames_are_counted_where_the_inputs_tell() -> None:
    images, cloud_, other = torch.zeros(4, 3, 8, 8), torch.zeros(900, 5), torch.zeros(4, 2)
    assert most_frames(images, None) == 4
    assert most_frames([cloud_], [{}]) == 1
    assert most_frames([images, other], None) is None  # parts of one input, or frames
