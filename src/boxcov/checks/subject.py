"""The detector under check: its frame, and what earlier checks found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only

from boxcov._torch.modules import fresh, has_writes, shadow, versions
from boxcov.checks.report import Finding, LayerRow
from boxcov.detector import Detector, Selection

T = TypeVar("T")


def good(seen: str, todo: str = "") -> Finding:
    return Finding("", True, seen, todo)


def bad(seen: str, todo: str) -> Finding:
    return Finding("", False, seen, todo)


def one_line(error: Exception) -> str:
    """The type and the first line of an error; an adapter may raise one without a text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def form_of(value: Any) -> Any:
    """The shape of a tensor, else the type's name."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


class NotChecked(Exception):
    """Raised when a check lacks what it needs, for example because an earlier one failed."""


class Pass(NamedTuple):
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
    device: torch.device
    raw: Any = None
    selection: Selection | None = None
    boxes: Tensor | None = None
    repeatable: bool = False
    loss: Tensor | None = None
    layers: list[LayerRow] = field(default_factory=list)
    # per floating-point raw output: does it depend on the weights?
    moving: list[bool] = field(default_factory=list)

    def shadow(self) -> Detector:
        """A twin of the detector in eval mode that shares its weights and buffers."""
        return shadow(self.original)

    @property
    def covered(self) -> list[LayerRow]:
        """The layers that a posterior can hold."""
        return [row for row in self.layers if not row.reason]

    @cached_property
    def second(self) -> Pass:
        """What a second pass through the network does; its state is restored."""
        self.needed_raw()
        before, inputs = Snapshot(self.original), fresh(self.inputs)
        with torch.no_grad():
            raw = self.shadow()(inputs)
        second = Pass(raw, inputs, before.changed())
        before.restore()
        return second

    def moving_floats(self) -> list[bool]:
        """Which floats of the raw outputs depend on the weights; all of them if that is unknown."""
        count = len(named_floats(self.needed_raw()))
        known = any(self.moving) and len(self.moving) == count
        return self.moving if known else [True] * count

    def needed_raw(self) -> Any:
        return _needed(self.raw, "the raw outputs of forward()")

    def needed_selection(self) -> Selection:
        return _needed(self.selection, "the instances of select()")

    def needed_boxes(self) -> Tensor:
        return _needed(self.boxes, "the boxes of decode()")

    def needed_loss(self) -> Tensor:
        return _needed(self.loss, "the loss of the frame")


def _needed(value: T | None, what: str) -> T:
    if value is None:
        raise NotChecked(f"needs {what}")
    return value


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


def writes_to(tree: Any, run: Callable[[], T]) -> tuple[T, bool]:
    """Run a function without gradients; return its result and whether it wrote to ``tree``."""
    before = versions(tree)
    with torch.no_grad():
        found = run()
    return found, has_writes(before)


def named_floats(tree: Any) -> list[tuple[str, Tensor]]:
    """The floating-point tensors of a pytree, each with its path, as in ``['heat'][0]``."""
    return [
        ("".join(map(str, path)), leaf)
        for path, leaf in tree_flatten_with_path(tree)[0]
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def map_floats(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a pytree with another tensor in place of each floating-point one."""
    return tree_map_only(Tensor, lambda t: change(t) if t.is_floating_point() else t, tree)


def moved(raw: Any, directions: list[Tensor], step: float = 1.0) -> Any:
    """The raw outputs, each floating-point tensor moved along its direction."""
    following = iter(directions)
    return map_floats(lambda leaf: leaf.detach() + step * next(following), raw)


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
        if rows := is_wrong.nonzero()[:, 0].tolist():
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
    tensors = (*detector.parameters(), *detector.buffers())
    with torch.random.fork_rng(devices={tensor.device for tensor in tensors if tensor.is_cuda}):
        try:
            yield
        finally:
            state.restore()
            for module, training in modes.items():
                if module.training != training:
                    module.training = training
