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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from boxcov._torch.distributed import World
from boxcov._torch.fingerprint import check_buffers, versions
from boxcov._torch.layer_calls import LayerCall, LayerCallMode
from boxcov._torch.precision import at_least_float32
from boxcov._torch.unfold import Geometry, Layer, columns, rows, to_matrix
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, NotFiniteFrameError, join_names
from boxcov.kfac.batched_factors import Inputs, Part, add_up, output_parts
from boxcov.kfac.input_gram import weighted_gram
from boxcov.kfac.losses import Losses, Weight
from boxcov.posterior.posterior import Locations


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
        Q, H = (
            torch.zeros(groups, n, n, dtype=torch.float64, device=device)
            for n in (layer.n_in, layer.n_out)
        )
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
    call: LayerCall  # without its tensors once they are no longer needed
    edge: GradientEdge  # where the gradient of the output will pass, before anything changes the output in place


@dataclass
class _Pass:
    """What is seen of one pass: every use of a layer, and those that autograd follows."""

    inputs: Inputs
    keep: bool  # the inputs of the uses, for what needs them after the pass
    seen: list[tuple[str, int | None, int]] = field(
        default_factory=list
    )  # name, number of the input's factor if it has one, locations
    uses: list[_Use] = field(default_factory=list)


_Named = tuple[str, Part]
_NOTHING = torch.empty(0)


class Accumulator:
    """Adds batches to the factors of the chosen parameters; ``layers`` are known after the first one."""

    def __init__(
        self,
        detector: Detector,
        chosen: Mapping[str, nn.Parameter],
        locations: Locations = "all",
        weight: Weight | None = None,
    ) -> None:
        self.chosen = chosen
        self.device = next(iter(chosen.values())).device
        self.by_gradient = locations == "gradient"
        self.together = self.device.type != "cpu"  # a CPU is busy with one layer at a time
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

    def reduce(self, world: World, items: int, skipped: int) -> tuple[int, int]:
        """Sum over all ranks, in place; return the items counted and skipped by all ranks."""
        if world.is_single:
            return items, skipped
        gathered = world.gather([sums.layer.to_json() for sums in self.sums.values()])
        layers: list[dict[str, Any]] = next(filter(None, gathered), [])  # a rank may have no item
        for layer in map(Layer.from_json, layers):
            self.sums.setdefault(layer.weight, Sums.of(layer, self.device))
        ordered = [self.sums[entry["weight"]] for entry in layers]  # the same order on every rank
        counts = [self.frames, self.loss, items, skipped]
        counts += [n for s in ordered for n in (s.locations, s.reached)]
        frames, self.loss, all_items, all_skipped, *rest = world.all_reduce(
            [factor for s in ordered for factor in (s.Q, s.H)], counts
        )
        self.frames = int(frames)
        for sums, locations, reached in zip(ordered, rest[::2], rest[1::2]):
            sums.locations, sums.reached = int(locations), reached > 0
        self.sums = {sums.layer.weight: sums for sums in ordered}
        return int(all_items), int(all_skipped)

    def discover(self, inputs: Any) -> None:
        """Find the layers without any loss: for the identity."""
        with torch.enable_grad(), self._watching(_Pass(Inputs(together=False), keep=False)):
            self._losses.raw(inputs)
        self._check_all_found()

    def add(self, inputs: Any, targets: Any, generator: torch.Generator | None, batch: int) -> None:
        """One batch: its inputs into Q, the gradients of its frames' losses into H. A ``generator`` draws the targets ("mc").

        It counts whole or not at all: whatever is raised on the way, the sums are those of the batches before.
        """
        first = not self.frames
        buffers = versions(list(self._losses.detector.buffers())) if first else []
        with torch.enable_grad():
            one, raw = self._forward(inputs, keep=first or self.by_gradient)
            if first:
                self._check_all_found()
            with self._watching(one):
                losses = self._losses.of(raw, inputs, targets, generator, batch)
        check_buffers(buffers)
        wanted: list[Any] = [use.edge for use in one.uses]
        if first:
            wanted += self._aliases.values()
        grads = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        Q, H = self._parts(one, grads)
        loss = _checked(Q + H, losses, batch)
        if first:
            self._check_gradients(
                one.uses, grads[: len(one.uses)], dict(zip(self._aliases, grads[len(one.uses) :]))
            )
        self._commit(one, Q, H, len(losses), loss)

    def _forward(self, inputs: Any, keep: bool) -> tuple[_Pass, Any]:
        """The raw outputs, and what was seen on the way; inputs that did not stay as they were are never waited for again."""
        one = _Pass(Inputs(self.together), keep)
        with self._watching(one):
            raw = self._losses.raw(inputs)
        if one.inputs.finish():
            return one, raw
        self.together = False
        return self._forward(inputs, keep)

    def _commit(
        self, one: _Pass, Q: list[_Named], H: list[_Named], frames: int, loss: float
    ) -> None:
        self.torn = True
        for name, _, locations in one.seen:
            self.sums[name].locations += locations
        for name, _ in H:
            self.sums[name].reached = True
        add_up(
            [(self.sums[name].Q, part) for name, part in Q]
            + [(self.sums[name].H, part) for name, part in H]
        )
        self.frames += frames
        self.loss += loss
        self.torn = False

    def _parts(
        self, one: _Pass, grads: tuple[Tensor | None, ...]
    ) -> tuple[list[_Named], list[_Named]]:
        """What the pass adds to the sums Q and H, by the name of the layer."""
        reached = [
            (use, rows(use.call.batched_out(d), use.call.geometry))
            for use, d in zip(one.uses, grads)
            if d is not None
        ]
        H = zip(
            (use.name for use, _ in reached), output_parts([D for _, D in reached], self.together)
        )
        if self.by_gradient:
            return [
                (use.name, self._weighed(use, at_least_float32(D))) for use, D in reached
            ], list(H)
        return [
            (name, one.inputs.parts[number]) for name, number, _ in one.seen if number is not None
        ], list(H)

    def _weighed(self, use: _Use, D: Tensor) -> Part:
        has_bias = self.sums[use.name].layer.bias is not None
        return Part.of(
            weighted_gram(
                at_least_float32(use.call.batched_x),
                D.square().sum(-2),
                use.call.geometry,
                has_bias,
            )
        )

    def _watching(self, one: _Pass) -> LayerCallMode:
        """Adds every use of a layer to the pass."""

        def run(name: str, call: LayerCall) -> Tensor:
            out = call()
            layer = self._sums(name, call).layer
            followed = out.requires_grad  # not inside the detector's own no_grad
            number = (
                None
                if self.by_gradient
                else one.inputs.add(call, layer.bias is not None, may_wait=followed)
            )
            one.seen.append((name, number, out.numel() // (layer.geometry.groups * layer.n_out)))
            if followed:
                one.uses.append(
                    _Use(
                        name,
                        call if one.keep else replace(call, x=_NOTHING),
                        get_gradient_edge(out),
                    )
                )
            return out

        return LayerCallMode(self._names, run)

    def _sums(self, name: str, call: LayerCall) -> Sums:
        bias = None if call.bias is None else self._names.get(id(call.bias))
        if name not in self.sums:
            form = Geometry(
                call.geometry.kernel,
                groups=call.geometry.groups,
                transposed=call.geometry.transposed,
            )
            self.sums[name] = Sums.of(
                Layer(name, bias, call.weight.shape, form), call.weight.device
            )
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

    def _check_gradients(
        self, uses: list[_Use], grads: tuple[Tensor | None, ...], whole: dict[str, Tensor | None]
    ) -> None:
        """Whether the uses seen explain the whole gradient of each weight: if not, it is used in a way that is no matrix product."""
        seen: dict[str, Tensor] = {}
        sizes: dict[
            str, Tensor
        ] = {}  # of what was added up: where it cancels, only rounding is left
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
            parts = (
                {name: slice(None)}
                if sums.layer.bias is None
                else {name: slice(-1), sums.layer.bias: slice(-1, None)}
            )
            slack, size = (
                _slack(expected, self.chosen[name]),
                sizes.get(name, torch.zeros_like(expected)),
            )
            allowed = {
                part: slack * float(expected[..., at].norm())
                + 1e-2 * slack * float(size[..., at].norm())
                for part, at in parts.items()
            }
            wrong += [
                part for part, at in parts.items() if float(off[..., at].norm()) > allowed[part]
            ]
        if wrong:
            raise BoxcovError(_cannot_be_factored(wrong, []))

    def _as_matrix(self, layer: Layer, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        weight = torch.zeros_like(self.chosen[layer.weight]) if weight is None else weight
        if bias is None and layer.bias is not None:
            bias = torch.zeros_like(self.chosen[layer.bias])
        return to_matrix(
            at_least_float32(weight),
            None if bias is None else at_least_float32(bias),
            layer.geometry,
        )


def _checked(parts: list[_Named], losses: Tensor, batch: int) -> float:
    """The sum of the losses; one look at the device for all that must be finite."""
    totals = [losses.detach().sum(dtype=torch.float64), *(part.total for _, part in parts)]
    loss, *found = torch.stack(totals).tolist()
    bad = list(dict.fromkeys(name for (name, _), total in zip(parts, found) if not isfinite(total)))
    if bad:
        raise NotFiniteFrameError(
            f"batch {batch} gives a NaN or infinite input or gradient at {join_names(bad)}, though its loss is finite"
        )
    return float(loss)


def _slack(gradient: Tensor, weight: Tensor) -> float:
    """How far two ways to the same gradient may lie apart: TF32 on a GPU, and half precision, round early."""
    if weight.dtype not in (torch.float32, torch.float64):
        return 0.1
    return 1e-3 if gradient.device.type == "cpu" else 2e-2


def _cannot_be_factored(lost: list[str], twice: list[str]) -> str:
    modules = sorted({name.rpartition(".")[0] or name for name in (*lost, *twice)})
    reasons = []
    if lost:
        reasons.append(
            f"{join_names(lost)} (not, or not only, the weight or bias of a linear layer or convolution)"
        )
    if twice:
        reasons.append(f"{join_names(twice)} (the bias of several layers)")
    return (
        f"these parameters cannot be factored: {'; '.join(reasons)}. "
        f"Keep them as constants with fixed={modules!r}, or give depth as a list of module names"
    )
