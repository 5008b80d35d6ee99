"""Boxes in groups of one kind each."""

from __future__ import annotations

import torch

from boxcov.predict.head.cells import group_in_blocks


def test_rows_of_a_block_have_one_kind() -> None:
    group = group_in_blocks(torch.tensor([1, 0, 1, 1]), kinds=2, size=2)
    assert torch.as_tensor(group.kinds).tolist() == [0, 1, 1, 1]
    assert group.members.tolist() == [[1, 4], [0, 2], [3, 4], [4, 4]]  # 4 is padding
