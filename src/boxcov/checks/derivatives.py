"""Checks of derivatives: decode(), weights to boxes, and the optional capabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from boxcov.checks.report import Finding
from boxcov.checks.subject import (
    NotChecked,
    Subject,
    bad,
    form_of,
    good,
    map_floats,
    moved,
    named_floats,
    one_line,
)
from boxcov.detector import Detector
from boxcov.errors import counted, join_names
from boxcov.kfac.fit import FitOptions, fit
from boxcov.predict.exact import ExactGLM
from boxcov.predict.forward_mode.derivatives import (
    ForwardModeError,
    directional_derivatives,
    finite_differences,
)
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector, short_way

_LARGEST = 2500  # size of a factor that is decomposed in a few seconds
_ROWS = 6  # boxes whose dependence on the raw outputs is traced


def differentiable(subject: Subject) -> Finding:
    """The derivative of ``decode()`` along a direction equals a finite difference."""
    subject.needed_boxes()
    detector, raw = subject.shadow(), _doubled(subject)
    generator = torch.Generator().manual_seed(0)
    # what does not depend on the weights, such as the size of the image, needs no derivative
    directions = [
        yes * _like(leaf, generator)
        for yes, (_, leaf) in zip(subject.moving_floats(), named_floats(raw))
    ]
    slope = _slope(detector, raw, directions, subject)
    if slope is None:
        todo = "avoid no_grad(), detach(), numpy(), item() and torch.tensor(...) in decode()"
        return bad("decode() has no gradient in the raw outputs", todo)
    step, slack, least = (1e-6, 1e-3, 1e-9) if slope.dtype == torch.float64 else (1e-3, 5e-2, 1e-3)
    with torch.no_grad():
        ahead, behind = (
            detector.decode(moved(raw, directions, sign * step), subject.needed_selection())
            for sign in (1, -1)
        )
    if ahead.shape != slope.shape:
        raise NotChecked("decode() returns other rows for other raw outputs")
    difference = short_way((ahead - behind).detach(), detector) / (2 * step)
    size = difference.norm(dim=0)
    off = (slope - difference).norm(dim=0) / size.clamp(min=least)
    most, fields = float(off.max()), detector.box_fields
    if wrong := [name for name, x in zip(fields, off.tolist()) if not x < slack]:
        seen = f"the derivative of {join_names(wrong)} differs from a finite difference"
        todo = "is something detached, rounded or clamped on the way to that field?"
        return bad(f"{seen} by {100 * most:.3g} %", todo)
    flat = [name for name, x in zip(fields, size.tolist()) if x == 0]
    constant = f"; {join_names(flat)} do not depend on raw outputs" if flat else ""
    return good(f"derivatives equal finite differences to {most:.0e}{constant}")


def same_instances(subject: Subject) -> Finding:
    """``decode()`` returns the same instances, read at the same places, for other raw outputs."""
    expected, chosen = subject.needed_boxes().shape, subject.needed_selection()
    detector, raw = subject.shadow(), subject.needed_raw()
    # With opposite signs, the highest scores become the lowest.
    pairs = zip(subject.moving_floats(), named_floats(raw))
    flipped = moved(raw, [-2.0 * yes * leaf for yes, (_, leaf) in pairs])
    todo = "decode() must read selection.where, and not threshold, sort or suppress by itself"
    try:
        with torch.no_grad():
            other = detector.decode(flipped, chosen)
    except Exception as error:
        return bad(f"decode() fails for raw outputs of opposite sign: {one_line(error)}", todo)
    if other.shape != expected:
        seen = f"decode() gives {len(other)} rows for other raw outputs, {expected[0]} before"
        return bad(seen, todo)
    rows = torch.linspace(0, expected[0] - 1, min(_ROWS, expected[0])).long().unique().tolist()
    before, after = (_read_by(detector, tree, rows, subject) for tree in (raw, flipped))
    for row, a, b in zip(rows, before, after):
        if a is not None and b is not None and not bool((a & b).any()):
            return bad(f"box {row} reads other raw outputs when their values change", todo)
    return good(f"{expected[0]} rows for other raw outputs too, read at the same places")


def through_weights(subject: Subject) -> Finding:
    """The boxes' derivative along a direction in weight space equals a finite difference."""
    boxes = subject.needed_boxes()
    if not subject.repeatable:
        raise NotChecked("forward() is not repeatable")
    names = [row.name for row in subject.covered]
    if not names:
        raise NotChecked("no layer can be in a posterior")
    known = dict(subject.original.named_parameters())
    generator = torch.Generator().manual_seed(1)
    etas = {name: (_like(known[name], generator) * 0.1)[None] for name in names}
    with torch.no_grad():
        point = LinearizedDetector(subject.original, names).at(subject.inputs)
        try:
            exact = directional_derivatives(point, etas)[:, :, 0]
        except ForwardModeError as error:
            seen, _, todo = str(error).rpartition(": ")
            return bad(seen, todo)
        except Exception as error:
            todo = "use torch functions that have a forward derivative, or MCGLM(derivative='fd')"
            return bad(f"forward-mode differentiation fails: {one_line(error)}", todo)
        if any(known[name].element_size() < 4 for name in names):
            raise NotChecked("a finite difference is lost in rounding: check it in float32")
        off = torch.inf
        for step in (1e-3, 1e-2, 1e-4):  # too long is not linear, too short is rounding
            off = min(off, _off(point, etas, exact, step))
            if off < 0.1:
                break
    if not off < 0.1:
        seen = "the boxes' derivative along a step in the weights differs from a finite difference"
        todo = "does forward() detach something, or use weights in a custom autograd function?"
        return bad(f"{seen} by {100 * off:.3g} % (median)", todo)
    seen = f"derivatives of {counted(len(boxes), 'box')} in {counted(len(names), 'weight')}"
    return good(f"{seen} equal finite differences to {off:.0e} (median)")


def _off(point: LinearizationPoint, etas: dict[str, Tensor], exact: Tensor, step: float) -> float:
    """Median relative error over boxes: an activation near its kink may spoil some."""
    found = finite_differences(point, etas, step)[:, :, 0]
    errors = (found - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-12)
    return float(errors.nan_to_num(torch.inf).median())


def instances(subject: Subject) -> Finding:
    """``instances()`` returns the boxes and gradients of ``decode()``."""
    subject.needed_boxes()
    detector = subject.shadow()
    if detector.instances(subject.needed_raw(), subject.needed_selection()) is None:
        raise NotChecked(
            "not implemented (optional): ExactGLM takes one backward pass per number of each box"
        )
    if type(detector).instances is Detector.instances:
        raise NotChecked("derived from stages(), which are checked below")
    detector.__dict__["stages"] = lambda raw, selection: None  # for ExactGLM only
    _exact(detector, subject)
    return good("boxes and gradients by instance are those of decode()")


def stages(subject: Subject) -> Finding:
    """``stages()`` agrees with ``instances()``."""
    subject.needed_boxes()
    detector = subject.shadow()
    if detector.stages(subject.needed_raw(), subject.needed_selection()) is None:
        raise NotChecked("not implemented (optional, for speed)")
    model = _exact(detector, subject)
    if not model.router.staged_head.parameters:
        todo = "use odd square convolutions of stride 1 that keep the map's size, no groups"
        return bad("the stages cannot be computed as one batch", todo)
    return good("covariances by stages are those by instance")


def logits(subject: Subject) -> Finding:
    """``logits()`` returns one differentiable logit per score."""
    chosen = subject.needed_selection()
    if type(subject.original).logits is Detector.logits:
        raise NotChecked("not implemented (optional, for the variance of the scores)")
    found = subject.shadow().logits(_leaves(subject.needed_raw()), chosen)
    if found is None or form_of(found) != (len(chosen),):
        seen = f"logits() gives {form_of(found)}, expected ({len(chosen)},)"
        return bad(seen, "return one logit per instance")
    if not found.requires_grad or not bool(found.isfinite().all()):
        todo = "return the logit of each score, not detached"
        return bad("logits() are not finite, or have no gradient in the raw outputs", todo)
    same = torch.allclose(found.detach().sigmoid().to(chosen.scores), chosen.scores, atol=1e-4)
    scores = "their sigmoids are the scores" if same else "the scores are not their sigmoids"
    seen = f"one per score; {scores}"
    if subject.shadow().instances(subject.needed_raw(), chosen, with_logit=True) is not None:
        return good(seen)
    todo = "append the logit in instances(with_logit=True), which makes it a few"
    return good(f"{seen}; with_logit=True takes one backward pass per box", todo)


# helpers


def _exact(detector: Detector, subject: Subject) -> ExactGLM:
    """Run ExactGLM on the head under an identity Fisher; it verifies its engines and raises."""
    part = next(iter(subject.original.parts()))
    own = [row for row in subject.layers if row.part == part]
    fixed = [row.name for row in own if row.reason or max(row.n_in, row.n_out) > _LARGEST]
    frames, options = [(subject.inputs, None)], FitOptions(exclude=fixed)
    posterior = fit(
        detector, frames, part, n_data=1, prior_precision=1.0, fisher="identity", options=options
    )
    model = ExactGLM(detector, posterior)
    model(subject.inputs)
    return model


def _leaves(raw: Any) -> Any:
    return map_floats(lambda t: t.detach().clone().requires_grad_(), raw)


def _doubled(subject: Subject) -> Any:
    """The raw outputs in float64 if decode() accepts them."""
    raw = subject.needed_raw()
    doubled = map_floats(Tensor.double, raw)
    try:
        with torch.no_grad():
            found = subject.shadow().decode(doubled, subject.needed_selection())
    except Exception:  # decode() mixes them with its own float32 tensors
        return raw
    return doubled if found.dtype == torch.float64 else raw


def _slope(
    detector: Detector, raw: Any, directions: list[Tensor], subject: Subject
) -> Tensor | None:
    """Derivative (m, D) of the boxes along the directions; None without one."""
    # by double backward: decode() need not support forward mode
    leaves = _leaves(raw)
    boxes = detector.decode(leaves, subject.needed_selection())
    if not boxes.requires_grad:
        return None
    dummy = torch.ones_like(boxes, requires_grad=True)
    floats = [leaf for _, leaf in named_floats(leaves)]
    grads = torch.autograd.grad(boxes, floats, dummy, create_graph=True, allow_unused=True)
    along = torch.stack([(g * d).sum() for g, d in zip(grads, directions) if g is not None]).sum()
    (slope,) = torch.autograd.grad(along, dummy, allow_unused=True)
    return torch.zeros_like(boxes) if slope is None else slope.detach()


def _read_by(
    detector: Detector, raw: Any, rows: list[int], subject: Subject
) -> list[Tensor | None]:
    """Per row, a mask of the raw numbers that its box depends on; None without a gradient."""
    leaves = _leaves(raw)
    boxes = detector.decode(leaves, subject.needed_selection())
    if not boxes.requires_grad:
        return [None] * len(rows)
    floats = [leaf for _, leaf in named_floats(leaves)]
    found: list[Tensor | None] = []
    for box in boxes[rows]:
        grads = torch.autograd.grad(box.sum(), floats, retain_graph=True, materialize_grads=True)
        read = torch.cat([g.flatten() != 0 for g in grads])
        found.append(read if bool(read.any()) else None)
    return found


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction with the RMS of the tensor's values."""
    size = tensor.detach().square().mean().sqrt().clamp(min=1e-3)
    return torch.randn(tensor.shape, generator=generator).to(tensor) * size
