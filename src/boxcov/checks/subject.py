"""The detector under check: its frame, and what earlier checks found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from boxcov._torch.modules import fresh, shadow
from boxcov.checks.report import Finding, LayerRow
from boxcov.detector import Detector, Selection


def good(seen: str, todo: str = "") -> Finding:
    return Finding("", True, seen, todo)


def bad(seen: str, todo: str) -> Finding:
    return Finding("", False, seen, todo)


def form_of(value: Any) -> Any:
    """The shape of a tensor, else the type's name."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


class NotChecked(Exception):
    """Raised when a check lacks what it needs, for example because an earlier one failed."""


class Pass(NamedTuple):
    """What a second pass through the network did."""

    raw: Any
    inputs: Any  # after the pass
    changed: list[str]  # parameters and buffers that it has written to


@dataclass
class Subject:
    """A detector and a frame. ``raw``, ``selection`` and ``boxes`` are filled by the checks."""

    original: Detector
    inputs: Any
    targets: Any
    other: tuple[Any, Any] | None  # another frame
    reference: Tensor | None
    raw: Any = None
    second: Pass | None = None
    selection: Selection | None = None
    boxes: Tensor | None = None
    repeatable: bool = False
    loss: Tensor | None = None
    layers: list[LayerRow] = field(default_factory=list)
    # per floating-point raw output: does it depend on the weights?
    moving: list[bool] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        first = next(iter((*self.original.parameters(), *self.original.buffers())), None)
        return torch.device("cpu") if first is None else first.device

    def shadow(self) -> Detector:
        """A twin of the detector in eval mode that shares its weights and buffers."""
        return shadow(self.original)

    def second_pass(self) -> Pass:
        """Run the network once more, the first time that this is called; restore its state."""
        self.needed_raw()
        if self.second is None:
            before, inputs = Snapshot(self.original), fresh(self.inputs)
            with torch.no_grad():
                raw = self.shadow()(inputs)
            self.second = Pass(raw, inputs, before.changed())
            before.restore()
        return self.second

    def moving_floats(self) -> list[bool]:
        """Which floats of the raw outputs depend on the weights; all of them if that is unknown."""
        count = len(named_floats(self.needed_raw()))
        known = any(self.moving) and len(self.moving) == count
        return self.moving if known else [True] * count

    def needed_raw(self) -> Any:
        if self.raw is None:
            raise NotChecked("needs the raw outputs of forward()")
        return self.raw

    def needed_selection(self) -> Selection:
        if self.selection is None:
            raise NotChecked("needs the instances of select()")
        return self.selection

    def needed_boxes(self) -> Tensor:
        if self.boxes is None:
            raise NotChecked("needs the boxes of decode()")
        return self.boxes

    def needed_loss(self) -> Tensor:
        if self.loss is None:
            raise NotChecked("needs the loss of the frame")
        return self.loss


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals NaN, and 0 differs from -0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two pytrees hold the same tensors, bit for bit."""
    ours, theirs = (
        [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (a, b)
    )
    return len(ours) == len(theirs) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))
        for x, y in zip(ours, theirs)
    )


def named_floats(tree: Any) -> list[tuple[str, Tensor]]:
    """The floating-point tensors of a pytree, each with its path, as in ``['heat'][0]``."""
    found = tree_flatten_with_path(tree)[0]
    return [
        ("".join(str(step) for step in path), leaf)
        for path, leaf in found
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def moved(raw: Any, directions: list[Tensor], step: float) -> Any:
    """The raw outputs, each floating-point tensor moved along its direction."""
    following = iter(directions)

    def move(leaf: Any) -> Any:
        return (
            leaf.detach() + step * next(following)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
            else leaf
        )

    return tree_map(move, raw)


def size_problem(fields: Sequence[str], boxes: Tensor) -> str:
    """Name the first box (m, D) of negative size; nothing if there is none.

    An image box may be empty: clipping at the border makes such boxes.

    >>> size_problem(("x1", "y1", "x2", "y2"), torch.tensor([[30.0, 20.0, 8.0, 24.0]]))
    'x2 < x1 in 1 of 1 boxes, e.g. box 0: x1 30, y1 20, x2 8, y2 24'
    """
    column = dict(zip(fields, boxes.unbind(1)))
    wrong = {
        f"{end} < {start}": column[end] < column[start]
        for start, end in (("x1", "x2"), ("y1", "y2"))
        if {start, end} <= set(fields)
    }
    wrong |= {f"{size} <= 0": column[size] <= 0 for size in ("w", "l", "h") if size in column}
    for what, is_wrong in wrong.items():
        rows = is_wrong.nonzero()[:, 0].tolist()
        if rows:
            box = ", ".join(f"{name} {x:.4g}" for name, x in zip(fields, boxes[rows[0]].tolist()))
            return f"{what} in {len(rows)} of {len(boxes)} boxes, e.g. box {rows[0]}: {box}"
    return ""


def nearest(found: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Return the relative distance of each box to the nearest of the others, and its row."""
    if not len(there):
        return found.new_full((len(found),), torch.inf), found.new_zeros(0, dtype=torch.long)
    size = found.abs().amax(0).clamp(min=1e-6)
    distance, row = ((found[:, None] - there).abs() / size).amax(2).min(1)
    return distance, row


class Snapshot:
    """A snapshot of a detector's parameters and buffers, to compare with and to restore."""

    def __init__(self, detector: nn.Module) -> None:
        self.modules = dict(detector.named_modules())
        self.tensors = [
            (module, kind, name, tensor, None if tensor is None else tensor.detach().clone())
            for module in self.modules.values()
            if not isinstance(module, torch.jit.ScriptModule)
            for kind in ("_parameters", "_buffers")
            for name, tensor in getattr(module, kind).items()
        ]

    def changed(self) -> list[str]:
        """Names of the tensors that have changed."""
        names = {id(module): name for name, module in self.modules.items()}
        return [
            f"{names[id(module)]}.{name}".lstrip(".")
            for module, kind, name, tensor, copy in self.tensors
            if getattr(module, kind).get(name) is not tensor or not same_bits(tensor, copy)
        ]

    def restore(self) -> None:
        """Restore the snapshot; unchanged tensors are not written to."""
        for module, kind, name, tensor, copy in self.tensors:
            getattr(module, kind)[name] = tensor
            if not same_bits(tensor, copy):
                tensor.data.copy_(copy)


@contextmanager
def keep_state(detector: nn.Module) -> Iterator[None]:
    """Restore weights, buffers, modes and random state at the end of the block."""
    state, modes = Snapshot(detector), {module: module.training for module in detector.modules()}
    devices = {
        tensor.device for tensor in (*detector.parameters(), *detector.buffers()) if tensor.is_cuda
    }
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            state.restore()
            for module, training in modes.items():
                if module.training != training:
                    module.training = training
