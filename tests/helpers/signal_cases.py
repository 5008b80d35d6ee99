"""What every ``Detector.signals`` promises, and a slow oracle for windows of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from math import exp, log
from typing import Any

import torch
from torch import Tensor

from boxcov import Detector, Selection
from boxcov.detectors.signals import TINY


def reordered(selection: Selection, order: Tensor) -> Selection:
    """Return the rows ``order`` of a selection."""

    def take(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part[order]
        if isinstance(part, tuple):
            return tuple(take(each) for each in part)
        if is_dataclass(part) and not isinstance(part, type):
            return replace(part, **{f.name: take(getattr(part, f.name)) for f in fields(part)})
        return part  # proposals of all boxes

    return take(selection)


@torch.no_grad()
def assert_promises(detector: Detector, batch: Any, frames: Sequence[Any]) -> None:
    """Assert that signals are finite, per box, and those of the box's own frame."""
    raw = detector(batch)
    selection = detector.select(raw)
    found = detector.signals(raw, selection)
    assert len(selection) > 3
    for name, values in found.items():
        assert values.shape == (len(selection),), name
        assert values.dtype in (torch.float32, torch.float64), name
        assert bool(values.isfinite().all()), name
    order = torch.randperm(len(selection), generator=torch.Generator().manual_seed(0))
    assert_equal(
        detector.signals(raw, reordered(selection, order)),
        {name: values[order] for name, values in found.items()},
    )
    empty = detector.signals(raw, reordered(selection, order[:0]))
    assert list(empty) == list(found)
    assert all(values.shape == (0,) for values in empty.values())
    for b, frame in enumerate(frames):
        alone = detector(frame)
        own = selection.frame == b
        assert_equal(
            detector.signals(alone, detector.select(alone)),
            {name: values[own] for name, values in found.items()},
        )


def assert_equal(found: dict[str, Tensor], expected: dict[str, Any], atol: float = 1e-3) -> None:
    assert list(found) == list(expected)
    for name, values in found.items():
        wanted = torch.as_tensor(expected[name]).to(values)
        torch.testing.assert_close(
            values, wanted, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def slow_window(
    logits: list[float], values: list[list[float]], own: int, names: Sequence[str]
) -> dict[str, float]:
    """Return what ``window_signals`` gives, from the neighbours that exist, ``own`` among them."""
    others = [logit for i, logit in enumerate(logits) if i != own]
    weights = [1 / (1 + exp(-logit)) for logit in logits]
    found = {
        "logit": logits[own],
        "peak over mean": logits[own] - sum(others) / len(others),
        "peak over highest": logits[own] - max(others),
    }
    for k, name in enumerate(names):
        squares = [w * (v[k] - values[own][k]) ** 2 for w, v in zip(weights, values)]
        found[f"spread {name}"] = 0.5 * log(sum(squares) / sum(weights) + TINY)
    return found
