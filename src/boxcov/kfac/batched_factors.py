"""The factors of one pass: on a GPU, those of equal form together.

The head of a detector has dozens of layers of the same few shapes, and a GPU takes less time for one of their factors than for being told to
compute it. So inputs of one form wait for each other until the pass is over, and become groups of one product; so do gradients. A CPU gains
nothing by it, and computes each input at once, while it is at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from boxcov._torch.layer_calls import LayerCall
from boxcov._torch.precision import at_least_float32, full_precision
from boxcov._torch.unfold import Geometry, gram
from boxcov.kfac.input_gram import input_grams, room_for

ROOM = 256 * 2**20  # bytes of inputs, or of gradients, that are joined at most


@dataclass(frozen=True)
class Part:
    """What one use adds to a sum, and a number that is finite if all of it is.

    >>> Part.of(torch.ones(1, 3, 3)).total
    tensor(9., dtype=torch.float64)
    """

    sum: Tensor  # (G, n, n)
    total: Tensor  # () float64

    @staticmethod
    def of(sum: Tensor) -> Part:
        return Part(sum, sum.sum(dtype=torch.float64))

    @staticmethod
    def each(sums: Tensor) -> list[Part]:
        """Of several together (n, G, k, k), in the type of what they are added to."""
        sums = sums.double()
        return [Part(*pair) for pair in zip(sums.unbind(), sums.sum((1, 2, 3)).unbind())]


@dataclass(frozen=True)
class _Form:
    """What inputs must have in common to be groups of one product."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    geometry: Geometry
    has_bias: bool


@dataclass(frozen=True)
class _Waiting:
    number: int
    call: LayerCall
    version: int  # of its input

    @property
    def changed(self) -> bool:
        return self.call.x._version != self.version


class Inputs:
    """The sums of ``a a^T`` over the locations of each input of a pass, one for all the layers that read it alike.

    >>> from boxcov._torch.layer_calls import parse
    >>> calls = [parse(torch.nn.functional.linear, (torch.randn(5, 3), torch.randn(2, 3)), {}) for _ in range(4)]
    >>> inputs = Inputs(together=True)
    >>> [inputs.add(call, has_bias=False, may_wait=True) for call in (*calls, calls[0])]
    [0, 1, 2, 3, 0]
    >>> inputs.finish(), [part.sum.shape for part in inputs.parts.values()] == 4 * [(1, 3, 3)]
    (True, True)
    """

    def __init__(self, together: bool) -> None:
        self.together = together
        self.parts: dict[int, Part] = {}  # by number
        self._known: dict[
            Any, tuple[int, Tensor]
        ] = {}  # the tensors are held: no other may get the id of one
        self._waiting: dict[_Form, list[_Waiting]] = {}
        self._over, self._spoiled = False, False

    def add(self, call: LayerCall, has_bias: bool, may_wait: bool) -> int:
        """The number of the factor of the call's input, to be found in ``parts`` after ``finish``.

        An input that autograd keeps as well ``may_wait``: it takes no memory by it, and is not meant to be written to.
        """
        x = call.x
        key = id(x), x._version, call.geometry, has_bias
        if key in self._known:
            return self._known[key][0]
        number = len(self._known)
        self._known[key] = number, x
        form = _Form(x.shape, x.dtype, x.device, call.geometry, has_bias)
        entry = _Waiting(number, call, x._version)
        if not (self.together and may_wait) or self._over:
            self._compute(form, [entry])
            return number
        waiting = self._waiting.setdefault(form, [])
        waiting.append(entry)
        if (len(waiting) + 1) * room_for(call.batched_x, call.geometry) > ROOM:
            self._compute(form, self._waiting.pop(form))
        return number

    def finish(self) -> bool:
        """Compute what waits, and wait no more. False if an input was written to before its turn came: its factor is lost."""
        for form, waiting in self._waiting.items():
            self._compute(form, waiting)
        self._waiting, self._over = {}, True
        return not self._spoiled

    @full_precision
    def _compute(self, form: _Form, waiting: list[_Waiting]) -> None:
        self._spoiled |= any(entry.changed for entry in waiting)
        sums = input_grams(
            [at_least_float32(entry.call.batched_x) for entry in waiting],
            form.geometry,
            form.has_bias,
        )
        parts = Part.each(sums) if self.together else [Part.of(sum) for sum in sums]
        self.parts |= zip((entry.number for entry in waiting), parts)


@full_precision
def output_parts(Ds: Sequence[Tensor], together: bool) -> list[Part]:
    """The sums of ``d d^T`` of each of the gradients (B, G, n_out, T).

    >>> [part.sum.shape for part in output_parts([torch.ones(2, 1, 3, 5), torch.ones(2, 1, 4, 5), torch.ones(2, 1, 3, 5)], together=True)]
    [torch.Size([1, 3, 3]), torch.Size([1, 4, 4]), torch.Size([1, 3, 3])]
    """
    if not together:
        return [Part.of(gram(at_least_float32(D))) for D in Ds]
    forms: dict[Any, list[int]] = {}
    for number, D in enumerate(Ds):
        forms.setdefault((D.shape, D.dtype, D.device), []).append(number)
    found: dict[int, Part] = {}
    for numbers in forms.values():
        for some in _within_room(numbers, Ds[numbers[0]]):
            joined = (
                Ds[some[0]] if len(some) == 1 else torch.cat([Ds[number] for number in some], 1)
            )
            found |= zip(
                some, Part.each(gram(at_least_float32(joined)).unflatten(0, (len(some), -1)))
            )
    return [found[number] for number in range(len(Ds))]


def _within_room(numbers: list[int], like: Tensor) -> Iterator[list[int]]:
    step = max(1, ROOM // max(1, like.numel() * max(4, like.element_size())))
    for start in range(0, len(numbers), step):
        yield numbers[start : start + step]


def add_up(pairs: Iterable[tuple[Tensor, Part]]) -> None:
    """Add each part to its sum, many at a time, but no two to the same sum at the same time.

    >>> total = torch.zeros(1, 2, 2, dtype=torch.float64)
    >>> add_up([(total, Part.of(torch.ones(1, 2, 2))), (total, Part.of(torch.ones(1, 2, 2)))])
    >>> total.sum()
    tensor(8., dtype=torch.float64)
    """
    rounds: list[list[tuple[Tensor, Tensor]]] = []
    met: dict[int, int] = {}
    for total, part in pairs:
        turn = met[id(total)] = met.get(id(total), -1) + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append((total, part.sum))
    for each in rounds:
        torch._foreach_add_([total for total, _ in each], [part for _, part in each])
