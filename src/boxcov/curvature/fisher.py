"""Streaming Kronecker factors of a detector's own training loss.

For one frame with loss L, a layer ``out = W a`` used at T locations has the gradient ``sum over t of d_t a_t^T``, where d_t is the gradient of L
at ``out``. KFAC takes the Fisher, the mean over frames of that gradient's outer product, to be ``Q (x) H`` with

    Q = mean over frames and locations of a a^T,    H = mean over frames of the sum over locations of d d^T.

Both are sums over everything seen, divided once at the end: neither the size nor the number of the batches matters. Summing the loss over the
frames of a batch gives each frame's own d, because in eval mode frames do not meet inside the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from boxcov.curvature.calls import Call, Watch
from boxcov.curvature.grams import input_gram
from boxcov.curvature.layers import Geometry, columns, gram, rows, to_matrix
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.frozen import listed, shadow

FisherKind = Literal["empirical", "mc", "identity"]


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
    Q: Tensor  # (G, n_in, n_in) sum of a a^T
    H: Tensor  # (G, n_out, n_out) sum of d d^T
    locations: int = 0
    reached: bool = False  # whether any gradient ever came

    @staticmethod
    def of(layer: Layer, device: torch.device) -> Sums:
        groups = layer.geometry.groups
        Q, H = (torch.zeros(groups, n, n, dtype=torch.float64, device=device) for n in (layer.n_in, layer.n_out))
        return Sums(layer, Q, H)


@dataclass(frozen=True)
class _Use:
    """One use of a layer in the pass under way."""

    name: str
    call: Call  # without its tensors once they are no longer needed
    edge: GradientEdge  # where the gradient of the output will pass, before anything changes the output in place


class Accumulator:
    """Adds batches to the factors of the chosen parameters; ``layers`` are known after the first one."""

    def __init__(self, detector: Detector, chosen: Mapping[str, nn.Parameter]) -> None:
        self.chosen = chosen
        # aliases that require a gradient, so that the detector's own flags stay as they are
        self._aliases = {name: nn.Parameter(p.detach()) for name, p in chosen.items()}
        self._detector = shadow(detector, {id(p): self._aliases[name] for name, p in chosen.items()})
        self._names = {id(alias): name for name, alias in self._aliases.items()}
        self.sums: dict[str, Sums] = {}
        self.frames = 0
        self.loss = 0.0  # sum over frames

    def discover(self, inputs: Any) -> None:
        """Find the layers without any loss: for the identity."""
        self._forward(inputs, keep=True)
        self._check_all_found()

    def add(self, inputs: Any, targets: Any, generator: torch.Generator | None, batch: int) -> None:
        """One batch: its inputs into Q, the gradients of its frames' losses into H. A ``generator`` draws the targets ("mc")."""
        first = not self.frames
        with torch.set_grad_enabled(first):  # later passes build no graph before the first chosen layer
            raw, uses = self._forward(inputs, keep=first)
            if first:
                self._check_all_found()
            if generator is not None:
                targets = sampled(self._detector, raw, generator)
            losses = frame_losses(self._detector, raw, targets, batch)
            edges = [use.edge for use in uses]
            wanted: list[Any] = [*edges, *self._aliases.values()] if first else [*edges]
            grads = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        self._add_gradients(uses, grads[: len(uses)], batch)
        if first:
            self._check_gradients(uses, grads[: len(uses)], dict(zip(self._aliases, grads[len(uses) :])))
        self.frames += len(losses)
        self.loss += float(losses.detach().double().sum())

    def _forward(self, inputs: Any, keep: bool) -> tuple[Any, list[_Use]]:
        uses: list[_Use] = []
        grams: dict[Any, tuple[Tensor, tuple[Tensor, int]]] = {}  # layers that read the same tensor share one Q

        def run(name: str, call: Call) -> Tensor:
            torch.set_grad_enabled(True)
            out = call()
            sums = self._sums(name, call)
            key = (id(call.x), call.x._version, call.geometry, sums.layer.bias is not None)
            if key not in grams:
                grams[key] = call.x, input_gram(at_least_float32(call.batched_x), call.geometry, sums.layer.bias is not None)
            Q, locations = grams[key][1]
            sums.Q += Q
            sums.locations += locations
            kept = call if keep else replace(call, x=call.x.new_empty(0))
            uses.append(_Use(name, kept, get_gradient_edge(out)))
            return out

        with Watch(self._names, run):
            raw = self._detector(inputs)
        return raw, uses

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

    def _add_gradients(self, uses: list[_Use], grads: tuple[Tensor | None, ...], batch: int) -> None:
        for use, d in zip(uses, grads):
            if d is None:
                continue
            sums = self.sums[use.name]
            sums.H += gram(rows(use.call.batched_out(at_least_float32(d)), use.call.geometry))
            sums.reached = True
        bad = sorted({use.name for use in uses if not bool(self.sums[use.name].H.isfinite().all())})
        if bad:
            raise BoxcovError(f"batch {batch} gives a NaN or infinite gradient at {listed(bad)}, though its loss is finite")

    def _check_all_found(self) -> None:
        biases = [sums.layer.bias for sums in self.sums.values() if sums.layer.bias is not None]
        twice = sorted({bias for bias in biases if biases.count(bias) > 1})
        lost = [name for name in self.chosen if name not in self.sums and name not in biases]
        if lost or twice:
            raise BoxcovError(_cannot_be_factored(lost, twice))

    def _check_gradients(self, uses: list[_Use], grads: tuple[Tensor | None, ...], whole: dict[str, Tensor | None]) -> None:
        """Whether the uses seen explain the whole gradient of each weight: if not, it is used in a way that is no matrix product."""
        seen: dict[str, Tensor] = {}
        for use, d in zip(uses, grads):
            if d is not None:
                a = columns(at_least_float32(use.call.batched_x), use.call.geometry)
                D = rows(use.call.batched_out(at_least_float32(d)), use.call.geometry)
                part = (D @ a.transpose(-1, -2)).sum(0)
                seen[use.name] = seen[use.name] + part if use.name in seen else part
        wrong = []
        for name, sums in self.sums.items():
            grad = whole[name]
            if grad is None:
                continue
            expected = to_matrix(grad.to(torch.float64), None, sums.layer.geometry)
            slack = 1e-3 if grad.dtype in (torch.float32, torch.float64) else 0.1
            if name not in seen or float((seen[name] - expected).norm()) > slack * float(expected.norm()):
                wrong.append(name)
        if wrong:
            raise BoxcovError(_cannot_be_factored(wrong, []))


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


def frame_losses(detector: Detector, raw: Any, targets: Any, batch: int) -> Tensor:
    """The training loss of each frame (B,), checked."""
    try:
        losses = detector.loss(raw, targets)
    except BoxcovError:
        raise
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BoxcovError(f"the targets of batch {batch} do not fit the detector: {type(error).__name__}: {error}") from error
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not len(losses):
        form = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise BoxcovError(
            f"loss() must return one value a frame, shape (B,), got {form}: a mean over the batch hides the frames' own gradients"
        )
    if not bool(losses.isfinite().all()):
        bad = [i for i, ok in enumerate(losses.isfinite().tolist()) if not ok]
        raise BoxcovError(
            f"the loss of batch {batch} is {losses[bad[0]].item()} in frame {bad[0]} of the batch: "
            "its inputs or targets hold a NaN, an infinity or a value out of range"
        )
    if not losses.requires_grad:
        raise BoxcovError(f"the loss of batch {batch} has no gradient for any chosen layer: does loss() detach its inputs?")
    return losses


def sampled(detector: Detector, raw: Any, generator: torch.Generator) -> Any:
    """Targets drawn by the detector, for fisher="mc"."""
    with torch.no_grad():
        targets = detector.sample_targets(raw, generator)
    if targets is None:
        raise BoxcovError(
            f'fisher="mc" draws targets from the detector, and {type(detector).__name__} does not say how: '
            'give it a method sample_targets(raw, generator), or use fisher="empirical" with labelled frames'
        )
    return targets


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
