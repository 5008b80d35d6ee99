"""Signals of a CenterPoint: numbers per box that its maps contain but that are not reported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from boxcov._torch.process_state import at_least_float32
from boxcov.detector import Selection
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.decode import CellIndex, boxes_of, class_logits_at, values_at
from boxcov.detectors.centerpoint.network import TaskMaps
from boxcov.detectors.centerpoint.point_signals import point_signals
from boxcov.detectors.signals import (
    TINY,
    Signals,
    class_margin,
    finite,
    named,
    of_class,
    window,
    window_signals,
)

_NAMES = {
    "reg": ("x", "y"),
    "height": ("z",),
    "dim": ("l", "w", "h"),
    "rot": ("sin", "cos"),
    "vel": ("x", "y"),
}


def signals(
    tasks: Sequence[TaskMaps],
    points: Tensor | None,
    selection: Selection,
    config: Config,
) -> Signals:
    """Return named numbers (m,) of the selected boxes.

    The raw outputs at the box's cell; how far its neighbours disagree with it (``spread ...``, the
    root mean square over the 3 x 3 cells, weighted by their scores); the length of the heading
    vector; how far the peak of the heat map stands out; the margin to the next class; and how the
    points lie in the box.

    points: ``point_maps``, if there are points.
    """
    at, labels = selection.where, selection.labels
    row, column, inside = window(at.row, at.column, *tasks[0]["reg"].shape[2:])  # (m, 9)
    frame, task = (t[:, None].expand(-1, 9).flatten() for t in (at.frame, at.task))
    around = CellIndex(frame, task, row.flatten(), column.flatten())
    heat = at_least_float32(class_logits_at(tasks, around)).unflatten(0, (-1, 9))  # (m, 9, classes)
    logits = of_class(heat, labels)  # (m, 9)
    values = values_at(tasks, around, list(config.branches))
    windows = {name: at_least_float32(v).unflatten(0, (-1, 9)) for name, v in values.items()}
    length = windows["rot"].norm(dim=2, keepdim=True)
    direction = windows["rot"] / length.clamp(min=1e-12)
    names, compared = _compared({**windows, "rot": direction}, row, column, config)
    found = window_signals(logits, compared, inside, names)
    found["class margin"] = class_margin(heat[:, 4], labels)
    own = {name: branch[:, 4] for name, branch in windows.items()}
    for name, values in own.items():
        found |= named(name, _NAMES[name], values)
    found["heading length"] = (length[:, 4, 0] + TINY).log()
    if points is not None:
        boxes = boxes_of(own, at.row, at.column, config)
        found |= point_signals(points, boxes, at.frame, config)
    return finite(found)


def _compared(
    windows: dict[str, Tensor], row: Tensor, column: Tensor, config: Config
) -> tuple[list[str], Tensor]:
    """Return what is compared with the neighbours (m, 9, n), and its names.

    Centres are in metres, sizes in logarithms; ``rot`` holds directions of length 1.
    """
    reg = windows["reg"]
    centre = torch.stack(
        [(reg[:, :, 0] + column) * config.cell[0], (reg[:, :, 1] + row) * config.cell[1]], 2
    )
    names = ["x", "y", "z", "l", "w", "h", "sin", "cos"]
    every = [centre, windows["height"], windows["dim"], windows["rot"]]
    if "vel" in windows:
        names, every = [*names, "vx", "vy"], [*every, windows["vel"]]
    return names, torch.cat(every, 2)
