"""The Triton kernels of the exact covariance in plain torch: what they read and write, padding too.

With them a pretend GPU runs the code around the kernels, which needs neither Triton nor a GPU. The
kernels themselves are compared with plain torch in ``predict/cuda/test_head_kernels.py``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from boxcov.predict.head import branches, covariance, weight_stacks, weights
from boxcov.predict.head.cells import fold_gradients

NAN = float("nan")


def use_plain_kernels(patch: pytest.MonkeyPatch) -> list[str]:
    """Let all heads in float32 on a GPU use kernels; returns the names of those that are called."""
    called: list[str] = []

    def noted(name: str) -> object:
        def run(*args: object) -> Tensor:
            called.append(name)
            return globals()[f"_{name}"](*args)

        return run

    patch.setattr(weight_stacks, "has_kernels", lambda x: x.is_cuda and x.dtype == torch.float32)
    patch.setattr(weights, "_WIDEST", 40)  # so that wide bands are cut
    patch.setattr(covariance, "gram_kernel", noted("gram_matrices"))
    patch.setattr(covariance, "form_kernel", noted("quadratic_forms"))
    patch.setattr(branches, "form_kernel", noted("quadratic_forms"))
    patch.setattr(branches, "convolve_back", noted("convolve_back"))
    patch.setattr(weights, "project", noted("project"))
    return called


def _gram_matrices(alpha: Tensor, h: Tensor, columns: Tensor, rows: int) -> Tensor:
    number = torch.arange(h.shape[1], device=h.device)
    h = torch.where((number >= columns[:, :1]) & (number < columns[:, 1:]), h, 0)
    m = len(alpha) // rows
    own = alpha[: m * rows, : h.shape[1]].unflatten(0, (m, 1, rows))  # no more columns are read
    return ((own * h.unsqueeze(1)) @ own.mT).flatten(2)


def _quadratic_forms(grams: Tensor, F: Tensor, delta: Tensor, box_of: Tensor) -> Tensor:
    T, rows = delta.shape[4], round(grams.shape[2] ** 0.5)
    own = torch.cat([grams, torch.zeros_like(grams[:1])])[box_of]  # padding has a form of zero
    own = own.unflatten(3, (rows, rows))[..., :T, :T]
    K = torch.einsum("gbps,gnstu->gbnptu", F, own)
    C = torch.einsum("gbcntp,gbnptu,gbdnup->gbncd", delta, K, delta)
    return (C + C.mT) / 2


def _convolve_back(
    d: Tensor, W: Tensor, k: int, output_index: Tensor, members: Tensor, m: int
) -> Tensor:
    side = round(d.shape[4] ** 0.5)
    own = d.flatten(1, 2).index_select(1, output_index)  # (G, R, n, T, n_out)
    taps = own.flatten(2, 3) @ W.index_select(1, output_index // d.shape[2]).mT
    taps = taps.view(*own.shape[:3], side, side, k * k, -1)
    found = fold_gradients(taps).transpose(0, 1).flatten(1, 2)
    # rows of boxes that are no members are not written
    out = found.new_full((len(found), m + 1, *found.shape[2:]), NAN)
    return out.index_copy(1, members.flatten(), found)[:, :m]


def _project(x: Tensor, U: Tensor, kinds: Tensor) -> Tensor:
    return x @ U[kinds]
