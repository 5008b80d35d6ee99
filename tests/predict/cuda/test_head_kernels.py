"""The Triton kernels of the exact covariance against plain torch.

They run on a GPU, or on a CPU by Triton's interpreter: ``TRITON_INTERPRET=1 pytest ...``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import boxcov
from boxcov.predict.cuda import head_kernels as kernels
from boxcov.predict.engine_options import EngineOptions
from boxcov.predict.head import weight_stacks, weights
from boxcov.predict.head.cells import fold_gradients
from helpers.deep_head import head_on
from oracles.dense import relative

pytest.importorskip("triton", reason="Triton comes with the CUDA builds of torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or TRITON_INTERPRET=1",
)
CLOSE = 1e-6


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.mark.parametrize(("rows", "S", "n"), [(9, 3, 70), (25, 2, 130), (28, 1, 5)])
def test_gram_matrices_of_columns(rows: int, S: int, n: int) -> None:
    m = 4
    alpha, h = random(m * rows + 1, n), random(S, n).abs()
    columns = torch.tensor([[0, n // 2], [n // 2, n], [1, n]][:S], dtype=torch.int32)
    found = kernels.gram_matrices(alpha, h, columns.to(DEVICE), rows)
    expected = torch.zeros(m, S, rows, rows, dtype=torch.float64)
    for s, (start, stop) in enumerate(columns.tolist()):
        own = alpha[:-1].view(m, rows, n)[:, :, start:stop].double().cpu()
        expected[:, s] = (own * h[s, start:stop].double().cpu()) @ own.mT
    assert relative(found.cpu().view_as(expected), expected) < CLOSE


@pytest.mark.parametrize(("rows", "T", "c", "P"), [(9, 9, 3, 20), (28, 25, 10, 16), (12, 9, 4, 1)])
def test_quadratic_forms_leave_out_padding(rows: int, T: int, c: int, P: int) -> None:
    m, S, G, B, n = 4, 3, 2, 3, 3
    grams, F, delta = random(m, S, rows * rows), random(G, B, P, S), random(G, B, c, n, T, P)
    box_of = torch.tensor([[3, 0, m], [1, m, 2]])  # m is padding
    found = kernels.quadratic_forms(grams, F, delta, box_of.to(DEVICE)).double().cpu()
    own = torch.cat([grams, torch.zeros_like(grams[:1])]).cpu().double()
    own = own.view(m + 1, S, rows, rows)[box_of][..., :T, :T]
    K = torch.einsum("gbps,gnstu->gbnptu", F.double().cpu(), own)
    d = delta.double().cpu()
    expected = torch.einsum("gbcntp,gbnptu,gbdnup->gbncd", d, K, d)
    assert relative(found, (expected + expected.mT) / 2) < CLOSE
    assert not found[0, :, 2].any()


@pytest.mark.parametrize(
    ("C", "n_out", "k", "side"), [(7, 5, 3, 3), (64, 64, 3, 3), (16, 70, 3, 1), (8, 8, 1, 3)]
)
def test_gradients_at_the_input_of_a_convolution(C: int, n_out: int, k: int, side: int) -> None:
    G, B, c, n, m = 2, 3, 2, 5, 7
    d, W = random(G, B, c, n, side * side, n_out), random(G, B, k * k * C + 3, n_out)
    W = W[:, :, :-3]  # as without the 1 of a bias and what pads it
    output_index = torch.tensor([0, 2, 3, 5], device=DEVICE)
    members = torch.tensor([[2, 3, 6, 7, 7], [0, 1, 4, 5, 7]], device=DEVICE)
    found = kernels.convolve_back(d, W, k, output_index, members, m)
    own = d.flatten(1, 2)[:, output_index].double().cpu()
    taps = own.flatten(2, 3) @ W[:, output_index // c].mT.double().cpu()
    taps = taps.view(*own.shape[:3], side, side, k * k, C)
    expected = fold_gradients(taps).transpose(0, 1).flatten(1, 2)
    slot = [members.flatten().tolist().index(box) for box in range(m)]
    assert relative(found.cpu(), expected[:, slot]) < CLOSE


def test_projection_reads_the_weights_of_a_kind() -> None:
    x, U, kinds = random(3, 2, 20, 70), random(2, 2, 70, 90), torch.tensor([1, 0, 1])
    found = kernels.project(x, U, kinds.to(DEVICE))
    assert relative(found.cpu(), x.cpu().double() @ U.cpu().double()[kinds]) < CLOSE


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Memory is filled with NaN, so that what is read of it without being written shows."""
    torch.use_deterministic_algorithms(DEVICE == "cpu")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("stem", "chain", "loss"),
    [([3], [3, 1], 0.0), ([3], [3, 3], 0.1), ([1], [1, 3, 3], 0.0), ([5], [1], 0.1)],
)
@pytest.mark.usefixtures("nan_memory")
def test_a_head_by_kernels(
    nan_memory: None,
    monkeypatch: pytest.MonkeyPatch,
    stem: list[int],
    chain: list[int],
    loss: float,
) -> None:
    """With padded boxes, against a backward pass."""
    detector = head_on((5, 4), stem, chain).to(DEVICE)
    frames = [(random(2, 8, 5, 4) + i, None) for i in range(2)]
    posterior = boxcov.fit(detector, frames, n_data=100, prior_precision=1.0)
    posterior = posterior.compress(loss) if loss else posterior
    expected = boxcov.GLM(detector, posterior)(frames[0][0]).covariance
    monkeypatch.setattr(weight_stacks, "has_kernels", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(weights, "_WIDEST", 40)
    model = boxcov.ExactGLM(detector, posterior, engine=EngineOptions(cuda_graphs=False))
    engine = model.router.staged_head
    with torch.no_grad():
        point = model.linearized.at(frames[0][0])
        staged = point.shadow.stages(point.raw, point.selection)
        engine._prepare(staged, point.linearized.names, None)
        (found,) = engine._on_gpu(engine.weights, staged, None)
    assert relative(found.cpu(), expected.cpu()) < 1e-4
