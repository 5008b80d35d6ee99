"""Verifies ``Detector.instances`` against ``Detector.decode``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from boxcov._torch.layers import LayerCall
from boxcov._torch.modules import LayerCallMode, float_leaves
from boxcov._torch.process_state import at_least_float32
from boxcov.errors import BoxcovError, join_names
from boxcov.predict.instances import (
    InstanceRun,
    instance_groups,
    leaves_read,
    method_name,
    with_leaves,
)
from boxcov.predict.linearize import LinearizationPoint, OnCall
from boxcov.predict.route.verification import (
    Verdict,
    Verification,
    box_errors,
    judge_weights,
    rounding_tolerance,
)


class InstancesCheck(Verification):
    """Verifies ``instances()`` against ``decode()``: equal boxes, equal gradients.

    Its subjects are weights, with logits and without.
    """

    def __init__(self) -> None:
        super().__init__()
        # with logits or without: for each tensor of the raw outputs, the weights it depends on
        self._upstream: dict[bool, list[set[str]]] = {}
        self._items = Verification()

    def verify(self, point: LinearizationPoint, weights: set[str], z: Tensor) -> bool:
        """Compare, unless that is done; False if the frame has too few boxes to decide.

        z: (m, D) by instance. If it is not that of the plain pass, all is compared again, because
            ``instances()`` may be right for the boxes that it was verified on alone: those of
            single frames, or those away from the border.
        """
        has_logits = point.logits is not None
        subjects = {(has_logits, name) for name in weights}
        known = self._upstream.get(has_logits, [])
        if self.covers(subjects) and len(known) == len(float_leaves(point.raw)):
            tolerance = rounding_tolerance(point.linearized.weights.values())
            if bool((box_errors(z, point.z, point.shadow) <= tolerance).all()):
                return True
        if self._compare(point) is not Verdict.AGREES:
            return False
        self.accept(subjects)
        return True

    def upstream(self, point: LinearizationPoint, read: set[int]) -> set[str]:
        """The weights upstream of those raw outputs of ``point`` that were ``read`` (by id)."""
        behind = zip(float_leaves(point.raw), self._upstream[point.logits is not None])
        return set().union(*(names for tensor, names in behind if id(tensor) in read))

    def verify_items(self, run: InstanceRun, point: LinearizationPoint) -> None:
        """Raise unless box i depends on item i of every layer alone."""
        subjects = {(point.logits is not None, name) for name in run.uses}
        if run.uses and len(run.index) > 1 and not self._items.covers(subjects):
            check_items(run, type(point.shadow).__name__)
            self._items.accept(subjects)

    def _compare(self, point: LinearizationPoint) -> Verdict:
        """Verdict on numbers and gradients of a frame, by ``decode()`` and by ``instances()``.

        Both read the raw outputs of one new pass, not ``point.raw``: the plain pass may have run in
        another precision.
        """
        linearized = point.linearized
        if not point.has_trunk:
            linearized.recorded(point.inputs)
        with torch.enable_grad():
            theta = linearized.variables()
            on_call = linearized.substitute(theta)
            with linearized.rerun(point.inputs, on_call) as raw:
                decoded = point.z_of(raw)
            # from the graph alone: a gradient per tensor takes longer
            read = [leaves_read(tensor.sum()) for tensor in float_leaves(raw)]
            behind = [{name for name, w in theta.items() if id(w) in ids} for ids in read]
            self._upstream[point.logits is not None] = behind
            own = with_leaves(replace(point, raw=raw))
            z, boxes = _by_instance(own, on_call, torch.zeros_like(decoded))
            probe = torch.linspace(-1, 1, z.numel(), device=z.device).cos().reshape(z.shape)
            gradients = [
                _gradients((numbers * probe.to(numbers.dtype)).sum(), list(theta.values()))
                for numbers in (decoded, z)
            ]
        # instances() start at detached raw outputs: weights upstream of these get no gradient
        upstream = self.upstream(own, leaves_read(z))
        errors = {
            name: _gradient_error(whole, by_instance)
            for name, whole, by_instance in zip(theta, *gradients)
            if name not in upstream
        }
        tolerance = rounding_tolerance(linearized.weights.values())
        _check_numbers(point, z.detach(), decoded.detach(), tolerance)
        # a weight that instances() does not use matters to any of the boxes
        used = {name: boxes.get(name, len(z)) for name in errors}
        verdict = judge_weights(errors, used, tolerance)
        if verdict is Verdict.CONTRADICTS:
            wrong = [name for name, error in errors.items() if not error <= tolerance]
            raise BoxcovError(
                f"{method_name(point)} gives other gradients than {_oracle(point)} for "
                f"{join_names(wrong)}: is its crop too small, or its border off?"
            )
        return verdict


def _by_instance(
    point: LinearizationPoint, on_call: OnCall, z: Tensor
) -> tuple[Tensor, Counter[str]]:
    """z by instance (m, D), and the number of boxes that each weight was used for.

    z: zeros of the same shape.
    """
    boxes = Counter[str]()

    def count_boxes(name: str, call: LayerCall) -> Tensor:
        boxes[name] += call.batched_x.shape[0]
        return on_call(name, call)

    with LayerCallMode(point.linearized.names, count_boxes):
        for index, run in instance_groups(point) or []:
            z = z.index_copy(0, index, run())
    return z, boxes


def _check_numbers(point: LinearizationPoint, z: Tensor, decoded: Tensor, tolerance: float) -> None:
    """Raise unless the numbers (m, D) by instance are those by ``decode()``."""
    errors = box_errors(z, decoded, point.shadow)
    if not bool((errors <= tolerance).all()):  # values have no kinks: every box must agree
        row = int(errors.argmax())
        raise BoxcovError(
            f"{method_name(point)} gives box {row} as {z[row].tolist()}, {_oracle(point)} gives "
            f"{decoded[row].tolist()}"
        )


def _oracle(point: LinearizationPoint) -> str:
    return "decode()" if point.logits is None else "decode() with logits()"


def check_items(run: InstanceRun, detector_name: str) -> None:
    """Check that box i depends on item i of every layer and on no other item.

    Doubling some of the boxes must double the gradients of the same items. A factor of two is exact
    in every floating-point format, so rounding cannot make a correct detector fail. One pass for
    each binary digit of the box number tells any two boxes apart.
    """
    g, D = run.z.shape
    number = torch.arange(g, device=run.z.device)
    calls = [call for pairs in run.uses.values() for call, _ in pairs]
    edges = [edge for pairs in run.uses.values() for _, edge in pairs]

    def gradients(weight: Tensor) -> tuple[Tensor | None, ...]:
        seed = weight.to(run.z.dtype).unsqueeze(1).expand(g, D)
        return torch.autograd.grad(run.z, edges, seed, retain_graph=True, allow_unused=True)

    with torch.enable_grad():
        plain = gradients(torch.ones_like(number))
        for digit in range((g - 1).bit_length()):
            weight = 1 + (number >> digit) % 2
            for call, once, weighted in zip(calls, plain, gradients(weight)):
                if once is None or weighted is None:
                    continue
                expected = at_least_float32(call.batched_out(once))
                factor = weight.to(expected.dtype).reshape(-1, *[1] * (expected.dim() - 1))
                expected = expected * factor
                off = at_least_float32(call.batched_out(weighted)) - expected
                if float(off.norm()) > 1e-2 * float(expected.norm()):
                    raise BoxcovError(
                        f"{detector_name}.instances(): box i must depend on item i of every layer "
                        "alone, but items are mixed or in another order than the boxes"
                    )


def _gradients(number: Tensor, weights: list[Tensor]) -> list[Tensor | None]:
    if not number.requires_grad:
        return [None] * len(weights)
    return list(torch.autograd.grad(number, weights, retain_graph=True, allow_unused=True))


def _gradient_error(whole: Tensor | None, own: Tensor | None) -> float:
    if whole is None or float(whole.norm()) == 0:
        return 0.0
    return 1.0 if own is None else float((whole - own).norm()) / float(whole.norm())
