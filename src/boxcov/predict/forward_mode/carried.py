"""When to carry tangents beside the plain pass: once they have been compared with ``vmap(jvp)``, and never where they have no rule."""

from __future__ import annotations

from collections.abc import Mapping
from warnings import warn

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from boxcov._torch.layer_calls import LayerCall, LayerCallMode
from boxcov._torch.precision import at_least_float32
from boxcov.errors import BoxcovWarning
from boxcov.predict.cuda.graphs import Precision
from boxcov.predict.forward_mode.tangents import Etas, NoRule, Tangents, pushed
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector

_SLACK: dict[Precision, float] = {
    "float32": 3e-2,
    "tf32": 3e-2,
    "half": 0.15,
}  # an activation at its kink may fall to either side


class Carried:
    """What is known of carrying tangents through a detector so far."""

    def __init__(self, precision: Precision = "float32") -> None:
        self.precision = precision
        self.usable, self.trusted = True, False
        self._ends: frozenset[int] = frozenset()
        self._etas: Mapping[str, Tensor] | None = None
        self._directions: Etas | None = None
        self._names: dict[int, str] | None = None

    def along(
        self,
        linearized: LinearizedDetector,
        etas: Mapping[str, Tensor],
        ends: frozenset[int] = frozenset(),
    ) -> Tangents | None:
        """For the coming pass; ``ends`` as ``Tangents`` has them."""
        kind = next(iter(linearized.weights.values())).device.type
        if not self.usable or not etas or torch.is_autocast_enabled(kind):
            return None
        if (
            self._directions is None
            or self._names is not linearized.names
            or ends != self._ends
            or not _same(self._etas, etas)
        ):
            self.trusted &= self._directions is None or ends == self._ends
            self._ends, self._etas, self._names = ends, etas, linearized.names
            self._directions = Etas(etas, linearized.weights, self.precision)
        return Tangents(self._directions, ends)

    def derivatives(self, point: LinearizationPoint) -> Tensor | None:
        """J eta (m, D, k), with logits (m, D + 1, k), from the tangents of the raw outputs; None if that is not all there is to it."""
        assert point.tangents is not None
        leaves, form = tree_flatten(point.raw)
        tangents = [
            point.tangents.of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves
        ]
        moving = [i for i, t in enumerate(tangents) if t is not None]
        if not moving or self._decoded_by_weights(point):
            return None

        def z(*primals: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for i, primal in zip(moving, primals):
                filled[i] = primal
            return [point.z_of(tree_unflatten(filled, form))]

        primals = tuple(leaves[i] for i in moving)
        try:
            (u,) = pushed(z, primals, tuple(tangents[i].to(leaves[i].dtype) for i in moving))  # type: ignore[union-attr]
        except NoRule:
            self.usable = False
            return None
        return self.scaled(at_least_float32(u).movedim(0, 2))

    def scaled(self, u: Tensor) -> Tensor:
        """Derivatives (..., k) along the directions themselves, of those along what was carried."""
        assert self._directions is not None
        return u * self._directions.scale.to(u.dtype)

    def compare(self, fast: Tensor, plain: Tensor) -> bool:
        """Both ways (m, D, k) must agree on most boxes; if they do, they are trusted from here on.

        Not on all: the plain way may compute the network anew in TF32, and an activation that lies at its kink falls to either side.
        """
        off = (fast - plain).flatten(1).norm(dim=1) / plain.flatten(1).norm(dim=1).clamp(min=1e-30)
        agreed = int((off <= _SLACK[self.precision]).sum())
        self.trusted = agreed >= 0.75 * len(off)
        if not self.trusted and len(off) >= 8:  # of fewer boxes nothing is concluded
            self.usable = False
            warn(
                f"derivatives carried beside the plain pass are off those of forward-mode differentiation for {len(off) - agreed} of {len(off)} "
                "boxes, so the latter are used, which are slower: does the network write into tensors that it has handed on?",
                BoxcovWarning,
                stacklevel=4,
            )
        return self.trusted

    def _decoded_by_weights(self, point: LinearizationPoint) -> bool:
        """Whether decode() makes use of the weights, too: their tangents would be missed. Seen once."""
        if self.trusted:
            return False
        used: list[str] = []

        def seen(name: str, call: LayerCall) -> Tensor:
            used.append(name)
            return call()

        with LayerCallMode(point.linearized.names, seen):
            point.z_of(point.raw)
        if used:
            self.usable = False
        return bool(used)


def _same(one: Mapping[str, Tensor] | None, other: Mapping[str, Tensor]) -> bool:
    return (
        one is not None
        and one.keys() == other.keys()
        and all(one[name] is other[name] for name in other)
    )
