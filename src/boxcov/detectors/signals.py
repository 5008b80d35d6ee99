"""Signals that several families share: numbers per box that a network computes but does not report.

A window is the n cells around a box's cell, with that cell in the middle. All functions avoid
copies to the device and shapes that depend on values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from boxcov._torch.process_state import at_least_float32
from boxcov.detectors.boxes import centres, iou
from boxcov.detectors.pyramid import level_of

Signals = dict[str, Tensor]
TINY = 1e-6
FIELDS = ("x", "y", "w", "h")
RAW_NAMES = ("reg x", "reg y", "dim w", "dim h")  # raw offset of the centre and log size
SIDES = ("left", "top", "right", "bottom")
_LIMIT = 1e6
_NEAR_BORDER = 0.005  # of the image's side


def named(prefix: str, names: Iterable[str], columns: Tensor) -> Signals:
    """Return the columns of a tensor (m, k) under the names ``"prefix name"``."""
    return {f"{prefix} {name}": column for name, column in zip(names, columns.unbind(1))}


def finite(signals: Signals) -> Signals:
    """Return the signals in float32 or float64, clamped to +-1e6: saturated logits are infinite."""
    rows = torch.stack([at_least_float32(row) for row in signals.values()])
    return dict(zip(signals, rows.clamp(-_LIMIT, _LIMIT).unbind(0)))


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a few whole numbers on the device, copied there once: every frame needs them.

    >>> constant((-1, 0, 1), torch.device("cpu"))
    tensor([-1,  0,  1])
    """
    return torch.tensor(values, device=device)


# classes and scores


def softmax_logit(logits: Tensor, number: Tensor) -> Tensor:
    """Return the logit (m,) of each row's softmax score of class ``number`` (m,).

    logits: (m, n) of all classes.
    """
    rest = logits.scatter(1, number.unsqueeze(1), -torch.inf).logsumexp(1)
    return logits.gather(1, number.unsqueeze(1))[:, 0] - rest


def of_class(values: Tensor, number: Tensor) -> Tensor:
    """Return the values (m, n) of class ``number`` (m,), from those of all classes (m, n, k)."""
    return values.gather(2, number[:, None, None].expand(-1, values.shape[1], 1))[:, :, 0]


def logit_of_log(log_p: Tensor) -> Tensor:
    """Return the logit of a probability, given its logarithm."""
    return log_p - (-torch.expm1(log_p)).log()


def class_margin(logits: Tensor, number: Tensor, background: int | None = None) -> Tensor:
    """Return the logit of class ``number`` (m,) minus the highest other one; 0 for one class.

    logits: (m, classes); the column ``background`` is not a class.
    """
    if logits.shape[1] - (background is not None) < 2:
        return logits.new_zeros(len(logits))
    lowest = torch.finfo(logits.dtype).min
    others = logits.scatter(1, number[:, None], lowest)
    if background is not None:
        others[:, background] = lowest
    return logits.gather(1, number[:, None])[:, 0] - others.amax(1)


def class_signals(logits: Tensor, number: Tensor, background: int | None = None) -> Signals:
    """Return margins and the entropy of the softmax of class logits (m, classes)."""
    logits = logits.clamp(-_LIMIT, _LIMIT)
    found = {
        "class margin": class_margin(logits, number, background),
        "class entropy": -(logits.softmax(1) * logits.log_softmax(1)).sum(1),
    }
    if background is not None:
        own = logits.gather(1, number[:, None])[:, 0]
        found["background margin"] = own - logits[:, background]
    return found


# neighbours on a map


def window(
    row: Tensor, column: Tensor, height: int | Tensor, width: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows and columns (m, 9) of the 3 x 3 windows, clamped to the map, and which lie in it.

    height, width: of the map, or (m, 1) of each box's map.
    """
    rows = row[:, None] + constant((-1, -1, -1, 0, 0, 0, 1, 1, 1), row.device)
    columns = column[:, None] + constant((-1, 0, 1) * 3, row.device)
    near_rows, near_columns = _clamp(rows, height), _clamp(columns, width)
    return near_rows, near_columns, (rows == near_rows) & (columns == near_columns)


def _clamp(index: Tensor, size: int | Tensor) -> Tensor:
    """Return the nearest index of a map with this size."""
    if isinstance(size, int):
        return index.clamp(0, size - 1)
    return index.clamp(min=0).minimum(size - 1)


@dataclass(frozen=True)
class PyramidWindow:
    """The 3 x 3 cells around m boxes, each on its own level of a pyramid."""

    level: Tensor  # (m,)
    index: Tensor  # (m, 9) among all cells or anchors
    row: Tensor  # (m, 9) on the level
    column: Tensor  # (m, 9)
    inside: Tensor  # (m, 9)


def pyramid_window(
    index: Tensor, shapes: Sequence[Sequence[int]], per_cell: Sequence[int] | None = None
) -> PyramidWindow:
    """Return the windows around cells (m,), counted level by level and row by row.

    shapes: height and width of each level. per_cell: anchors of each cell, by level; the neighbours
    of an anchor are the anchors of the same form.
    """
    counts = [1] * len(shapes) if per_cell is None else list(per_cell)
    sizes = [h * w * n for (h, w), n in zip(shapes, counts)]
    starts = [sum(sizes[:level]) for level in range(len(sizes))]
    level = level_of(index, sizes)

    def of_level(numbers: Sequence[int]) -> Tensor:
        """Look the numbers up without a copy to the device."""
        found = torch.full_like(index, numbers[0])
        for i, n in enumerate(numbers[1:], 1):
            found = torch.where(level == i, n, found)
        return found[:, None]  # (m, 1)

    height, width = (of_level([shape[axis] for shape in shapes]) for axis in (0, 1))
    start, count = of_level(starts), of_level(counts)
    place = index[:, None] - start
    cell, form = place // count, place % count
    rows, columns, inside = window((cell // width)[:, 0], (cell % width)[:, 0], height, width)
    around = start + (rows * width + columns) * count + form
    return PyramidWindow(level, around, rows, columns, inside)


def peak(logits: Tensor, inside: Tensor) -> Signals:
    """Return how far the logit in the middle of windows (m, n) stands above the others."""
    middle = logits.shape[1] // 2
    own, around = logits[:, middle], inside.clone()
    around[:, middle] = False
    mean = (logits * around).sum(1) / around.sum(1).clamp(min=1)
    highest = logits.masked_fill(~around, torch.finfo(logits.dtype).min).amax(1)
    highest = torch.where(around.any(1), highest, own)
    return {"peak over mean": own - mean, "peak over highest": own - highest}


def deviation(values: Tensor, own: Tensor, weight: Tensor) -> Tensor:
    """Return the log of the weighted root mean square distance (m, k) of neighbours.

    values: (m, n, k) of the neighbours. own: (m, k) of the box itself. weight: (m, n).
    """
    apart = (values - own[:, None]).clamp(-_LIMIT, _LIMIT)
    square = apart.square() * weight[:, :, None]
    mean = square.sum(1) / weight.sum(1, keepdim=True).clamp(min=TINY)
    return 0.5 * (mean + TINY).log()


def window_signals(
    logits: Tensor, values: Tensor, inside: Tensor, names: Iterable[str] = FIELDS
) -> Signals:
    """Return the logit, how far its peak stands out, and how far the neighbours disagree.

    logits: (m, n) of the scores. values: (m, n, k), which ``spread ...`` compares, weighted by the
    scores. inside: (m, n) which neighbours exist.
    """
    middle, logits = logits.shape[1] // 2, logits.clamp(-_LIMIT, _LIMIT)
    spread = deviation(values, values[:, middle], logits.sigmoid() * inside)
    return {"logit": logits[:, middle], **peak(logits, inside), **named("spread", names, spread)}


# neighbours by overlap


def neighbour_signals(
    boxes: Tensor, others: Tensor, logits: Tensor, *, own: Tensor, inside: Tensor
) -> Signals:
    """Return how many of n candidates overlap each box, and how far they disagree with it.

    boxes: (m, 4), x1 y1 x2 y2. others: (m, n, 4). logits: (m, n) of the candidates' scores.
    own: (m,) the box itself among them. inside: (m, n) which candidates count.
    """
    overlap = iou(boxes[:, None], others) * inside
    weight = overlap * logits.sigmoid()
    spread = deviation(with_log_size(centres(others)), with_log_size(centres(boxes)), weight)
    # a last column, so that the maximum exists where there is no candidate at all
    rest = F.pad(overlap.scatter(1, own[:, None], -1.0), (0, 1), value=-2.0)
    highest, nearest = rest.max(1)
    logit, theirs = (logits.gather(1, i[:, None])[:, 0] for i in (own, nearest))
    return {
        "candidates": weight.sum(1).log1p(),
        "nearest overlap": highest.clamp(min=0),
        "nearest margin": logit - theirs,
        **named("spread", FIELDS, spread),
    }


# boxes in images


def with_log_size(boxes: Tensor) -> Tensor:
    """Return boxes (..., 4), centre and size, with the logarithm of the size."""
    return torch.cat([boxes[..., :2], boxes[..., 2:].clamp(min=TINY).log()], -1)


def touched_sides(
    boxes: Tensor, width: float | Tensor = 1.0, height: float | Tensor = 1.0
) -> Tensor:
    """Return the number (m,) of the image's sides that boxes x1 y1 x2 y2 touch.

    width, height: of the image, or (m,) of each box's image.
    """
    x1, y1, x2, y2 = boxes.unbind(1)
    left, right, low, high = (x1 / width, 1 - x2 / width, y1 / height, 1 - y2 / height)
    return sum((side < _NEAR_BORDER).to(boxes.dtype) for side in (left, right, low, high))  # type: ignore[return-value]
