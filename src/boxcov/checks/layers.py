"""Checks of layers: which a posterior can hold, whether loss and boxes reach them, cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from boxcov._torch.layers import LayerCall
from boxcov._torch.modules import LayerCallMode, fresh
from boxcov._torch.process_state import seconds
from boxcov.checks.report import DepthCost, Finding, LayerRow
from boxcov.checks.subject import NotChecked, Subject, bad, good, named_floats
from boxcov.detector import part_modules
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
        used.setdefault(name, Layer.of_call(name, names.get(id(call.bias)), call))
        return call()

    with LayerCallMode(names, run):
        raw = losses.raw(subject.inputs)
        if subject.selection is not None:
            losses.detector.decode(raw, subject.selection)
    subject.moving = [leaf.requires_grad for _, leaf in named_floats(raw)]
    part_of = {
        id(p): part
        for part, modules in reversed(given.items())
        for module in modules
        for p in module.parameters()
    }
    biases = {layer.bias for layer in used.values()}
    touched = _touched(raw, losses.aliases)
    for name, p in subject.original.named_parameters():
        row = LayerRow(name, part_of.get(id(p), "-"), tuple(p.shape))
        if name in used:
            groups = used[name].geometry.groups
            row = replace(row, n_in=used[name].n_in, n_out=used[name].n_out, groups=groups)
        elif id(p) not in part_of:
            row = replace(row, reason="in no part")
        elif name not in chosen:
            owner = subject.original.get_submodule(name.rpartition(".")[0])
            row = replace(row, reason=f"scale and shift of {type(owner).__name__}")
        else:
            row = replace(row, reason=_OTHER if name in touched else _IDLE)
        if name in used or name not in biases:
            subject.layers.append(row)
    return _layer_finding(subject, given)


def _layer_finding(subject: Subject, parts: Iterable[str]) -> Finding:
    """Return how many layers a posterior can hold, and what keeps the others out."""
    other, idle = (
        [row.name for row in subject.layers if row.reason == reason] for reason in (_OTHER, _IDLE)
    )
    if not subject.covered:
        todo = "name parts whose linear layers and convolutions run in forward()"
        return bad(f"no layer of {join_names(parts)} can be in a posterior", todo)
    seen, todo = f"{counted(len(subject.covered), 'layer')} can be in a posterior", ""
    seen += f"; {counted(len(other), 'parameter')} cannot, used otherwise" if other else ""
    seen += f"; {counted(len(idle), 'parameter')} not used in this pass" if idle else ""
    if lost := other + idle:
        more = ", ..." if len(lost) > 3 else ""
        todo = f"FitOptions(exclude={lost[:3]!r}{more}) in boxcov.fit keeps them constant"
    return good(seen, todo)


def _touched(raw: Any, aliases: dict[str, nn.Parameter]) -> set[str]:
    """Names of the weights that the raw outputs depend on."""
    sums = [t.sum() for t in tree_leaves(raw) if isinstance(t, Tensor) and t.requires_grad]
    if not sums:
        return set()
    grads = torch.autograd.grad(sums, list(aliases.values()), allow_unused=True)
    return {name for name, g in zip(aliases, grads) if g is not None}


def loss_gradient(subject: Subject) -> Finding:
    """``loss()`` has a gradient in every layer, and one frame's factors can be computed."""
    subject.needed_loss()
    chosen = _chosen(subject)
    accumulator = Accumulator(FrameLosses(subject.original, chosen))
    accumulator.add(accumulator.terms(fresh(subject.inputs), subject.targets, 0))
    if cut_off := [name for name, sums in accumulator.sums.items() if not sums.has_gradient]:
        todo = "is something detached before loss()? If not, exclude these layers from the fit"
        return bad(f"the loss has no gradient for {join_names(cut_off, 4)}", todo)
    seen = f"reaches {counted(len(accumulator.sums), 'layer')}; factors of one frame computed"
    flat = [name for name, sums in accumulator.sums.items() if not bool(sums.H.any())]
    return good(seen + (f"; zero here for {join_names(flat, 3)}" if flat else ""))


def box_gradient(subject: Subject) -> Finding:
    """Every field of the boxes depends on weights of the parts."""
    chosen_rows = subject.needed_selection()
    subject.needed_boxes()
    losses = FrameLosses(subject.original, _chosen(subject))
    todo = (
        "is the head run under no_grad(), or something detached in forward()? "
        "A field that does not depend on the weights has variance 0"
    )
    boxes = losses.detector.decode(losses.raw(subject.inputs), chosen_rows)
    if not boxes.requires_grad:
        return bad("the boxes have no gradient in any weight of the parts", todo)
    aliases = list(losses.aliases.values())
    reached: set[int] = set()
    dead = []
    for field, column in zip(subject.original.box_fields, boxes.unbind(1)):
        grads = torch.autograd.grad(column.sum(), aliases, retain_graph=True, allow_unused=True)
        moving = {i for i, g in enumerate(grads) if g is not None and bool(g.any())}
        reached |= moving
        dead += [] if moving else [field]
    if dead:
        return bad(f"{join_names(dead)} have no gradient in any weight of the parts", todo)
    return good(
        f"every field depends on weights: {len(reached)} of the {len(aliases)} weight and bias "
        "tensors of layers that can be in a posterior move these boxes"
    )


def _chosen(subject: Subject) -> dict[str, nn.Parameter]:
    if not subject.covered:
        raise NotChecked("no layer can be in a posterior")
    out = [row.name for row in subject.layers if row.reason and row.reason != "in no part"]
    return select_parameters(subject.original, list(subject.original.parts())[-1], out)


# cost


def depths(subject: Subject) -> tuple[DepthCost, ...]:
    """Cost per depth: a part and everything between it and the output."""
    found, inside = [], []
    for part in subject.original.parts() if subject.layers else ():
        inside += [row for row in subject.covered if row.part == part]
        factors = sum(row.groups * (row.n_in**2 + row.n_out**2) for row in inside)
        weights = sum(row.groups * row.n_in * row.n_out for row in inside)
        floats = (factors, 2 * factors, factors + weights, _SAMPLES * weights)
        found.append(DepthCost(part, len(inside), weights, *(4 * n / _MIB for n in floats)))
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
