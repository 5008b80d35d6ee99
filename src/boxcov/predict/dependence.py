"""Which weights what depends on: found once from autograd's graph, when ``ExactGLM`` meets its first boxes, with a check of ``instances``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from boxcov._torch.layer_calls import LayerCallMode
from boxcov.detector import Detector, InstanceGroup
from boxcov.errors import BoxcovError, join_names
from boxcov.predict.linearize import LinearizationPoint


@dataclass(frozen=True)
class Trace:
    """For each floating-point tensor of the raw outputs, in their order, the weights that it depends on."""

    upstream: tuple[frozenset[str], ...]

    def knows(self, raw: Any) -> bool:
        """Whether raw outputs of another frame have the form of those that were traced."""
        return len(floats(raw)) == len(self.upstream)

    def upstream_of(self, raw: Any, read: set[int]) -> set[str]:
        """The weights behind those tensors of ``raw`` that were ``read`` (by id)."""
        return {
            name
            for tensor, names in zip(floats(raw), self.upstream)
            if id(tensor) in read
            for name in names
        }


def floats(raw: Any) -> list[Tensor]:
    """The floating-point tensors of a pytree, in order.

    >>> len(floats({"a": torch.zeros(1), "b": [torch.zeros(1, dtype=torch.long), torch.ones(2)]}))
    2
    """
    return [t for t in tree_leaves(raw) if isinstance(t, Tensor) and t.is_floating_point()]


def instances_of(point: LinearizationPoint) -> Iterable[InstanceGroup] | None:
    """The instance groups of a frame, with the score logit if the point has logits; None if the detector has none."""
    detector = point.linearized.shadow
    if point.logits is None:
        return detector.instances(point.raw, point.selection)
    return detector.instances(point.raw, point.selection, with_logit=True)


def groups(point: LinearizationPoint) -> list[InstanceGroup]:
    """The instances of a frame, group by group, checked to be each there once."""
    found = [(index, run) for index, run in instances_of(point) or [] if len(index)]
    index = torch.cat([index for index, _ in found]) if found else torch.zeros(0)
    if sorted(index.tolist()) != list(range(len(point.selection))):
        raise BoxcovError(
            f"{_asked(point)} must give each of the {len(point.selection)} instances once, it gave {len(index)}"
        )
    return found


def leaves_read(boxes: Tensor) -> set[int]:
    """Ids of the leaves that ``boxes`` depend on, by a walk over their graph.

    >>> x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> leaves_read(2 * x) == {id(x)}
    True
    """
    found: set[int] = set()
    seen: set[Any] = set()
    todo: list[Any] = [boxes.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [following for following, _ in node.next_functions]
    return found


def trace(point: LinearizationPoint) -> Trace:
    """What the raw outputs depend on; raises if ``instances`` contradicts ``decode``."""
    linearized = point.linearized
    with torch.enable_grad():
        theta = {name: w.requires_grad_() for name, w in linearized.theta().items()}
        answer = linearized.exchanged(theta)
        raw, decoded = linearized.run(point.inputs, answer, lambda raw: (raw, point.z_of(raw)))
        upstream = tuple(_behind(tensor, theta) for tensor in floats(raw))
        # both from the raw outputs of this pass: in another precision than the plain pass they are not quite those of the point
        own_raw = replace(
            point,
            raw=tree_map_only(
                Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), raw
            ),
        )
        boxes = torch.zeros_like(decoded)
        with LayerCallMode(linearized.names, answer):
            for index, run in groups(own_raw):
                boxes = boxes.index_copy(0, index, run())
        probe = (
            torch.linspace(-1, 1, boxes.numel(), device=boxes.device)
            .cos()
            .reshape(boxes.shape)
            .to(boxes.dtype)
        )
        weights = list(theta.values())
        whole, own = (_gradients((z * probe).sum(), weights) for z in (decoded, boxes))
    found = Trace(upstream)
    # a weight before the cut has no gradient by instance: it is counted elsewhere
    behind = found.upstream_of(own_raw.raw, leaves_read(boxes))
    _check_agreement(
        point,
        decoded,
        boxes,
        {name: (w, o) for name, w, o in zip(theta, whole, own) if name not in behind},
    )
    return found


def _behind(tensor: Tensor, theta: dict[str, Tensor]) -> frozenset[str]:
    if not tensor.requires_grad:
        return frozenset()
    return frozenset(
        name
        for name, g in zip(theta, _gradients(tensor.sum(), list(theta.values())))
        if g is not None
    )


def _gradients(number: Tensor, weights: list[Tensor]) -> list[Tensor | None]:
    if not number.requires_grad:
        return [None] * len(weights)
    return list(torch.autograd.grad(number, weights, retain_graph=True, allow_unused=True))


def _check_agreement(
    point: LinearizationPoint,
    decoded: Tensor,
    boxes: Tensor,
    gradients: dict[str, tuple[Tensor | None, Tensor | None]],
) -> None:
    """``instances`` must give the boxes of ``decode``, and the same gradients: crops too small or borders forgotten show here."""
    slack = _slack(point.linearized.theta().values())
    who, whole_map = _asked(point), "decode()" if point.logits is None else "decode() with logits()"
    if not torch.allclose(boxes, decoded, rtol=slack, atol=slack):
        row = int((boxes - decoded).abs().amax(1).argmax())
        raise BoxcovError(
            f"{who} gives box {row} as {boxes[row].tolist()}, {whole_map} gives {decoded[row].tolist()}"
        )
    wrong = []
    for name, (whole, own) in gradients.items():
        if whole is None or float(whole.norm()) == 0:
            continue
        if own is None or float((whole - own).norm()) > slack * float(whole.norm()):
            wrong.append(name)
    if wrong:
        raise BoxcovError(
            f"{who} gives other gradients than {whole_map} for {join_names(wrong)}: is its crop too small, or its border off?"
        )


def _slack(weights: Iterable[Tensor]) -> float:
    """The relative difference that rounding may cause. The weights decide: a head in bfloat16 may well decode its boxes in float32."""
    return max(1e-2, 64 * max(torch.finfo(w.dtype).eps for w in weights))


def _asked(point: LinearizationPoint) -> str:
    with_logit = "" if point.logits is None else "with_logit=True"
    kind = type(point.linearized.shadow)
    if kind.instances is Detector.instances:  # derived from the stages, so these are wrong
        return f"{kind.__name__}.stages()"
    return f"{kind.__name__}.instances({with_logit})"
