"""The Kronecker factors of the layers: sums over all frames, and the terms that a batch adds.

    Q = mean over frames and locations of a a^T                (n_in, n_in)
    H = mean over frames of the sum over locations of d d^T    (n_out, n_out)

Only Q is divided by the number of locations T ("expand" scaling): dividing both would lose a
factor T. A term is the sum over the locations of one call.

A detector's head has dozens of layers of few shapes, and a GPU needs less time for one of their
products than for its launch. So inputs of equal shape are collected until the pass is over and
become the groups of one product, and so do gradients. A CPU gains nothing from this and computes
each product at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from boxcov._torch.layers import LayerCall, gram
from boxcov._torch.process_state import at_least_float32, full_precision
from boxcov.kfac.input_gram import input_grams, memory_of
from boxcov.posterior.kronecker_block import Eigendecomposition, KroneckerBlock, Layer

MAX_BYTES = 256 * 2**20  # of inputs, or of gradients, in one batched product


@dataclass
class FactorSums:
    """The sums of one layer, in float64 so that late frames are not lost to rounding."""

    layer: Layer
    Q: Tensor  # (G, n_in, n_in) sum of a a^T
    H: Tensor  # (G, n_out, n_out) sum of d d^T
    locations: int = 0
    has_gradient: bool = False  # whether any loss depended on the layer

    @staticmethod
    def zeros(layer: Layer, device: torch.device) -> FactorSums:
        Q, H = (
            torch.zeros(layer.geometry.groups, n, n, dtype=torch.float64, device=device)
            for n in (layer.n_in, layer.n_out)
        )
        return FactorSums(layer, Q, H)

    def identity(self) -> tuple[Tensor, Tensor]:
        """Return identity matrices in place of Q and H, for ``fisher="identity"``."""
        Q, H = (torch.eye(len(M[0]), device=M.device).expand_as(M) for M in (self.Q, self.H))
        return Q, H


def kronecker_blocks(
    factors: Iterable[tuple[Layer, Tensor, Tensor]], parameters: Mapping[str, nn.Parameter]
) -> dict[str, KroneckerBlock]:
    """Decompose the factors ``(layer, Q, H)`` of each layer; equal Q share one decomposition."""
    decomposed: list[tuple[Tensor, Eigendecomposition]] = []
    blocks = {}
    for layer, Q, H in factors:
        weight = parameters[layer.weight].detach()
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        # layers that read the same tensor have bitwise equal Q
        eigen_Q = next((eigen for other, eigen in decomposed if torch.equal(other, Q)), None)
        if eigen_Q is None:
            eigen_Q = Eigendecomposition.of(Q, dtype)
            decomposed.append((Q, eigen_Q))
        own = [parameters[name] for name in (layer.weight, layer.bias) if name is not None]
        square_norm = sum(float(p.detach().double().square().sum()) for p in own)
        eigen_H = Eigendecomposition.of(H, dtype)
        blocks[layer.name] = KroneckerBlock(layer, eigen_Q, eigen_H, square_norm)
    return blocks


# terms of one batch


class InputFactors:
    """The terms of Q of one pass; layers that read the same tensor share one term."""

    def __init__(self, batched: bool) -> None:
        self.batched = batched
        self.terms: dict[int, Tensor] = {}  # (G, n_in, n_in) by number
        # the tensors are kept alive, so that no other tensor gets the id of one of them
        self._numbers: dict[Any, tuple[int, Tensor]] = {}
        # inputs of equal shape, dtype, device, geometry and bias become the groups of one product:
        # the number, the call, and the version of its input when it was added
        self._pending: dict[Any, list[tuple[int, LayerCall, int]]] = {}
        self._is_finished, self._was_changed = False, False

    def add(self, call: LayerCall, has_bias: bool, may_wait: bool) -> int:
        """Return the number of the term of the call's input, a key of ``terms`` after ``finish``.

        may_wait: autograd keeps the input as well, so waiting costs no memory and the detector
            is not supposed to write to it.
        """
        x = call.x
        key = id(x), x._version, call.geometry, has_bias
        if key in self._numbers:
            return self._numbers[key][0]
        number = len(self._numbers)
        self._numbers[key] = number, x
        kind = x.shape, x.dtype, x.device, call.geometry, has_bias
        entry = number, call, x._version
        if not (self.batched and may_wait) or self._is_finished:
            self._compute([entry], has_bias)
            return number
        pending = self._pending.setdefault(kind, [])
        pending.append(entry)
        if (len(pending) + 1) * memory_of(call.batched_x, call.geometry) > MAX_BYTES:
            self._compute(self._pending.pop(kind), has_bias)
        return number

    def finish(self) -> bool:
        """Compute all pending terms; return False if an input was written to in the meantime."""
        for (*_, has_bias), pending in self._pending.items():
            self._compute(pending, has_bias)
        self._pending, self._is_finished = {}, True
        return not self._was_changed

    @full_precision()
    def _compute(self, pending: list[tuple[int, LayerCall, int]], has_bias: bool) -> None:
        numbers, calls, versions = zip(*pending)
        self._was_changed |= any(call.x._version != v for call, v in zip(calls, versions))
        xs = [at_least_float32(call.batched_x) for call in calls]
        values = input_grams(xs, calls[0].geometry, has_bias)
        self.terms |= zip(numbers, values.double() if self.batched else values)


@full_precision()
def output_terms(Ds: Sequence[Tensor], batched: bool) -> list[Tensor]:
    """Return the term of H (G, n_out, n_out) of each of the gradients (B, G, n_out, T)."""
    if not batched:
        return [gram(at_least_float32(D)) for D in Ds]
    kinds: dict[Any, list[int]] = {}
    for number, D in enumerate(Ds):
        kinds.setdefault((D.shape, D.dtype, D.device), []).append(number)
    terms: dict[int, Tensor] = {}
    for numbers in kinds.values():
        like = Ds[numbers[0]]
        step = max(1, MAX_BYTES // max(1, like.numel() * max(4, like.element_size())))
        for start in range(0, len(numbers), step):
            chunk = numbers[start : start + step]
            D = _joined([Ds[n] for n in chunk])
            values = gram(at_least_float32(D)).unflatten(0, (len(chunk), -1))
            terms |= zip(chunk, values.double())
    return [terms[number] for number in range(len(Ds))]


def _joined(Ds: list[Tensor]) -> Tensor:
    """Return gradients (B, G, n_out, T) as the groups of one, in the memory order of the first."""
    if len(Ds) == 1:
        return Ds[0]
    if Ds[0].stride(-2) < Ds[0].stride(-1):  # of maps with channels last: a copy is not a transpose
        return torch.cat([D.transpose(-1, -2) for D in Ds], 1).transpose(-1, -2)
    return torch.cat(Ds, 1)


def add_terms(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add each term to its sum in place, many sums per kernel but each sum once per kernel."""
    rounds: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    counts: Counter[int] = Counter()
    for total, term in pairs:
        totals, values = rounds.setdefault(counts[id(total)], ([], []))
        totals.append(total)
        values.append(term)
        counts[id(total)] += 1
    for totals, values in rounds.values():
        torch._foreach_add_(totals, values)
