"""What a pass over the items has counted, as a checkpoint holds it: tensors and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from boxcov._torch.unfold import Layer
from boxcov.kfac.accumulate import Accumulator, Sums


class Counts(Protocol):
    """Sums that can be kept in a file, and gone on with from it."""

    @property
    def torn(self) -> bool:
        """Whether part of an item is in the sums: an interrupt that is asked for twice may come at any moment."""

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors by name, and what else there is to say, as JSON has it."""

    def unpack(self, file: Any, about: Mapping[str, Any]) -> None:
        """The way back, from an open safetensors file; what does not fit is a ValueError, and nothing is changed by it."""


class FactorCounts:
    """Of the first pass: the sums of every layer's factors.

    >>> from boxcov.kfac.subset import chosen_parameters
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> detector = TinyCenter()
    >>> FactorCounts(Accumulator(detector, chosen_parameters(detector, "head"))).packed()
    ({}, {'frames': 0, 'loss': 0.0, 'layers': []})
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self.accumulator = accumulator

    @property
    def torn(self) -> bool:
        return self.accumulator.torn

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, layers = _packed(self.accumulator.sums)
        return tensors, {
            "frames": self.accumulator.frames,
            "loss": self.accumulator.loss,
            "layers": layers,
        }

    def unpack(self, file: Any, about: Mapping[str, Any]) -> None:
        sums = {
            entry["weight"]: _unpacked(entry, file, self.accumulator) for entry in about["layers"]
        }
        frames = whole(about["frames"])
        if not isfinite(about["loss"]):
            raise ValueError(f"a loss of {about['loss']}")
        if not frames and any(one.locations for one in sums.values()):
            raise ValueError("sums of no frame")
        self.accumulator.restore(sums, frames, float(about["loss"]))


def whole(count: Any) -> int:
    """A number of things.

    >>> whole(3), whole(-1)
    Traceback (most recent call last):
    ...
    ValueError: a count of -1
    """
    if type(count) is not int or not 0 <= count < 1 << 53:
        raise ValueError(f"a count of {count!r}")
    return count


def sums_in(file: Any, name: str, shape: list[int], device: torch.device) -> Tensor:
    """A tensor of float64 sums, of which only the header is read before it fits."""
    piece = file.get_slice(name)
    if piece.get_shape() != shape or piece.get_dtype() != "F64":
        raise ValueError(
            f"{name} has shape {piece.get_shape()} and type {piece.get_dtype()}, expected {shape} and F64"
        )
    found: Tensor = file.get_tensor(name)
    if not bool(found.isfinite().all()):
        raise ValueError(f"{name} holds a NaN or an infinity")
    return found.to(device, copy=True)


def _packed(sums: Mapping[str, Sums]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The tensors of the file, and an entry for each layer; layers that read the same tensor have the same Q, which is written once."""
    tensors: dict[str, Tensor] = {}
    layers = []
    for number, one in enumerate(sums.values()):
        equal = (
            name
            for name, Q in tensors.items()
            if name.endswith("Q") and Q.shape == one.Q.shape and torch.equal(Q, one.Q)
        )
        known = next(equal, None)
        if known is None:
            tensors[known := f"{number}.Q"] = one.Q
        tensors[f"{number}.H"] = one.H
        layers.append(
            {
                **one.layer.to_json(),
                "Q": known,
                "H": f"{number}.H",
                "locations": one.locations,
                "reached": one.reached,
            }
        )
    return tensors, layers


def _unpacked(entry: Mapping[str, Any], file: Any, accumulator: Accumulator) -> Sums:
    layer = Layer.from_json(entry)
    for name, shape in (
        (layer.weight, tuple(layer.shape)),
        (layer.bias, (layer.geometry.groups * layer.n_out,)),
    ):
        if name is not None and (
            name not in accumulator.chosen or tuple(accumulator.chosen[name].shape) != shape
        ):
            raise ValueError(f"the detector has no parameter {name} of shape {shape}")
    groups, device = layer.geometry.groups, accumulator.device
    Q, H = (
        sums_in(file, entry[side], [groups, n, n], device)
        for side, n in (("Q", layer.n_in), ("H", layer.n_out))
    )
    return Sums(layer, Q, H, whole(entry["locations"]), bool(entry["reached"]))
