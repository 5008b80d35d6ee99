"""Checks of the required members: names, parts, weights, forward(), select(), decode()."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure

from boxcov._torch.modules import check_finite_weights, fresh, shadow
from boxcov.box_layout import IMAGE, PLANE, has_layout
from boxcov.checks.report import Finding
from boxcov.checks.subject import (
    NotChecked,
    Subject,
    bad,
    form_of,
    good,
    named_floats,
    nearest,
    same_bits,
    size_problem,
    writes_to,
)
from boxcov.detector import Selection, check_selection, part_modules
from boxcov.errors import BoxcovError, counted, join_names
from boxcov.kfac.losses import most_frames


def names(subject: Subject) -> Finding:
    """``box_fields``, ``classes`` and ``periods``."""
    detector = subject.original
    for what in ("box_fields", "classes"):
        given = getattr(detector, what, None)
        is_list = isinstance(given, (tuple, list)) and all(isinstance(name, str) for name in given)
        if not is_list or not given or len(set(given)) < len(given):
            return bad(f"{what} is {given!r}", f"give {what} as a tuple of different names")
    periods = dict(detector.periods)
    if not all(isinstance(period, (int, float)) and period > 0 for period in periods.values()):
        todo = "give the length after which a field wraps around, above 0"
        return bad(f"periods is {periods}", todo)
    fields, classes = detector.box_fields, detector.classes
    todo = (
        "fit and predict take these fields; boxcov calibrate and evaluate pair boxes with "
        f"labelled objects, for which they need {' '.join(PLANE)}, or {' '.join(IMAGE)}"
    )
    is_pairable = has_layout(fields, PLANE) or has_layout(fields, IMAGE)
    named = f"{counted(len(classes), 'class')} ({join_names(classes, 4)})"
    return good(f"boxes {' '.join(fields)}; {named}", "" if is_pairable else todo)


def parts(subject: Subject) -> Finding:
    """``parts()`` names modules of the detector that hold weights, and no weight twice."""
    given = subject.original.parts()
    if not isinstance(given, Mapping) or not given:
        todo = "return a dict of modules, from the output ('head') to the input"
        return bad(f"parts() gives {given!r}", todo)
    first = next(iter(given))
    if first != "head":
        todo = "name the part at the output 'head' and put it first: fit() starts there"
        return bad(f"the first part is {first!r}", todo)
    try:
        modules_of = part_modules(subject.original)
    except BoxcovError as error:
        seen, _, todo = str(error).partition(": ")
        return bad(seen, todo)
    inside = set(subject.original.modules())
    owner: dict[int, str] = {}
    by_id = {id(p): name for name, p in subject.original.named_parameters()}
    counts = []
    for part, modules in modules_of.items():
        if strangers := [type(module).__name__ for module in modules if module not in inside]:
            seen = f"the part {part!r} holds {join_names(strangers)}, not a module of the detector"
            return bad(seen, "use modules of the detector itself")
        parameters = {id(p): p for module in modules for p in module.parameters()}
        if not parameters:
            todo = "remove the part, or name the modules that hold its weights"
            return bad(f"the part {part!r} holds no parameters", todo)
        if twice := [key for key in parameters if key in owner]:
            shared = join_names([by_id[key] for key in twice], 3)
            seen = f"the parts {owner[twice[0]]!r} and {part!r} share {shared}"
            return bad(seen, "give every weight to one part only")
        owner |= dict.fromkeys(parameters, part)
        counts.append(f"{part} {sum(p.numel() for p in parameters.values()):,}")
    rest = sum(p.numel() for p in subject.original.parameters() if id(p) not in owner)
    return good(f"parameters: {', '.join(counts)}" + (f"; {rest:,} in no part" if rest else ""))


def weights(subject: Subject) -> Finding:
    check_finite_weights(subject.original)
    return good("all finite")


def forward(subject: Subject) -> Finding:
    """``forward()`` runs and returns tensors of finite numbers."""
    with torch.no_grad():
        raw = subject.shadow()(fresh(subject.inputs))
    leaves = tree_leaves(raw)
    plain = (Tensor, int, float, bool, str, type(None))
    if odd := sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, plain)}):
        seen = f"raw outputs hold {join_names(odd)}, which boxcov cannot look into"
        return bad(seen, "return tuples, lists or dicts of tensors")
    if not named_floats(raw):
        todo = "return the tensors that decode() and loss() read"
        return bad("raw outputs hold no floating-point tensor", todo)
    for name, tensor in named_floats(raw):
        if wrong := int((~tensor.isfinite()).sum()):
            seen = f"raw{name} holds {wrong} NaN or infinite values of {tensor.numel()}"
            return bad(seen, "clamp what is divided by, logged or exponentiated")
    subject.raw = raw
    shapes = [str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)]
    return good(f"{len(shapes)} tensors {join_names(shapes, 4)}")


def inputs_unchanged(subject: Subject) -> Finding:
    """``forward()`` leaves its inputs unchanged."""
    given, copy = subject.second.inputs, fresh(subject.inputs)
    if tree_structure(given) != tree_structure(copy) or not same_bits(given, copy):
        todo = "work on copies: add_, x /= s and writing into a dict change the caller's data"
        return bad("forward() changes its inputs", todo)
    return good("unchanged after forward()")


def repeatable(subject: Subject) -> Finding:
    """Two passes give the same bits."""
    first, again = subject.needed_raw(), subject.second.raw
    if not same_bits(first, again):
        todo = "is dropout active in eval mode (F.dropout without training=self.training), "
        todo += "or does forward() count its calls?"
        return bad(f"two passes in eval mode differ{_furthest(first, again)}", todo)
    subject.repeatable = True
    return good("two passes give the same bits")


def state(subject: Subject) -> Finding:
    """``forward()`` leaves parameters and buffers unchanged."""
    if changed := subject.second.changed:
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


def _furthest(a: Any, b: Any) -> str:
    """Describe where two pytrees differ most."""
    off = [
        (float((x - y).abs().max()), name)
        for (name, x), (_, y) in zip(named_floats(a), named_floats(b))
        if x.shape == y.shape and x.numel()
    ]
    return f", by up to {max(off)[0]:.2g} in raw{max(off)[1]}" if off else ", in their shapes"


def selection(subject: Subject) -> Finding:
    """``select()`` returns instances, the same ones each time."""
    raw = subject.needed_raw()
    found, wrote = writes_to(raw, lambda: subject.shadow().select(raw))
    if wrote:
        subject.raw = None
        todo = "work on copies: sigmoid_() and the like change what decode() and loss() read"
        return bad("select() changes raw outputs in place", todo)
    with torch.no_grad():
        again = subject.shadow().select(raw)
    check_selection(found)
    if problem := _selection_problem(found, most_frames(subject.inputs, subject.targets)):
        return bad(problem, "return a finite score, and the frame's number in the batch, from 0")
    numbers = attrgetter("frame", "scores", "labels", "where")
    if not same_bits(numbers(found), numbers(again)):
        todo = "do not draw random numbers, and keep no state between calls"
        return bad("select() gives other instances for the same raw outputs", todo)
    if not len(found):
        todo = "use a frame in which the detector finds something, or lower its threshold"
        return bad("no instance is selected in this frame", todo)
    subject.selection = found
    low, high = float(found.scores.min()), float(found.scores.max())
    seen = f"{len(found)} instances, scores {low:.3g} to {high:.3g}"
    if low < 0 or high > 1:
        return bad(seen, "return probabilities, from 0 to 1: the error model uses their logits")
    return good(seen)


def _selection_problem(found: Selection, frames: int | None) -> str:
    if not bool(found.scores.isfinite().all()):
        return f"{int((~found.scores.isfinite()).sum())} scores are not finite"
    low, high = (int(found.frame.min()), int(found.frame.max())) if len(found) else (0, 0)
    if low < 0:
        return f"selection.frame goes down to {low}"
    if frames is not None and high >= frames:
        return f"selection.frame goes to {high}, but the batch has {counted(frames, 'frame')}"
    return ""


def labels(subject: Subject) -> Finding:
    """Each label is the index of a class."""
    found, classes = subject.needed_selection().labels, subject.original.classes
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= len(classes):
        todo = "count classes from 0 without a background class, and name all of them in classes"
        return bad(f"labels from {low} to {high} for {counted(len(classes), 'class')}", todo)
    named = join_names([classes[i] for i in found.unique().tolist()], 4)
    return good(f"labels {low} to {high}: {named}")


def boxes(subject: Subject) -> Finding:
    """``decode()`` returns finite numbers (m, D)."""
    raw, chosen = subject.needed_raw(), subject.needed_selection()
    found, wrote = writes_to(raw, lambda: subject.shadow().decode(raw, chosen))
    if wrote:
        subject.raw = None
        todo = "work on copies: avoid sigmoid_(), exp_() and the like"
        return bad("decode() changes raw outputs in place", todo)
    fields = subject.original.box_fields
    expected = (len(chosen), len(fields))
    if form_of(found) != expected:
        seen = f"decode() gives {form_of(found)}, expected {expected}: {expected[0]} instances, "
        todo = "return one row per instance of the selection, one column per name in box_fields"
        return bad(f"{seen}fields {' '.join(fields)}", todo)
    if not found.is_floating_point():
        todo = "return floating-point numbers: rounding to pixels has no derivative"
        return bad(f"boxes are {found.dtype}", todo)
    if rows := (~found.isfinite()).any(1).nonzero()[:, 0].tolist():
        seen = f"{len(rows)} boxes are not finite, e.g. box {rows[0]}: {found[rows[0]].tolist()}"
        return bad(seen, "look at exp, log and divisions in decode()")
    subject.boxes = found
    if problem := size_problem(fields, found):
        todo = "return the columns in the order of box_fields: from cx cy w h, x1 is cx - w / 2 "
        return bad(problem, f"{todo}and x2 is cx + w / 2 (or name the fields cx cy w h)")
    return good(f"{counted(expected[0], 'box')} of {counted(expected[1], 'field')}")


def own_output(subject: Subject) -> Finding:
    """``decode()`` agrees with the model's own post-processing."""
    mine = subject.needed_boxes()
    detected = subject.shadow().detect(fresh(subject.inputs)).boxes
    if not same_bits(detected, mine) and subject.repeatable:
        todo = "do not override detect(), or return the same boxes"
        return bad("detect() gives other boxes than decode() of select()", todo)
    if subject.reference is None:
        raise NotChecked("no reference boxes given: check(..., reference=boxes) compares with them")
    theirs = torch.as_tensor(subject.reference).to(mine)
    if theirs.dim() != 2 or theirs.shape[1] != mine.shape[1]:
        return bad(f"reference has shape {tuple(theirs.shape)}, expected (m, {mine.shape[1]})", "")
    pairs = (theirs, mine), (mine, theirs)
    lost = [int((nearest(*pair)[0] >= 1e-4).sum()) if len(pair[0]) else 0 for pair in pairs]
    if any(lost):
        return bad(
            f"{lost[0]} of the model's own {len(theirs)} boxes are not among the {len(mine)} of "
            f"decode(), and {lost[1]} of decode() are not among the model's",
            "select() and decode() must repeat the model's own post-processing: threshold, "
            "top-k, NMS, scaling, order of the fields",
        )
    return good(f"the model's own {len(theirs)} boxes, to 1e-4")
