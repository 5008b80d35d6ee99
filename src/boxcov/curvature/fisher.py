"""Streaming Kronecker factors of a detector's own training loss.

For one frame with loss L, a layer ``out = W a`` used at T locations has the gradient ``sum over t of d_t a_t^T``, where d_t is the gradient of L
at ``out``. KFAC takes the Fisher, the mean over frames of that gradient's outer product, to be ``Q (x) H`` with

    Q = mean over frames and locations of a a^T,    H = mean over frames of the sum over locations of d d^T.

Q may also be taken over the locations that carry gradient, ``Q = sum of |d|^2 a a^T / sum of |d|^2``, so that ``tr Q tr H`` is exactly the mean over
frames of the sum over locations of ``|a|^2 |d|^2``.

All are sums over everything seen, divided once at the end: neither the size nor the number of the batches matters. Summing the loss over the
frames of a batch gives each frame's own d, because in eval mode frames do not meet inside the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from boxcov.curvature.calls import Call, Watch
from boxcov.curvature.grams import input_gram, weighted_gram
from boxcov.curvature.layers import Geometry, columns, gram, rows, to_matrix
from boxcov.curvature.losses import Losses, Weight
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, NotFiniteFrameError
from boxcov.frozen import check_buffers, listed, versions

P = ParamSpec("P")
R = TypeVar("R")
FisherKind = Literal["empirical", "mc", "identity"]
Locations = Literal["all", "gradient"]


@dataclass(frozen=True)
class Layer:
    """A weight matrix of the posterior: the parameters it is made of, and how."""

    weight: str  # name of the parameter
    bias: str | None
    shape: torch.Size  # of the weight
    geometry: Geometry  # kernel, groups and transposition; the steps may differ from use to use

    @property
    def name(self) -> str:
        return self.weight.removesuffix(".weight")

    @property
    def n_in(self) -> int:
        """Columns of the matrix, the bias among them."""
        inputs = self.shape[0] // self.geometry.groups if self.geometry.transposed else self.shape[1]
        return int(inputs) * self.geometry.taps + (self.bias is not None)

    @property
    def n_out(self) -> int:
        return int(self.shape[1] if self.geometry.transposed else self.shape[0] // self.geometry.groups)


@dataclass
class Sums:
    """What has been seen of one layer: sums in float64, so that the 28,000th frame counts like the first."""

    layer: Layer
    Q: Tensor  # (G, n_in, n_in) sum of a a^T, or of |d|^2 a a^T
    H: Tensor  # (G, n_out, n_out) sum of d d^T
    locations: int = 0
    reached: bool = False  # whether any gradient ever came

    @staticmethod
    def of(layer: Layer, device: torch.device) -> Sums:
        groups = layer.geometry.groups
        Q, H = (torch.zeros(groups, n, n, dtype=torch.float64, device=device) for n in (layer.n_in, layer.n_out))
        return Sums(layer, Q, H)

    def factors(self, frames: int, by_gradient: bool) -> tuple[Tensor, Tensor]:
        """Q and H: the weights |d|^2 of all locations sum up to the trace of H, and a group without any has a Q of 0."""
        H = self.H / frames
        if not by_gradient:
            return self.Q / self.locations, H
        total = self.H.diagonal(dim1=1, dim2=2).sum(1)
        return self.Q / torch.where(total > 0, total, 1)[:, None, None], H


@dataclass(frozen=True)
class _Use:
    """One use of a layer in the pass under way."""

    name: str
    call: Call  # without its tensors once they are no longer needed
    edge: GradientEdge  # where the gradient of the output will pass, before anything changes the output in place


_Seen = tuple[str, Tensor | None, int]  # a use of a layer: its name, the sum of a a^T unless the gradients are to weigh it, the locations
_Reached = tuple[str, Tensor, Tensor | None]  # a use that a gradient reached: its name, the sum of d d^T, and of |d|^2 a a^T if that is Q


class Accumulator:
    """Adds batches to the factors of the chosen parameters; ``layers`` are known after the first one."""

    def __init__(
        self, detector: Detector, chosen: Mapping[str, nn.Parameter], locations: Locations = "all", weight: Weight | None = None
    ) -> None:
        self.chosen = chosen
        self.device = next(iter(chosen.values())).device
        self.by_gradient = locations == "gradient"
        self._losses = Losses(detector, chosen, weight)
        self._aliases = self._losses.aliases
        self._names = {id(alias): name for name, alias in self._aliases.items()}
        self.sums: dict[str, Sums] = {}
        self.frames = 0
        self.loss = 0.0  # sum over frames
        self.torn = False  # whether part of a batch is in the sums

    def restore(self, sums: dict[str, Sums], frames: int, loss: float) -> None:
        """Go on from what an earlier run has counted."""
        self.sums, self.frames, self.loss = sums, frames, loss
        if frames:
            self._check_all_found()

    def discover(self, inputs: Any) -> None:
        """Find the layers without any loss: for the identity."""
        with torch.enable_grad(), self._watching([], [], keep=False):
            self._losses.raw(inputs)
        self._check_all_found()

    def add(self, inputs: Any, targets: Any, generator: torch.Generator | None, batch: int) -> None:
        """One batch: its inputs into Q, the gradients of its frames' losses into H. A ``generator`` draws the targets ("mc").

        It counts whole or not at all: whatever is raised on the way, the sums are those of the batches before.
        """
        first = not self.frames
        seen: list[_Seen] = []
        uses: list[_Use] = []
        buffers = versions(list(self._losses.detector.buffers())) if first else []
        with torch.enable_grad(), self._watching(seen, uses, keep=first or self.by_gradient):
            raw = self._losses.raw(inputs)
            if first:
                self._check_all_found()
            losses = self._losses.of(raw, inputs, targets, generator, batch)
        check_buffers(buffers)
        wanted: list[Any] = [use.edge for use in uses]
        if first:
            wanted += self._aliases.values()
        grads = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        reached = [self._reached(use, at_least_float32(d)) for use, d in zip(uses, grads) if d is not None]
        _check_finite(seen, reached, batch)
        if first:
            self._check_gradients(uses, grads[: len(uses)], dict(zip(self._aliases, grads[len(uses) :])))
        self._commit(seen, reached, losses)

    def _commit(self, seen: list[_Seen], reached: list[_Reached], losses: Tensor) -> None:
        loss = float(losses.detach().double().sum())
        self.torn = True
        for name, Q, locations in seen:
            self.sums[name].locations += locations
            if Q is not None:
                self.sums[name].Q += Q
        for name, H, weighed in reached:
            self.sums[name].H += H
            self.sums[name].reached = True
            if weighed is not None:
                self.sums[name].Q += weighed
        self.frames += len(losses)
        self.loss += loss
        self.torn = False

    def _reached(self, use: _Use, d: Tensor) -> _Reached:
        D = rows(use.call.batched_out(d), use.call.geometry)
        if not self.by_gradient:
            return use.name, gram(D), None
        has_bias = self.sums[use.name].layer.bias is not None
        weighed = weighted_gram(at_least_float32(use.call.batched_x), D.square().sum(-2), use.call.geometry, has_bias)
        return use.name, gram(D), weighed

    def _watching(self, seen: list[_Seen], uses: list[_Use], keep: bool) -> Watch:
        """Adds the inputs of every use to ``seen``, and the use to ``uses``, with its input if ``keep``."""
        grams: dict[Any, tuple[Tensor, tuple[Tensor, int]]] = {}  # layers that read the same tensor share one Q

        def run(name: str, call: Call) -> Tensor:
            out = call()
            sums = self._sums(name, call)
            if self.by_gradient:
                seen.append((name, None, out.numel() // (sums.layer.geometry.groups * sums.layer.n_out)))
            else:
                key = (id(call.x), call.x._version, call.geometry, sums.layer.bias is not None)
                if key not in grams:
                    grams[key] = call.x, input_gram(at_least_float32(call.batched_x), call.geometry, sums.layer.bias is not None)
                seen.append((name, *grams[key][1]))
            if out.requires_grad:  # not inside the detector's own no_grad
                kept = call if keep else replace(call, x=call.x.new_empty(0))
                uses.append(_Use(name, kept, get_gradient_edge(out)))
            return out

        return Watch(self._names, run)

    def _sums(self, name: str, call: Call) -> Sums:
        bias = None if call.bias is None else self._names.get(id(call.bias))
        if name not in self.sums:
            form = Geometry(call.geometry.kernel, groups=call.geometry.groups, transposed=call.geometry.transposed)
            self.sums[name] = Sums.of(Layer(name, bias, call.weight.shape, form), call.weight.device)
        layer = self.sums[name].layer
        if layer.bias != bias:
            raise BoxcovError(
                f"the weight {name} is used with the bias {layer.bias} and with the bias {bias}: one matrix has one bias; "
                f"leave that module out with fixed=[{layer.name!r}]"
            )
        return self.sums[name]

    def _check_all_found(self) -> None:
        biases = [sums.layer.bias for sums in self.sums.values() if sums.layer.bias is not None]
        twice = sorted({bias for bias in biases if biases.count(bias) > 1})
        lost = [name for name in self.chosen if name not in self.sums and name not in biases]
        if lost or twice:
            raise BoxcovError(_cannot_be_factored(lost, twice))

    def _check_gradients(self, uses: list[_Use], grads: tuple[Tensor | None, ...], whole: dict[str, Tensor | None]) -> None:
        """Whether the uses seen explain the whole gradient of each weight: if not, it is used in a way that is no matrix product."""
        seen: dict[str, Tensor] = {}
        sizes: dict[str, Tensor] = {}  # of what was added up: where it cancels, only rounding is left
        for use, d in zip(uses, grads):
            if d is not None and d.numel():
                a = columns(at_least_float32(use.call.batched_x), use.call.geometry)
                if self.sums[use.name].layer.bias is not None:
                    a = torch.cat([a, torch.ones_like(a[:, :, :1])], 2)
                D = rows(use.call.batched_out(at_least_float32(d)), use.call.geometry)
                part = (D @ a.transpose(-1, -2)).sum(0)
                seen[use.name] = seen[use.name] + part if use.name in seen else part
                size = (D.abs() @ a.abs().transpose(-1, -2)).sum(0)
                sizes[use.name] = sizes[use.name] + size if use.name in sizes else size
        wrong = []
        for name, sums in self.sums.items():
            weight, bias = whole[name], None if sums.layer.bias is None else whole[sums.layer.bias]
            if weight is None and bias is None:
                continue
            expected = self._as_matrix(sums.layer, weight, bias)
            off = expected if name not in seen else seen[name] - expected
            parts = {name: slice(None)} if sums.layer.bias is None else {name: slice(-1), sums.layer.bias: slice(-1, None)}
            slack, size = _slack(expected, self.chosen[name]), sizes.get(name, torch.zeros_like(expected))
            allowed = {
                part: slack * float(expected[..., at].norm()) + 1e-2 * slack * float(size[..., at].norm()) for part, at in parts.items()
            }
            wrong += [part for part, at in parts.items() if float(off[..., at].norm()) > allowed[part]]
        if wrong:
            raise BoxcovError(_cannot_be_factored(wrong, []))

    def _as_matrix(self, layer: Layer, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        weight = torch.zeros_like(self.chosen[layer.weight]) if weight is None else weight
        if bias is None and layer.bias is not None:
            bias = torch.zeros_like(self.chosen[layer.bias])
        return to_matrix(at_least_float32(weight), None if bias is None else at_least_float32(bias), layer.geometry)


def _check_finite(seen: list[_Seen], reached: list[_Reached], batch: int) -> None:
    parts = [(name, Q) for name, Q, _ in seen if Q is not None]
    parts += [(name, part) for name, H, weighed in reached for part in (H, weighed) if part is not None]
    finite = torch.stack([part.sum(dtype=torch.float64) for _, part in parts]).isfinite() if parts else torch.ones(1)
    if not bool(finite.all()):  # one look at the device for all layers
        bad = list(dict.fromkeys(name for (name, _), ok in zip(parts, finite.tolist()) if not ok))
        raise NotFiniteFrameError(f"batch {batch} gives a NaN or infinite input or gradient at {listed(bad)}, though its loss is finite")


def _slack(gradient: Tensor, weight: Tensor) -> float:
    """How far two ways to the same gradient may lie apart: TF32 on a GPU, and half precision, round early."""
    if weight.dtype not in (torch.float32, torch.float64):
        return 0.1
    return 1e-3 if gradient.device.type == "cpu" else 2e-2


def _cannot_be_factored(lost: list[str], twice: list[str]) -> str:
    modules = sorted({name.rpartition(".")[0] or name for name in (*lost, *twice)})
    reasons = []
    if lost:
        reasons.append(f"{listed(lost)} (not, or not only, the weight or bias of a linear layer or convolution)")
    if twice:
        reasons.append(f"{listed(twice)} (the bias of several layers)")
    return (
        f"these parameters cannot be factored: {'; '.join(reasons)}. "
        f"Keep them as constants with fixed={modules!r}, or give depth as a list of module names"
    )


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` outside torch.autocast: matrix products of factors and covariances are no place for half precision.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     full_precision(torch.mm)(torch.eye(2), torch.eye(2)).dtype
    torch.float32
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return run


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision is too coarse for sums of squares.

    >>> at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
