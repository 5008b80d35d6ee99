"""Checks of the network: ``forward()`` runs, repeats itself, and leaves its inputs and state."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure

from boxcov._torch.modules import fresh, shadow
from boxcov.checks.report import Finding
from boxcov.checks.subject import NotChecked, Subject, bad, good, named_floats, same_bits
from boxcov.errors import join_names


def forward(subject: Subject) -> Finding:
    """``forward()`` runs and returns tensors."""
    detector, inputs = subject.shadow(), fresh(subject.inputs)
    began = perf_counter()
    with torch.no_grad():
        raw = detector(inputs)
    first = perf_counter() - began
    leaves = tree_leaves(raw)
    plain = (Tensor, int, float, bool, str, type(None))
    if odd := sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, plain)}):
        seen = f"raw outputs hold {join_names(odd)}, which boxcov cannot look into"
        return bad(seen, "return tuples, lists or dicts of tensors")
    if not named_floats(raw):
        todo = "return the tensors that decode() and loss() read"
        return bad("raw outputs hold no floating-point tensor", todo)
    subject.raw = raw
    shapes = [str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)]
    seen = f"{len(shapes)} tensors {join_names(shapes, 4)}"
    return good(f"{seen}, the first pass took {1e3 * first:.0f} ms")


def inputs_unchanged(subject: Subject) -> Finding:
    """``forward()`` leaves its inputs unchanged."""
    given, copy = subject.second_pass().inputs, fresh(subject.inputs)
    if tree_structure(given) != tree_structure(copy) or not same_bits(given, copy):
        todo = "work on copies: add_, x /= s and writing into a dict change the caller's data"
        return bad("forward() changes its inputs", todo)
    return good("unchanged after forward()")


def repeatable(subject: Subject) -> Finding:
    """Two passes give the same bits."""
    first, again = subject.needed_raw(), subject.second_pass().raw
    if not same_bits(first, again):
        todo = "is dropout active in eval mode (F.dropout without training=self.training), "
        todo += "or does forward() count its calls?"
        return bad(f"two passes in eval mode differ{_furthest(first, again)}", todo)
    subject.repeatable = True
    return good("two passes give the same bits")


def state(subject: Subject) -> Finding:
    """``forward()`` leaves parameters and buffers unchanged."""
    if changed := subject.second_pass().changed:
        seen = f"forward() changes {join_names(changed, 4)} in eval mode"
        return bad(seen, "do not write to buffers or weights in eval mode")
    return good("parameters and buffers are unchanged")


def mode(subject: Subject) -> Finding:
    """The detector's own mode does not matter: boxcov runs a shadow in eval mode."""
    first = subject.needed_raw()
    if not subject.repeatable:
        raise NotChecked("forward() is not repeatable")
    trained = subject.shadow().train()  # the shadow's own modules
    with torch.no_grad():
        again = shadow(trained)(fresh(subject.inputs))
    if not same_bits(first, again):
        seen = f"after train() a shadow in eval mode gives other outputs{_furthest(first, again)}"
        todo = "let forward() depend on self.training only, not on other state that train() sets; "
        return bad(seen, f"{todo}or call detector.eval() first")
    return good("boxcov gets the same raw outputs whether or not detector.eval() was called")


def finite(subject: Subject) -> Finding:
    """Raw outputs and boxes are finite."""
    for name, tensor in named_floats(subject.needed_raw()):
        if wrong := int((~tensor.isfinite()).sum()):
            seen = f"raw{name} holds {wrong} NaN or infinite values of {tensor.numel()}"
            return bad(seen, "clamp what is divided by, logged or exponentiated")
    if subject.boxes is None:
        return good("raw outputs")
    if rows := (~subject.boxes.isfinite()).any(1).nonzero()[:, 0].tolist():
        first = f"box {rows[0]}: {subject.boxes[rows[0]].tolist()}"
        todo = "look at exp, log and divisions in decode()"
        return bad(f"{len(rows)} boxes are not finite, e.g. {first}", todo)
    return good("raw outputs and boxes")


def _furthest(a: Any, b: Any) -> str:
    """Describe where two pytrees differ most."""
    off = [
        (float((x - y).abs().max()), name)
        for (name, x), (_, y) in zip(named_floats(a), named_floats(b))
        if x.shape == y.shape and x.numel()
    ]
    return f", by up to {max(off)[0]:.2g} in raw{max(off)[1]}" if off else ", in their shapes"
