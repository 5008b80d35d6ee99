"""The kernels, in Triton's interpreter: no GPU needed, but Triton is. TRITON_INTERPRET=1 python -m pytest tests/predict/cuda/test_fused.py

On a GPU, benchmarks/gpu_checks.py compares them as they are used.
"""

from __future__ import annotations

import os

import pytest
import torch

from boxcov.predict.cuda import fused

pytest.importorskip("triton", reason="Triton comes with torch for GPUs alone")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set"
)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(fused, "usable", lambda x: True)


@pytest.mark.parametrize(("T", "boxes"), [(25, 2), (9, 3), (28, 1)])
def test_grams(T: int, boxes: int) -> None:
    torch.manual_seed(0)
    alpha = torch.randn(boxes * T + 1, 150)
    columns = torch.randn(3, 70), torch.randn(1, 33), None
    bands = tuple((slice(*at), c) for at, c in zip(((0, 70), (70, 103), (103, 150)), columns))
    found = fused.grams(alpha, bands, boxes, T)
    own = alpha[:-1].view(boxes, T, 150)
    expected = [
        torch.einsum(
            "btq,q,buq->btu",
            own[..., q],
            torch.ones(q.stop - q.start) if c is None else c[s],
            own[..., q],
        )
        for q, c in bands
        for s in range(1 if c is None else len(c))
    ]
    torch.testing.assert_close(found, torch.stack(expected, 1).flatten(2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("G", "B", "n", "T", "c", "p", "S"),
    [(1, 1, 3, 25, 10, 6, 12), (2, 3, 4, 9, 4, 5, 3), (2, 1, 300, 9, 3, 2, 1)],
)
def test_contractions(G: int, B: int, n: int, T: int, c: int, p: int, S: int) -> None:
    torch.manual_seed(0)
    half = torch.randn(7, S, T, T)
    grams = half @ half.transpose(2, 3)
    index = torch.randint(7, (G, n))
    rows, delta = torch.rand(G, B, p, S), torch.randn(G, B, c, n, T, p)
    found = fused.contracted(grams.flatten(2), index, rows, delta)
    K = torch.einsum("gbps,gnstu->gbnptu", rows, grams[index])
    expected = torch.einsum("gbcntp,gbnptu,gbdnup->gbncd", delta, K, delta)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3 * float(expected.abs().max()))


def test_what_cannot_be_built_is_done_without(monkeypatch) -> None:
    monkeypatch.setattr(fused, "_fused", fused._Fused())
    monkeypatch.setattr(
        fused, "_kernels", lambda: (_ for _ in ()).throw(RuntimeError("Failed to find C compiler"))
    )
    with pytest.warns(
        match="Triton cannot build kernels here .Failed to find C compiler.*ordinary products"
    ):
        assert fused.grams(torch.randn(10, 4), ((slice(0, 4), None),), 1, 9) is None
    assert not fused._fused.usable
