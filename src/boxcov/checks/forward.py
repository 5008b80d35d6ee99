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
    tensors = [leaf for leaf in tree_leaves(raw) if isinstance(leaf, Tensor)]
    odd = sorted(
        {
            type(leaf).__name__
            for leaf in tree_leaves(raw)
            if not isinstance(leaf, (Tensor, int, float, bool, str, type(None)))
        }
    )
    if odd:
        return bad(
            f"raw outputs hold {join_names(odd)}, which boxcov cannot look into",
            "return tuples, lists or dicts of tensors",
        )
    if not any(t.is_floating_point() for t in tensors):
        return bad(
            "raw outputs hold no floating-point tensor",
            "return the tensors that decode() and loss() read",
        )
    subject.raw = raw
    shapes = [str(tuple(t.shape)) for t in tensors]
    return good(
        f"{len(tensors)} tensors {join_names(shapes, 4)}, the first pass took {1e3 * first:.0f} ms"
    )


def inputs_unchanged(subject: Subject) -> Finding:
    """``forward()`` leaves its inputs unchanged."""
    given, copy = subject.second_pass().inputs, fresh(subject.inputs)
    if tree_structure(given) != tree_structure(copy) or not same_bits(given, copy):
        return bad(
            "forward() changes its inputs",
            "work on copies: add_, sub_, x /= s and writing into the inputs' dict "
            "change the caller's data",
        )
    return good("unchanged after forward()")


def repeatable(subject: Subject) -> Finding:
    """Two passes give the same bits."""
    first, again = subject.needed_raw(), subject.second_pass().raw
    if not same_bits(first, again):
        return bad(
            f"two passes in eval mode differ{_furthest(first, again)}",
            "is dropout active in eval mode (F.dropout without training=self.training), "
            "or does forward() count its calls?",
        )
    subject.repeatable = True
    return good("two passes give the same bits")


def state(subject: Subject) -> Finding:
    """``forward()`` leaves parameters and buffers unchanged."""
    changed = subject.second_pass().changed
    if changed:
        return bad(
            f"forward() changes {join_names(changed, 4)} in eval mode",
            "do not write to buffers or weights in eval mode",
        )
    return good("parameters and buffers are unchanged")


def mode(subject: Subject) -> Finding:
    """The detector's own mode does not matter: boxcov runs a shadow in eval mode."""
    first = subject.needed_raw()
    if not subject.repeatable:
        raise NotChecked("forward() is not repeatable")
    trained = subject.shadow()
    trained.train()  # of the shadow's own modules
    with torch.no_grad():
        again = shadow(trained)(fresh(subject.inputs))
    if not same_bits(first, again):
        return bad(
            f"after train() a shadow in eval mode gives other outputs{_furthest(first, again)}",
            "let forward() depend on self.training only, not on other state that train() sets; "
            "or call detector.eval() first",
        )
    return good("boxcov gets the same raw outputs whether or not detector.eval() was called")


def finite(subject: Subject) -> Finding:
    """Raw outputs and boxes are finite."""
    for name, tensor in named_floats(subject.needed_raw()):
        wrong = int((~tensor.isfinite()).sum())
        if wrong:
            return bad(
                f"raw{name} holds {wrong} NaN or infinite values of {tensor.numel()}",
                "clamp what is divided by, logged or exponentiated",
            )
    if subject.boxes is not None and not bool(subject.boxes.isfinite().all()):
        rows = (~subject.boxes.isfinite()).any(1).nonzero()[:, 0].tolist()
        return bad(
            f"{len(rows)} boxes are not finite, e.g. box {rows[0]}: "
            f"{subject.boxes[rows[0]].tolist()}",
            "look at exp, log and divisions in decode()",
        )
    return good("raw outputs and boxes" if subject.boxes is not None else "raw outputs")


def _furthest(a: Any, b: Any) -> str:
    """Describe where two pytrees differ most."""
    ours, theirs = named_floats(a), named_floats(b)
    pairs = [
        (name, x, y) for (name, x), (_, y) in zip(ours, theirs) if x.shape == y.shape and x.numel()
    ]
    off = [(float((x - y).abs().max()), name) for name, x, y in pairs]
    return f", by up to {max(off)[0]:.2g} in raw{max(off)[1]}" if off else ", in their shapes"
