"""Checks of layers: which a posterior can hold, whether loss and boxes reach them, cost."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from boxcov._torch.layers import Geometry, LayerCall
from boxcov._torch.modules import LayerCallMode, fresh
from boxcov._torch.process_state import seconds
from boxcov.checks.report import DepthCost, Finding, LayerRow
from boxcov.checks.subject import NotChecked, Subject, bad, good, named_floats
from boxcov.detector import Detector, part_modules
from boxcov.errors import counted, join_names
from boxcov.kfac.accumulate import Accumulator
from boxcov.kfac.losses import FrameLosses, select_parameters
from boxcov.posterior.kronecker_block import Layer

_MIB = 2**20
_SAMPLES = 10  # of MCGLM
_OTHER = "used otherwise than as the weight or bias of a linear layer or convolution"
_IDLE = "not used in this pass"


def trace(subject: Subject) -> Finding:
    """Which parameters are weights of linear layers or convolutions, and in which part."""
    subject.needed_raw()
    given = part_modules(subject.original)
    chosen = select_parameters(subject.original, list(given)[-1])
    losses = FrameLosses(subject.original, chosen)
    used: dict[str, Layer] = {}
    names = {id(alias): name for name, alias in losses.aliases.items()}

    def run(name: str, call: LayerCall) -> Tensor:
        bias = None if call.bias is None else names.get(id(call.bias))
        form = Geometry(
            call.geometry.kernel, groups=call.geometry.groups, transposed=call.geometry.transposed
        )
        used.setdefault(name, Layer(name, bias, call.weight.shape, form))
        return call()

    with torch.enable_grad(), LayerCallMode(names, run):
        raw = losses.raw(subject.inputs)
        if subject.selection is not None:
            losses.detector.decode(raw, subject.selection)
    subject.moving = [leaf.requires_grad for _, leaf in named_floats(raw)]
    touched = _touched(raw, losses.aliases)
    parts, norms = _part_of(given), _norm_layers(subject.original, chosen)
    subject.layers = [
        _row(name, p, parts, norms, used, touched)
        for name, p in subject.original.named_parameters()
    ]
    subject.layers = [row for row in subject.layers if row.reason != "bias"]
    return _layer_finding(subject, given)


def _layer_finding(subject: Subject, parts: Iterable[str]) -> Finding:
    """Return how many layers a posterior can hold, and what keeps the others out."""
    inside = [row for row in subject.layers if not row.reason]
    other, idle = (
        [row.name for row in subject.layers if row.reason == reason] for reason in (_OTHER, _IDLE)
    )
    lost = other + idle
    if not inside:
        return bad(
            f"no layer of {join_names(parts)} can be in a posterior",
            "name parts whose linear layers and convolutions run in forward()",
        )
    todo = (
        f"boxcov.fit(..., options=boxcov.FitOptions(exclude={lost[:3]!r}"
        f"{', ...' if len(lost) > 3 else ''})) keeps them constant"
        if lost
        else ""
    )
    seen = f"{counted(len(inside), 'layer')} can be in a posterior"
    seen += f"; {counted(len(other), 'parameter')} cannot, used otherwise" if other else ""
    seen += f"; {counted(len(idle), 'parameter')} not used in this pass" if idle else ""
    return good(seen, todo)


def _norm_layers(detector: Detector, chosen: Container[str]) -> dict[str, str]:
    """Return the kind of module of each parameter that is not chosen."""
    owners = dict(detector.named_modules())
    names = [name for name, _ in detector.named_parameters() if name not in chosen]
    return {name: type(owners[name.rpartition(".")[0]]).__name__ for name in names}


def _part_of(parts: dict[str, tuple[nn.Module, ...]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for part, modules in parts.items():
        for module in modules:
            found |= {id(p): part for p in module.parameters() if id(p) not in found}
    return found


def _touched(raw: Any, aliases: dict[str, nn.Parameter]) -> set[str]:
    """Names of the weights that the raw outputs depend on."""
    tensors = [t for t in tree_leaves(raw) if isinstance(t, Tensor) and t.requires_grad]
    if not tensors:
        return set()
    grads = torch.autograd.grad(
        [t.sum() for t in tensors], list(aliases.values()), allow_unused=True
    )
    return {name for name, g in zip(aliases, grads) if g is not None}


def _row(
    name: str,
    p: nn.Parameter,
    parts: dict[int, str],
    norms: dict[str, str],
    used: dict[str, Layer],
    touched: set[str],
) -> LayerRow:
    row = LayerRow(name, parts.get(id(p), "-"), tuple(p.shape))
    if name in used:
        layer = used[name]
        return replace(row, n_in=layer.n_in, n_out=layer.n_out, groups=layer.geometry.groups)
    if any(layer.bias == name for layer in used.values()):
        return replace(row, reason="bias")
    if id(p) not in parts:
        return replace(row, reason="in no part")
    if name in norms:
        return replace(row, reason=f"scale and shift of {norms[name]}")
    return replace(row, reason=_OTHER if name in touched else _IDLE)


def loss_gradient(subject: Subject) -> Finding:
    """``loss()`` has a gradient in every layer, and one frame's factors can be computed."""
    subject.needed_loss()
    chosen = _chosen(subject)
    accumulator = Accumulator(FrameLosses(subject.original, chosen))
    accumulator.add(accumulator.terms(fresh(subject.inputs), subject.targets, 0))
    cut_off = [name for name, sums in accumulator.sums.items() if not sums.has_gradient]
    if cut_off:
        return bad(
            f"the loss has no gradient for {join_names(cut_off, 4)}",
            "is something detached before loss()? If not, exclude these layers from the fit",
        )
    flat = [name for name, sums in accumulator.sums.items() if not bool(sums.H.any())]
    return good(
        f"reaches {counted(len(accumulator.sums), 'layer')}; factors of one frame computed"
        + (f"; zero here for {join_names(flat, 3)}" if flat else "")
    )


def box_gradient(subject: Subject) -> Finding:
    """Every field of the boxes depends on weights of the parts."""
    chosen_rows = subject.needed_selection()
    subject.needed_boxes()
    losses = FrameLosses(subject.original, _chosen(subject))
    todo = (
        "is the head run under no_grad(), or something detached in forward()? "
        "A field that does not depend on the weights has variance 0"
    )
    with torch.enable_grad():
        boxes = losses.detector.decode(losses.raw(subject.inputs), chosen_rows)
        if not boxes.requires_grad:
            return bad("the boxes have no gradient in any weight of the parts", todo)
        aliases = list(losses.aliases.values())
        reached: set[str] = set()
        dead = []
        for column, field in enumerate(subject.original.box_fields):
            grads = torch.autograd.grad(
                boxes[:, column].sum(), aliases, retain_graph=True, allow_unused=True
            )
            names = {
                name for name, g in zip(losses.aliases, grads) if g is not None and bool(g.any())
            }
            reached |= names
            dead += [] if names else [field]
    if dead:
        return bad(f"{join_names(dead)} have no gradient in any weight of the parts", todo)
    return good(
        f"every field depends on weights: {len(reached)} of the {len(aliases)} weight and bias "
        "tensors of layers that can be in a posterior move these boxes"
    )


def _chosen(subject: Subject) -> dict[str, nn.Parameter]:
    if not any(not row.reason for row in subject.layers):
        raise NotChecked("no layer can be in a posterior")
    out = [row.name for row in subject.layers if row.reason and row.reason != "in no part"]
    return select_parameters(subject.original, list(subject.original.parts())[-1], out)


# cost


def depths(subject: Subject) -> tuple[DepthCost, ...]:
    """Cost per depth: a part and everything between it and the output."""
    found, inside = [], []
    for part in subject.original.parts() if subject.layers else ():
        inside += [row for row in subject.layers if not row.reason and row.part == part]
        factors = sum(row.groups * (row.n_in**2 + row.n_out**2) for row in inside)
        weights = sum(row.groups * row.n_in * row.n_out for row in inside)
        found.append(
            DepthCost(
                part,
                len(inside),
                weights,
                factors_mib=4 * factors / _MIB,
                fit_mib=8 * factors / _MIB,
                online_mib=4 * (factors + weights) / _MIB,
                directions_mib=4 * _SAMPLES * weights / _MIB,
            )
        )
    return tuple(found)


def milliseconds_per_pass(subject: Subject) -> float | None:
    """Median milliseconds of three plain passes."""
    if subject.raw is None:
        return None
    detector, inputs = subject.shadow(), fresh(subject.inputs)
    taken = []
    with torch.no_grad():
        for _ in range(3):
            began = seconds(subject.device)
            detector(inputs)
            taken.append(1e3 * (seconds(subject.device) - began))
    return median(taken)
