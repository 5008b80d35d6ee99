"""Engine: derivatives along posterior samples by tangents that pass through the network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from boxcov._torch.layers import LayerCall, LayerCallMode
from boxcov._torch.precision import Precision, at_least_float32, matrix_precision
from boxcov.predict.forward_mode.directions import Directions
from boxcov.predict.forward_mode.tangents import NoRule, Tangents, push_forward
from boxcov.predict.linearize import LinearizationPoint


class TangentPropagation:
    """Tangents along k directions through one pass, and the derivatives of the boxes from them."""

    def __init__(self, weights: Mapping[str, Tensor], precision: Precision = "float32") -> None:
        self.weights, self.precision = weights, precision
        self._given: Mapping[str, Tensor] = {}
        self._directions: Directions | None = None

    def tangents(
        self, etas: Mapping[str, Tensor], ends: frozenset[int] = frozenset()
    ) -> Tangents | None:
        """Tangents for the next pass, along ``etas`` (k, *shape) by name; None under autocast."""
        device = next(iter(self.weights.values())).device.type
        if not etas or torch.is_autocast_enabled(device):
            return None
        if self._directions is None or not _are_same(self._given, etas):
            self._given, self._directions = etas, Directions(etas, self.weights, self.precision)
        return Tangents(self._directions, ends)

    def derivatives(self, point: LinearizationPoint) -> Tensor | None:
        """J eta (m, D, k), with logits (m, D + 1, k); None if no raw output has tangents."""
        assert point.tangents is not None
        leaves, form = tree_flatten(point.raw)
        tangents = {
            i: t
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and (t := point.tangents.of(leaf)) is not None
        }
        if not tangents:
            return None

        def z(*primals: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for i, primal in zip(tangents, primals):
                filled[i] = primal
            return [point.z_of(tree_unflatten(filled, form))]

        with matrix_precision(self.precision):
            (u,) = push_forward(
                z,
                tuple(leaves[i] for i in tangents),
                tuple(t.to(leaves[i].dtype) for i, t in tangents.items()),
            )
        return self.rescale(at_least_float32(u).movedim(0, 2))

    def rescale(self, u: Tensor) -> Tensor:
        """Derivatives (..., k) along the directions, from those along the normalised tangents."""
        assert self._directions is not None
        return u * self._directions.scale.to(u.dtype)


def check_decode(point: LinearizationPoint) -> None:
    """Raise ``NoRule`` if decode() uses posterior weights, whose tangents would be missed."""

    def refuse(name: str, call: LayerCall) -> Tensor:
        raise NoRule(f"decode() uses {name}")

    with LayerCallMode(point.linearized.names, refuse):
        point.z_of(point.raw)


def _are_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in other)
