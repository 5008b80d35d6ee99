"""``check``: run every check, also after one has failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from boxcov._torch.modules import move
from boxcov.checks import batches, contract, derivatives, layers, losses, selections
from boxcov.checks.report import DepthCost, Finding, Report
from boxcov.checks.subject import NotChecked, Subject, bad, keep_state, one_line
from boxcov.detector import Detector, check_type
from boxcov.errors import BoxcovError, counted

# The order matters: later checks read what earlier ones stored in the subject.
CHECKS: tuple[tuple[str, Callable[[Subject], Finding]], ...] = (
    ("names", contract.names),
    ("parts", contract.parts),
    ("weights", contract.weights),
    ("forward", contract.forward),
    ("inputs", contract.inputs_unchanged),
    ("repeatable", contract.repeatable),
    ("state", contract.state),
    ("mode", contract.mode),
    ("select", contract.selection),
    ("labels", contract.labels),
    ("decode", contract.boxes),
    ("own output", contract.own_output),
    ("layers", layers.trace),
    ("decode: derivative", derivatives.differentiable),
    ("decode: same instances", derivatives.same_instances),
    ("loss", losses.shape),
    ("loss: frames apart", losses.apart),
    ("loss: no objects", losses.no_objects),
    ("loss: labels", losses.labels),
    ("loss: gradient", layers.loss_gradient),
    ("boxes: gradient", layers.box_gradient),
    ("boxes: in a batch", batches.boxes),
    ("weights to boxes", derivatives.through_weights),
    ("instances", derivatives.instances),
    ("stages", derivatives.stages),
    ("logits", derivatives.logits),
    ("signals", batches.signals),
    ("candidates", selections.candidates),
    ("select_static", selections.static_selection),
    ("augment", losses.augmented),
)


def check(
    detector: Detector,
    frame: Any,
    *,
    other: Any = None,
    reference: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check whether ``detector`` keeps the contract, on one ``frame`` of (inputs, targets).

    A broken adapter is reported, not raised, and the detector is left unchanged. ``print(report)``
    shows one line per check, ``report.ok`` tells whether all passed, ``report["decode"]`` is one
    finding, and ``report.to_json()`` is for scripts. The network runs about twenty times.

    other: a second frame, for checks on batches of two; by default a perturbed copy of the first.
    reference: boxes (m, D) from the model's own post-processing of this frame, in any order.
    progress: called with the number of checks done, and of all.
    With targets of None the loss is not checked.

    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> report = check(TinyCenter(threshold=0.05, most=3, width=4), shapes.frames(count=1)[0])
    >>> report.ok, report["loss"].passed, report["own output"].passed
    (True, True, None)
    """
    check_type(detector)
    first = next(iter((*detector.parameters(), *detector.buffers())), torch.empty(0, device="cpu"))
    inputs, targets = move(_pair(frame, "frame"), first.device)
    mate = None if other is None else move(_pair(other, "other"), first.device)
    subject = Subject(detector, inputs, targets, mate, reference, first.device)
    with keep_state(detector), torch.inference_mode(False), torch.enable_grad(), catch_warnings():
        simplefilter("ignore")
        findings = []
        for name, run in CHECKS:
            findings.append(_finding(name, run, subject))
            if progress is not None:
                progress(len(findings), len(CHECKS))
        milliseconds: float | None = None
        depths: tuple[DepthCost, ...] = ()
        with suppress(Exception):
            milliseconds = layers.milliseconds_per_pass(subject)
        with suppress(Exception):
            depths = layers.depths(subject)
    boxes = "no boxes" if subject.boxes is None else counted(len(subject.boxes), "box")
    about = f"{boxes} in the checked frame, on {subject.device}"
    found = tuple(findings), tuple(subject.layers), depths, milliseconds
    return Report(type(detector).__name__, about, *found)


def _finding(name: str, run: Callable[[Subject], Finding], subject: Subject) -> Finding:
    try:
        found = run(subject)
    except NotChecked as why:
        found = Finding(name, None, str(why))
    except BoxcovError as error:
        found = bad(str(error), "")
    except Exception as error:  # an adapter may raise anything, and that is a finding
        found = bad(one_line(error), "make it run on this frame")
    return replace(found, name=name)


def _pair(frame: Any, argument: str) -> tuple[Any, Any]:
    if not isinstance(frame, (tuple, list)) or len(frame) != 2:
        raise BoxcovError(
            f"{argument} must be a pair (inputs, targets), got a {type(frame).__name__}; "
            "targets may be None"
        )
    return frame[0], frame[1]
