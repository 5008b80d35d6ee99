"""Boxes in groups of one kind each."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from boxcov.predict.head.cells import group_in_blocks


def test_rows_of_a_block_have_one_kind() -> None:
    head = SimpleNamespace(n_kinds=2, branches_of=lambda kinds: kinds)
    group = group_in_blocks(torch.tensor([1, 0, 1, 1]), head, size=2)
    assert group.stages.tolist() == [0, 1, 1, 1]
    assert group.members.tolist() == [[1, 4], [0, 2], [3, 4], [4, 4]]  # 4 is padding
