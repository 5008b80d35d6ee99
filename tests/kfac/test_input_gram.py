"""Input factors by correlation against unfolding: shapes, strides, dilations and groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from boxcov._torch.layers import Geometry, columns, from_matrix, gram, parse, to_matrix
from boxcov.kfac import input_gram as grams


def unfolded(x: Tensor, geometry: Geometry, has_bias: bool) -> tuple[Tensor, int]:
    a = columns(x, geometry)
    if has_bias:
        a = torch.cat([a, torch.ones_like(a[:, :, :1])], 2)
    return gram(a), a.shape[0] * a.shape[3]


@contextmanager
def as_on_a_gpu(pieces: int) -> Iterator[None]:
    """Lay out pixels as on a GPU, in a given number of pieces."""
    with (
        mock.patch.object(grams, "_is_pixel_major", return_value=True),
        mock.patch.object(grams, "_count_pieces", return_value=pieces),
    ):
        yield


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Tensor, Geometry]:
    n = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    kernel = tuple(draw(st.integers(1, 4 if n < 3 else 2)) for _ in range(n))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(n))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(n))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
    groups = draw(st.sampled_from([1, 2, 4]))
    sizes = [draw(st.integers(max(1, r + 1), r + 9)) for r in reach]
    x = torch.randn(draw(st.integers(1, 3)), 4, *sizes, dtype=torch.float64)
    if transposed:
        padding = [draw(st.integers(0, r // 2)) for r in reach]
        extra = [draw(st.integers(0, s - 1)) for s in stride]
        rest = {
            "stride": stride,
            "padding": padding,
            "output_padding": extra,
            "groups": groups,
            "dilation": dilation,
        }
        call = parse(
            torch.conv_transpose1d
            if n == 1
            else torch.conv_transpose2d
            if n == 2
            else torch.conv_transpose3d,
            (x, _weight(4, 2, kernel)),
            rest,
        )
    else:
        padding = [draw(st.integers(0, r + 1)) for r in reach]
        rest = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        call = parse(
            (torch.conv1d, torch.conv2d, torch.conv3d)[n - 1],
            (x, _weight(4, 4 // groups, kernel)),
            rest,
        )
    assert call is not None
    return x, call.geometry


def _weight(out: int, inputs: int, kernel: tuple[int, ...]) -> Tensor:
    return torch.randn(out, inputs, *kernel, dtype=torch.float64)


@settings(max_examples=150, deadline=None)
@given(convolutions(), st.booleans())
def test_input_gram_equals_unfolding(case: tuple[Tensor, Geometry], has_bias: bool) -> None:
    x, geometry = case
    Q = grams.input_grams([x], geometry, has_bias)[0]
    expected, _ = unfolded(x, geometry, has_bias)
    assert torch.allclose(Q, expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=150, deadline=None)
@given(convolutions())
def test_correlation_equals_unfolding_wherever_it_is_possible(
    case: tuple[Tensor, Geometry],
) -> None:
    """Also where unfolding is cheaper, so that small maps test the border."""
    x, geometry = case
    strided = any(s != 1 for s in geometry.stride) and not geometry.transposed
    if strided or any(p > r for pair, r in zip(geometry.padding, geometry.reach) for p in pair):
        return
    Q, total = grams._by_correlation([x], geometry)
    a = columns(x, geometry)
    assert torch.allclose(Q, gram(a), rtol=1e-10, atol=1e-10)
    assert torch.allclose(total, a.sum((0, 3)), rtol=1e-10, atol=1e-10)


@settings(max_examples=100, deadline=None)
@given(convolutions(), st.booleans(), st.integers(1, 3), st.integers(1, 4))
def test_inputs_of_one_shape_together(
    case: tuple[Tensor, Geometry], has_bias: bool, count: int, pieces: int
) -> None:
    """Laid out as on a GPU, in several pieces, also where unfolding is cheaper."""
    x, geometry = case
    xs = [x + i for i in range(count)]
    possible = not (any(s != 1 for s in geometry.stride) and not geometry.transposed)
    possible &= all(p <= r for pair, r in zip(geometry.padding, geometry.reach) for p in pair)
    with (
        mock.patch.object(grams, "_correlates", return_value=possible),
        as_on_a_gpu(pieces),
    ):
        found = grams.input_grams(xs, geometry, has_bias)
    for Q, x in zip(found, xs, strict=True):
        assert torch.allclose(Q, unfolded(x, geometry, has_bias)[0], rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("pieces", [1, 8])
def test_a_large_map_as_on_a_gpu(pieces: int) -> None:
    x = (torch.randn(3, 8, 40, 40).relu() + 3).contiguous(memory_format=torch.channels_last)
    geometry = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    with as_on_a_gpu(pieces):
        (Q,) = grams.input_grams([x], geometry, True)
    expected, _ = unfolded(x.double(), geometry, True)
    assert float((Q - expected).norm() / expected.norm()) < 5e-6  # by the processor's order of sums


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 4), (3, 1, 4), (2, 5, 4), (0, 1, 4), (2, 0, 4)])
def test_linear_inputs_together(shape: tuple[int, ...], has_bias: bool) -> None:
    xs = list(torch.randn(3, *shape, dtype=torch.float64))
    for Q, x in zip(grams.input_grams(xs, Geometry(), has_bias), xs, strict=True):
        assert torch.allclose(Q, unfolded(x, Geometry(), has_bias)[0])


@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_a_nan_stays_in_its_own_group(pieces: int) -> None:
    geometry = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), groups=2)
    xs = [torch.randn(2, 4, 9, 9) for _ in range(3)]
    xs[1][0, :2] = torch.nan  # the first pixels of a group, which shifts of the one before reach
    with (
        mock.patch.object(grams, "_correlates", return_value=True),
        as_on_a_gpu(pieces),
    ):
        found = grams.input_grams(xs, geometry, has_bias=True)
    assert found.isnan().any(dim=(2, 3)).tolist() == [[False] * 2, [True, False], [False] * 2]


def test_long_sums_are_cut_on_a_gpu_alone() -> None:
    gpu = torch.device("cuda")
    assert grams._count_pieces(gpu, 36, 64, 129) == 29
    assert grams._count_pieces(gpu, 1, 384, 129) == 29
    assert grams._count_pieces(gpu, 1, 384, 8) == 8  # shorter pieces would be mostly margin
    assert grams._count_pieces(gpu, 1, 384, 0) == 1
    assert grams._count_pieces(torch.device("cpu"), 36, 64, 129) == 1


@pytest.mark.parametrize(
    "shape",
    [
        (2, 1, 1, 9000),
        (2, 3, 4, 9000),
        (1, 2, 5, 3000),
        (40, 2, 6, 2),
        (1, 1, 7, 3),
        (0, 1, 6, 3),
        (2, 1, 6, 0),
    ],
)
def test_grams_of_every_shape(shape: tuple[int, ...]) -> None:
    vectors = torch.randn(shape).abs()
    expected = torch.einsum("bgnt,bgmt->gnm", vectors.double(), vectors.double())
    assert gram(vectors).shape == expected.shape
    assert float((gram(vectors) - expected).norm()) <= 1e-6 * float(expected.norm())


def test_a_large_map_is_correlated_and_a_strided_one_unfolded() -> None:
    x = torch.randn(1, 4, 64, 64)
    same = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    assert grams._correlates(x, same)
    assert not grams._correlates(x, Geometry((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)))
    assert not grams._correlates(x, Geometry((1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)))
    assert not grams._correlates(x[:, :, :4, :4], same)


def test_float32_loses_no_more_than_rounding() -> None:
    # a large mean, as after a ReLU, makes the correction at the border large
    x = torch.randn(2, 8, 40, 40).relu() + 3
    geometry = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    Q = grams.input_grams([x], geometry, True)[0]
    expected, _ = unfolded(x.double(), geometry, True)
    assert float((Q - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("transposed", [False, True])
@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
    st.integers(0, 2),
)
def test_matrices_and_weights_are_the_same_numbers(
    transposed: bool, out: int, inputs: int, groups: int, has_bias: bool, lead: int
) -> None:
    geometry = Geometry((2, 3), groups=groups, transposed=transposed)
    shape = (groups * inputs, out, 2, 3) if transposed else (groups * out, inputs, 2, 3)
    front = (5,) * lead
    weight, bias = (
        torch.randn(*front, *shape),
        torch.randn(*front, groups * out) if has_bias else None,
    )
    matrix = to_matrix(weight, bias, geometry)
    assert matrix.shape == (*front, groups, out, inputs * 6 + has_bias)
    again, other = from_matrix(matrix, torch.Size(shape), has_bias, geometry)
    assert torch.equal(again, weight)
    assert other is None if bias is None else torch.equal(other, bias)
