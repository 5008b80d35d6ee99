"""Weights of the losses of frames."""

from __future__ import annotations

import torch

from boxcov.kfac.losses import most_frames


def test_frames_are_counted_where_the_inputs_tell() -> None:
    images, cloud_, other = torch.zeros(4, 3, 8, 8), torch.zeros(900, 5), torch.zeros(4, 2)
    assert most_frames(images, None) == 4
    assert most_frames([cloud_], [{}]) == 1
    assert most_frames([images, other], None) is None  # parts of one input, or frames
