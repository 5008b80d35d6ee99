"""Accumulates the Kronecker factors of the detector's own training loss, batch by batch.

For one frame with loss L, a layer ``out = W a`` called at T locations has the gradient
``sum over t of d_t a_t^T``, where d_t is the gradient of L at ``out``. KFAC approximates the
Fisher, the mean over frames of that gradient's outer product, by ``Q (x) H`` (see ``factors.py``).

All factors are sums over everything seen, divided once at the end, so the size and number of the
batches do not matter. The gradient of the sum of a batch's losses contains each frame's own d,
because in eval mode the frames of a batch do not interact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from boxcov._torch.distributed import World
from boxcov._torch.layers import LayerCall, columns, rows
from boxcov._torch.modules import LayerCallMode, check_buffers, versions
from boxcov._torch.process_state import at_least_float32
from boxcov.errors import BoxcovError, NotFiniteFrameError, join_names
from boxcov.kfac.checkpoint import check_count, pack_sums, unpack_sums
from boxcov.kfac.factors import FactorSums, InputFactors, add_terms, output_terms
from boxcov.kfac.losses import LAYERS, FrameLosses
from boxcov.posterior.kronecker_block import Layer

_NO_INPUT = torch.empty(0)
_NamedTerm = tuple[str, Tensor]


@dataclass(frozen=True)
class _Call:
    """One call of a layer."""

    name: str
    term: int  # number of the input's term
    locations: int
    call: LayerCall  # without its input if that is no longer needed
    # of the output, before anything changes it in place; None inside the detector's own no_grad
    edge: GradientEdge | None


@dataclass
class _ForwardPass:
    """The layer calls of one forward pass."""

    inputs: InputFactors
    keep_inputs: bool = False
    calls: list[_Call] = field(default_factory=list)


@dataclass(frozen=True)
class ItemTerms:
    """What one item adds to the sums of the layers, by the names of their weights."""

    frames: int
    loss: float  # sum over frames
    locations: list[tuple[str, int]]
    Q: list[_NamedTerm]
    H: list[_NamedTerm]


class Accumulator:
    """Adds batches to the factor sums of each layer; the layers are found in the first batch."""

    def __init__(self, losses: FrameLosses) -> None:
        self.losses = losses
        self.parameters = losses.parameters
        self.device = losses.device
        self.batch_layers = self.device.type != "cpu"  # one layer is enough for a CPU
        self._names = {id(alias): name for name, alias in losses.aliases.items()}
        self.sums: dict[str, FactorSums] = {}
        self.frames = 0
        self.loss = 0.0  # sum over frames

    def factors(self) -> list[tuple[Layer, Tensor, Tensor]]:
        """Return the layer, Q and H of every layer."""
        own = self.sums.values()
        return [(sums.layer, sums.Q / sums.locations, sums.H / self.frames) for sums in own]

    def find_layers(self, inputs: Any) -> None:
        """Find the layers by a forward pass without a loss."""
        with torch.enable_grad(), self._record(_ForwardPass(InputFactors(batched=False))):
            self.losses.raw(inputs)
        self._check_all_found()

    def terms(self, inputs: Any, targets: Any, number: int) -> ItemTerms:
        """Return what item ``number`` adds: its inputs to Q, its losses' gradients to H."""
        is_first = not self.frames
        buffers = versions(list(self.losses.detector.buffers())) if is_first else []
        with torch.enable_grad():
            forward, raw = self._forward(inputs, keep_inputs=is_first)
            if is_first:
                self._check_all_found()
            with self._record(forward):  # loss() may call layers, too
                losses = self.losses.compute(raw, inputs, targets, number)
        check_buffers(buffers)
        calls = [call for call in forward.calls if call.edge is not None]
        wanted: list[Any] = [call.edge for call in calls]
        aliases = self.losses.aliases if is_first else {}
        grads = torch.autograd.grad(losses.sum(), [*wanted, *aliases.values()], allow_unused=True)
        reached = [(call, d) for call, d in zip(calls, grads) if d is not None]
        Q = [(call.name, forward.inputs.terms[call.term]) for call in forward.calls]
        Ds = [rows(call.call.batched_out(d), call.call.geometry) for call, d in reached]
        H = list(zip([call.name for call, _ in reached], output_terms(Ds, self.batch_layers)))
        loss = _finite_loss(Q + H, losses, number)
        if is_first:
            self._check_gradients(reached, dict(zip(aliases, grads[len(calls) :])))
        locations = [(call.name, call.locations) for call in forward.calls]
        return ItemTerms(len(losses), loss, locations, Q, H)

    def add(self, terms: ItemTerms) -> None:
        """Add the terms of one item to the sums."""
        for name, count in terms.locations:
            self.sums[name].locations += count
        for name, _ in terms.H:
            self.sums[name].has_gradient = True
        pairs = [(self.sums[name].Q, term) for name, term in terms.Q]
        add_terms(pairs + [(self.sums[name].H, term) for name, term in terms.H])
        self.frames += terms.frames
        self.loss += terms.loss

    def _forward(self, inputs: Any, keep_inputs: bool) -> tuple[_ForwardPass, Any]:
        """Return the recorded calls and the raw outputs."""
        forward = _ForwardPass(InputFactors(self.batch_layers), keep_inputs)
        with self._record(forward):
            raw = self.losses.raw(inputs)
        if forward.inputs.finish():
            return forward, raw
        self.batch_layers = False  # the detector writes to a layer's input in place
        return self._forward(inputs, keep_inputs)

    def _record(self, forward: _ForwardPass) -> LayerCallMode:
        def run(name: str, call: LayerCall) -> Tensor:
            out = call()
            layer = self._layer_sums(name, call).layer
            edge = get_gradient_edge(out) if out.requires_grad else None
            term = forward.inputs.add(call, layer.bias is not None, may_wait=edge is not None)
            locations = out.numel() // (layer.geometry.groups * layer.n_out)
            if edge is None or not forward.keep_inputs:
                call = replace(call, x=_NO_INPUT)
            forward.calls.append(_Call(name, term, locations, call, edge))
            return out

        return LayerCallMode(self._names, run)

    def _layer_sums(self, name: str, call: LayerCall) -> FactorSums:
        bias = self._names.get(id(call.bias))
        if name not in self.sums:
            layer = Layer.of_call(name, bias, call)
            self.sums[name] = FactorSums.zeros(layer, call.weight.device)
        layer = self.sums[name].layer
        if layer.bias != bias:
            raise BoxcovError(
                f"the weight {name} is used with the bias {layer.bias} and with the bias {bias}, "
                f"but one matrix has one bias: use FitOptions(exclude=[{layer.name!r}])"
            )
        return self.sums[name]

    # several processes, and checkpoints

    def reduce(self, world: World) -> None:
        """Sum over all ranks, in place."""
        if world.is_single:
            return
        gathered = world.gather([sums.layer.to_json() for sums in self.sums.values()])
        layers: list[dict[str, Any]] = next(filter(None, gathered), [])  # a rank may have no item
        for layer in map(Layer.from_json, layers):
            self.sums.setdefault(layer.weight, FactorSums.zeros(layer, self.device))
        ordered = [self.sums[entry["weight"]] for entry in layers]  # the same order on every rank
        counts = [n for s in ordered for n in (s.locations, s.has_gradient)]
        frames, self.loss, *rest = world.all_reduce(
            [factor for s in ordered for factor in (s.Q, s.H)], [self.frames, self.loss, *counts]
        )
        self.frames = int(frames)
        for sums, locations, has_gradient in zip(ordered, rest[::2], rest[1::2]):
            sums.locations, sums.has_gradient = int(locations), has_gradient > 0
        self.sums = {sums.layer.weight: sums for sums in ordered}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of a checkpoint by name, and the rest of the state as JSON."""
        tensors, layers = pack_sums(self.sums.values())
        return tensors, {"frames": self.frames, "loss": self.loss, "layers": layers}

    def load_state(self, file: Any, header: Mapping[str, Any]) -> None:
        """Restore the state from an open safetensors file; raise ValueError if it does not fit."""
        layers = header["layers"]
        sums = {entry["weight"]: unpack_sums(entry, file, self.parameters) for entry in layers}
        frames = check_count(header["frames"])
        if not isfinite(header["loss"]):
            raise ValueError(f"a loss of {header['loss']}")
        if not frames and any(one.locations for one in sums.values()):
            raise ValueError("sums of no frame")
        self.sums, self.frames, self.loss = sums, frames, float(header["loss"])
        if frames:
            self._check_all_found()

    # checks of the first batch

    def _check_all_found(self) -> None:
        biases = [sums.layer.bias for sums in self.sums.values() if sums.layer.bias is not None]
        shared = sorted({bias for bias in biases if biases.count(bias) > 1})
        lost = [name for name in self.parameters if name not in self.sums and name not in biases]
        if lost or shared:
            raise BoxcovError(_unsupported_message(self.losses.detector, lost, shared))

    def _check_gradients(
        self, reached: Sequence[tuple[_Call, Tensor]], grads: Mapping[str, Tensor | None]
    ) -> None:
        """Raise if a weight has a gradient from a use that is not a matrix product."""
        weight_grads = {
            name: torch.zeros_like(self.parameters[name]) if d is None else d
            for name, d in grads.items()
        }
        wrong = []
        for name, sums in self.sums.items():
            layer = sums.layer
            expected = layer.matrix(weight_grads)
            error = -expected
            size = torch.zeros_like(expected)  # where terms cancel, rounding stays
            for call, d in reached:
                if call.name == name and d.numel():
                    error, size = _add_gradient(error, size, call.call, d)
            tolerance = 1e-3 if expected.device.type == "cpu" else 2e-2  # TF32 rounds early
            if self.parameters[name].dtype not in (torch.float32, torch.float64):
                tolerance = 0.1
            columns_of = {name: slice(None)}
            if layer.bias is not None:
                columns_of = {name: slice(-1), layer.bias: slice(-1, None)}
            for parameter, at in columns_of.items():
                allowed = float(expected[..., at].norm()) + 1e-2 * float(size[..., at].norm())
                if float(error[..., at].norm()) > tolerance * allowed:
                    wrong.append(parameter)
        if wrong:
            raise BoxcovError(_unsupported_message(self.losses.detector, wrong, []))


def _add_gradient(total: Tensor, size: Tensor, call: LayerCall, d: Tensor) -> tuple[Tensor, Tensor]:
    """Add ``sum over t of d_t a_t^T`` (G, n_out, n_in), and the same of absolute values."""
    a = columns(at_least_float32(call.batched_x), call.geometry)
    if a.shape[2] < total.shape[-1]:
        a = torch.cat([a, torch.ones_like(a[:, :, :1])], 2)  # of the bias
    D = rows(call.batched_out(at_least_float32(d)), call.geometry)
    a = a.transpose(-1, -2)
    return total + (D @ a).sum(0), size + (D.abs() @ a.abs()).sum(0)


def _finite_loss(terms: list[_NamedTerm], losses: Tensor, number: int) -> float:
    """Return the sum of the losses; raise if a term is not finite. Synchronizes once."""
    own = {id(term): term for _, term in terms}  # layers may share one
    totals = [tensor.sum(dtype=torch.float64) for tensor in (losses.detach(), *own.values())]
    loss, *sums = torch.stack(totals).tolist()
    wrong = {key for key, total in zip(own, sums) if not isfinite(total)}
    bad = list(dict.fromkeys(name for name, term in terms if id(term) in wrong))
    if bad:
        raise NotFiniteFrameError(
            f"item {number} gives a NaN or infinite input or gradient at {join_names(bad)}, "
            "though its loss is finite"
        )
    return float(loss)


def _unsupported_message(detector: nn.Module, lost: list[str], shared: list[str]) -> str:
    owners = {name: detector.get_submodule(name.rpartition(".")[0]) for name in lost}
    idle = [name for name, owner in owners.items() if isinstance(owner, LAYERS)]
    other = [name for name in lost if name not in idle]
    reasons = {
        "not, or not only, the weight or bias of a linear layer or convolution": other,
        "the bias of several layers": shared,
        "a layer that does not run in forward(), or not with this weight alone": idle,
    }
    named = [f"{join_names(names)} ({reason})" for reason, names in reasons.items() if names]
    return (
        f"these parameters cannot be in a posterior: {'; '.join(named)}. Leave them out with "
        f"FitOptions(exclude={_shortest_names(detector, [*lost, *shared])!r}), or give depth as a "
        "list of module names"
    )


def _shortest_names(detector: nn.Module, names: list[str]) -> list[str]:
    """Return names of modules instead of parameters where all parameters of a module are meant."""
    found = set()
    for name in names:
        owner = name.rpartition(".")[0]
        own = [f"{owner}.{key}" for key, _ in detector.get_submodule(owner).named_parameters()]
        found.add(owner if owner and set(own) <= set(names) else name)
    return sorted(found)
