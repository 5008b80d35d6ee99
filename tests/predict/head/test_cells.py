"""Boxes in groups of one kind each, and products of the inputs of their windows."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from boxcov.predict.head.cells import group_in_blocks
from boxcov.predict.head.covariance import window_products


def test_rows_of_a_block_have_one_kind() -> None:
    head = SimpleNamespace(n_kinds=2, branches_of=lambda kinds: kinds)
    group = group_in_blocks(torch.tensor([1, 0, 1, 1]), head, size=2)
    assert group.stages.tolist() == [0, 1, 1, 1]
    assert group.members.tolist() == [[1, 4], [0, 2], [3, 4], [4, 4]]  # 4 is padding


def test_products_of_inputs_from_those_of_rows() -> None:
    rows = torch.randn(40, 6, dtype=torch.float64)
    windows = torch.randint(40, (3, 49))
    inputs = rows[windows].view(3, 7, 7, 6).unfold(1, 3, 1).unfold(2, 3, 1)
    inputs = inputs.flatten(3).flatten(1, 2)  # (3, 25, 54)
    assert torch.allclose(window_products(rows, windows, 25), inputs @ inputs.mT)
