"""Traced functions in onnxruntime against torch: derivatives, writes in place, constants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov import BoxcovError
from boxcov.export.onnx.torch_onnx import build_model, missing_operators
from boxcov.export.onnx.trace import trace
from boxcov.export.onnx.value_reads import find_value_reads

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")

Run = Callable[[Tensor], tuple[Tensor, ...]]
X = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
W = torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(1))


def model_of(run: Run) -> bytes:
    names = [f"y{number}" for number in range(len(run(X)))]
    return build_model(trace(run, X), {"x": X}, names, {"key": "value"})


def run_onnx(content: bytes) -> list[Tensor]:
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(value) for value in session.run(None, {"x": X.numpy()})]


def write_in_place(x: Tensor) -> tuple[Tensor, ...]:
    out = x.clone()
    out[:, 1] = 0
    out[:, :, 1:3] += 1
    out[0, 0, -1] = x[0, 0, 0]
    out[:, torch.tensor([0, 2])] = 5.0
    out[..., ::2] *= 3
    out[..., -2:-1] = 4.0
    out[:] += 1
    out[3:] = 2.0  # no rows
    return (out,)


def write_to_empty(x: Tensor) -> tuple[Tensor, ...]:
    out, same = torch.empty(4, 5), torch.arange(20.0).view(4, 5).new_empty(4, 5)
    for rows in (slice(0, 3), slice(3, 4)):
        out[rows], same[rows] = x[0, 0, rows], x[1, 1, rows]
    return out, same


def differentiate_forward(x: Tensor) -> tuple[Tensor, ...]:
    def derivative(eta: Tensor) -> Tensor:
        out: Tensor = torch.func.jvp(lambda w: F.conv2d(x, w, padding=1).sigmoid(), (W,), (eta,))[1]
        return out

    return (torch.vmap(derivative)(torch.stack([W.flip(0), W * 2])),)


def differentiate_backward(x: Tensor) -> tuple[Tensor, ...]:
    """Gradients of strided convolutions: the input is larger than what the kernel covers."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        padded = F.silu(F.conv2d(x, W, stride=2, padding=1)).square()
        groups = F.conv2d(x, W[:3, :1, :2], stride=3, groups=3).square()
        return torch.autograd.grad(padded.sum() + groups.sum(), x)


def use_constants(x: Tensor) -> tuple[Tensor, ...]:
    row = torch.arange(3.0).view(3, 1, 1)
    return (
        x + row.expand(3, 4, 5),
        x * torch.zeros_like(x) + torch.full_like(x, 7),
        x.new_ones(2) + 1,
        torch.where(x > 0, W[0, :, :1, :1].exp(), x),
        torch.cat([x, x.new_zeros(2, 3, 4, 1)], 3),
    )


def use_angles(x: Tensor) -> tuple[Tensor, ...]:
    zero = torch.zeros_like(x)
    return torch.atan2(x, x.flip(0)), torch.atan2(x, zero), torch.atan2(zero, x)


def run_common_layers(x: Tensor) -> tuple[Tensor, ...]:
    """Return layers of other heads and their derivatives along the input."""

    def layers(x: Tensor) -> Tensor:
        y = F.leaky_relu(F.conv_transpose2d(x, W.flip(1)[:3], stride=2), 0.1)
        y = F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=False)
        y = F.hardswish(F.avg_pool2d(F.group_norm(y, 3), 2)) + F.gelu(F.adaptive_avg_pool2d(y, 1))
        y = F.pixel_shuffle(
            F.pad(F.layer_norm(y[:, :2], y.shape[3:]), (1, 1)).repeat(1, 2, 1, 1), 2
        )
        shares = y.flatten(2).softmax(2)
        return (shares @ shares.mT.sigmoid()).cumsum(1) + F.elu(y).amax((2, 3))[..., None]

    return layers(x), torch.func.jvp(layers, (x,), (x.flip(3),))[1]


def differentiate_transposed(x: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        plain = F.conv_transpose2d(x, W[:3], stride=2, padding=1, output_padding=1).square()
        groups = F.conv_transpose2d(x, W[:3, :1], stride=3, dilation=2, groups=3).square()
        return torch.autograd.grad(plain.sum() + groups.sum(), x)


@pytest.mark.parametrize(
    "run",
    [
        run_common_layers,
        differentiate_transposed,
        write_in_place,
        write_to_empty,
        differentiate_forward,
        differentiate_backward,
        use_constants,
        use_angles,
    ],
)
def test_a_graph_agrees_with_torch(run: Run) -> None:
    for output, expected in zip(run_onnx(model_of(run)), run(X), strict=True):
        assert output.dtype == expected.dtype
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=2e-5)


def test_equal_constants_are_stored_once() -> None:
    table = torch.randn(1000, 5, generator=torch.Generator().manual_seed(2))
    wide = torch.ones(4000, 1, 1, 5)
    content = model_of(lambda x: (x @ table.T, (x + wide[:2]) @ table.clone().T, x[:1] * wide))
    assert len(content) < 2 * 4 * table.numel()
    model = onnx.load_from_string(content)
    assert {entry.key: entry.value for entry in model.metadata_props} == {"key": "value"}


def test_more_constants_than_a_file_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boxcov.export.onnx.torch_onnx.LARGEST", 500)
    assert model_of(lambda x: (x + W.flatten()[:5],))
    with pytest.raises(BoxcovError, match="GiB of constants"):
        model_of(lambda x: (x[0, 0, 0, 0] + W,))


def test_no_patterns_are_searched_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took three fifths of an export: each pattern looks at all nodes from every node."""
    from onnxscript import rewriter

    def refuse(self: object, model: object) -> None:
        raise AssertionError("patterns are searched")

    monkeypatch.setattr(rewriter.RewritePass, "call", refuse)
    (found,) = run_onnx(model_of(lambda x: (x.flip(0) * 2 + 0.0,)))
    torch.testing.assert_close(found, X.flip(0) * 2)


def test_uninitialised_memory_is_not_stored() -> None:
    torch.use_deterministic_algorithms(True)  # empty() returns NaN
    try:
        model = onnx.load_from_string(model_of(write_to_empty))
    finally:
        torch.use_deterministic_algorithms(False)
    for constant in model.graph.initializer:
        assert not bool(torch.tensor(onnx.numpy_helper.to_array(constant)).isnan().any())


def test_missing_operators_are_named_all_at_once() -> None:
    graph = trace(lambda x: (torch.linalg.inv(x[0, 0, :, :4]), torch.kthvalue(x, 2).values), X)
    names = ["_linalg_check_errors", "kthvalue", "linalg_inv_ex"]
    assert missing_operators(graph) == [f"aten.{name}.default" for name in names]
    assert missing_operators(trace(run_common_layers, X)) == []
    with pytest.raises(BoxcovError, match=r"torch\.onnx cannot write .*linalg_inv_ex"):
        build_model(graph, {"x": X}, ["y0", "y1"], {})


def test_lines_that_read_values_are_all_found() -> None:
    def read(x: Tensor) -> Tensor:
        written = torch.zeros(5)
        written[1:] = x[0, 0, 0, 1:]
        counts = [
            len(x[x > 0]),
            len((x > 0).nonzero()),
            len(written.tolist()),
            float(x.max()),
            x.numpy().shape[0],
        ]
        if x.sum() > 0:
            counts.append(1)
        torch.arange(3).nonzero(), torch.ones(2).tolist()  # no input
        return torch.where(x > 0, x, 0)[torch.tensor([0])] * sum(counts)

    with find_value_reads([X]) as lines:
        read(X)
    codes = [line.split(" in read: ")[1] for line in lines]
    assert codes == [
        "len(x[x > 0]),",
        "len((x > 0).nonzero()),",
        "len(written.tolist()),",
        "float(x.max()),",
        "x.numpy().shape[0],",
        "if x.sum() > 0:",
    ]
    assert lines[0].startswith("test_torch_onnx.py:")
