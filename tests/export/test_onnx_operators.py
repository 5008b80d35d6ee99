"""Every operation that may be in a graph, in onnxruntime against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov import BoxcovError
from boxcov.export.onnx.builder import OPSET, TYPES, Builder
from boxcov.export.onnx.operators import OPERATORS
from boxcov.export.onnx.trace import traced

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

X = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
WHOLE = torch.tensor([[-7, -3, 0], [4, 9, 2]])
W = torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(1))
V = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(2))
ROW, COLUMN = torch.tensor([0, 2, -1]), torch.tensor([4, -5, 1])


def by_onnx(run, x: Tensor) -> list[Tensor]:
    """What ``run`` gives through the graph."""
    helper = onnx.helper
    builder = Builder()
    expected = run(x)
    names = builder.add(traced(run, x), OPERATORS, ["x"])
    nodes, constants = builder.used(names)
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", TYPES[x.dtype], list(x.shape))],
        [
            helper.make_tensor_value_info(name, TYPES[value.dtype], list(value.shape))
            for name, value in zip(names, expected)
        ],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    session = runtime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return [torch.from_numpy(value) for value in session.run(None, {"x": x.numpy()})]


def written_in_place(x: Tensor) -> tuple[Tensor, ...]:
    out = x.clone()
    out[:, 1] = 0
    out[:, :, 1:3] += 1
    out[0, 0, -1] = x[0, 0, 0]
    out[:, torch.tensor([0, 2])] = 5.0
    return (out,)


def batched(x: Tensor) -> tuple[Tensor, ...]:
    one = lambda eta: torch.func.jvp(lambda w: F.conv2d(x, w, padding=1).sigmoid(), (W,), (eta,))[1]  # noqa: E731
    return (torch.vmap(one)(torch.stack([W.flip(0), W * 2])),)


def backwards(x: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = F.silu(F.conv2d(x, W, stride=2, padding=1)).square().sum((1, 2, 3))
        return torch.autograd.grad(out.sum(), x)


FLOATS = {
    "arithmetic": lambda x: (
        x + 1,
        2 - x,
        x * x,
        x / 3,
        -x,
        x**2,
        x**3,
        (x.abs() + 1) ** 0.5,
        torch.add(x, x, alpha=3),
    ),
    "functions": lambda x: (
        x.exp(),
        x.abs().log(),
        x.sigmoid(),
        x.tanh(),
        x.relu(),
        x.sin(),
        x.cos(),
        F.silu(x),
        x.sign(),
    ),
    "small ones": lambda x: (
        torch.log1p(x.exp()),
        torch.expm1(x),
        x.abs().add(1).rsqrt(),
        x.reciprocal(),
        F.logsigmoid(x),
        F.softplus(x),
    ),
    "whole parts": lambda x: (
        x.floor(),
        x.ceil(),
        x // 0.3,
        x % 0.3,
        torch.div(x, 0.7, rounding_mode="floor"),
    ),
    "limits": lambda x: (
        x.clamp(-0.5, 0.5),
        x.clamp(min=0),
        x.clamp(max=x.flip(0)),
        torch.maximum(x, x.flip(1)),
        torch.minimum(x, -x),
    ),
    "comparisons": lambda x: (
        x > 0,
        x >= 0.5,
        x < x.flip(0),
        x <= 0,
        x == x,
        x != 0,
        ~(x > 0),
        (x > 0) & (x < 1),
        (x > 0) | (x < -1),
    ),
    "masks": lambda x: (
        torch.where(x > 0, x, 0),
        x.masked_fill(x > 0, 7.0),
        (x > 0).float(),
        (x > 0).all(1),
        (x > 0).any(),
        (x > 0) * x,
    ),
    "angles": lambda x: (
        torch.atan2(x, x.flip(0)),
        torch.atan2(x, torch.zeros_like(x)),
        torch.atan2(torch.zeros_like(x), x),
    ),
    "sums": lambda x: (
        x.sum(),
        x.sum(1),
        x.mean((2, 3), keepdim=True),
        x.amax(3),
        x.amin((0, 1)),
        x.prod(2),
        x.norm(dim=1),
        x.cumsum(2),
    ),
    "ranks": lambda x: (*x.topk(2, 1), *x.max(2), x.argmax(3), *x.flatten().topk(7), x.argmax()),
    "views": lambda x: (
        x.view(6, -1),
        x.permute(3, 0, 2, 1),
        x.transpose(1, -1),
        x.unsqueeze(0),
        x[:, :1].squeeze(1),
        x.flatten(1),
    ),
    "parts": lambda x: (
        x[:, 1:],
        x[..., ::2],
        x[1],
        *x.unbind(1),
        *x.split([1, 2], 1),
        *x.split(2, 3),
        *x.chunk(2, 2),
        x[:, :, -2:],
    ),
    "together": lambda x: (
        torch.cat([x, x[:, :1]], 1),
        torch.stack([x, -x], 2),
        x.expand(2, 3, 4, 5),
        x[:1].expand(3, 3, 4, 5),
    ),
    "windows": lambda x: (
        x.unfold(2, 3, 1),
        x.unfold(3, 2, 3).unfold(2, 2, 1),
        x.roll(1, 2),
        F.pad(x, (1, 0, 2, 1)),
        F.pad(x, (1, 1), value=3),
    ),
    "indices": lambda x: (
        x[:, ROW],
        x[:, ROW, :, COLUMN],
        x[:, :, ROW, COLUMN],
        x[:, :, ROW[:, None], COLUMN],
        x.index_select(3, COLUMN.abs() % 5),
    ),
    "triangles": lambda x: (
        x.triu(1),
        x.tril(),
        torch.diag_embed(x[0, 0]),
        x.diagonal(dim1=2, dim2=3),
    ),
    "in place": written_in_place,
    "products": lambda x: (
        x[0] @ x[0].transpose(1, 2),
        x @ x.transpose(2, 3),
        x[0, 0] @ x[0, 0].T,
        F.linear(x[0], W[:2, 0, :1, :1].flatten(1).expand(2, 5)),
    ),
    "convolutions": lambda x: (
        F.conv2d(x, W, W[:, 0, 0, 0], padding=1),
        F.conv2d(x, W, stride=2, dilation=1),
        F.conv2d(x, W[:3, :1], groups=3),
    ),
    "transposed": lambda x: (
        F.conv_transpose2d(x, V, stride=2),
        F.conv_transpose2d(x, V, stride=3, padding=1, output_padding=2),
    ),
    "pools": lambda x: (
        F.max_pool2d(x, 3, 1, 1),
        F.max_pool2d(x, 2),
        F.interpolate(x, scale_factor=2.0, mode="nearest"),
    ),
    "norms": lambda x: (
        F.batch_norm(x, V[:, 0, 0, 0], V[:, 0, 0, 1].abs(), V[:, 1, 0, 0], V[:, 1, 0, 1], eps=1e-3),
    ),
    "directions": batched,
    "gradients": backwards,
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str) -> None:
    run = FLOATS[name]
    for number, (own, theirs) in enumerate(zip(run(X), by_onnx(run, X))):
        assert own.dtype == theirs.dtype
        torch.testing.assert_close(
            theirs,
            own,
            rtol=1e-4,
            atol=2e-5,
            msg=lambda text, n=number: f"{name}, output {n}: {text}",
        )


INTEGERS = {
    "arithmetic": lambda x: (
        x + 1,
        x * x,
        x - 3,
        x // 2,
        x % 4,
        x // -2,
        x % -4,
        x.clamp(min=0),
        x.cumsum(1),
        x.sum(),
        -x,
    ),
    "floor": lambda x: (
        torch.div(x, 4, rounding_mode="floor"),
        x / 2,
        x.float() * 0.5,
        x > 1.5,
        x == 4,
    ),
    "indices": lambda x: (
        X[0, 0][x % 4, x % 5],
        X[:, x % 3],
        X[0][x.flatten() % 3, :, x.flatten() % 5],
        torch.arange(20)[x + 7],
    ),
    "chosen": lambda x: (X[0, 0].gather(0, x % 4), X[0, 0].index_select(1, x.flatten() % 5)),
    "scattered": lambda x: (
        torch.zeros(8).scatter(0, x.flatten() % 8, X.flatten()[:6]),
        torch.zeros(3, 2, dtype=torch.long).scatter_add(0, x.T % 3, x.T),
        torch.zeros(2, 3).scatter(1, x % 3, 4.0),
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_whole_numbers(name: str) -> None:
    run = INTEGERS[name]
    for own, theirs in zip(run(WHOLE), by_onnx(run, WHOLE)):
        assert own.dtype == theirs.dtype
        torch.testing.assert_close(theirs, own)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: (torch.linalg.inv(x[0, 0, :, :4]),), "which boxcov cannot write to ONNX"),
        (lambda x: (x.norm(1, dim=1),), "a norm of order 1"),
        (lambda x: (F.batch_norm(x, None, None, training=True),), "BatchNorm in train mode"),
    ],
    ids=["unknown", "norm", "training"],
)
def test_what_cannot_be_written_is_named(run, message: str) -> None:
    with pytest.raises(BoxcovError, match=message):
        by_onnx(run, X)
