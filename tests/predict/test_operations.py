"""The error model is many small operations, and their number decides its time."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import boxcov
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint.point_signals import point_maps
from boxcov.predict.predictor import add_signals


class Operations(TorchDispatchMode):
    """Counts the operations that compute: views take no launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


def counted(run) -> int:
    run()  # constants are made once
    with torch.no_grad(), Operations() as operations:
        run()
    return operations.count


def test_few_operations_per_frame() -> None:
    detector = centerpoint.load("small")
    posterior = boxcov.Posterior.load("small", detector)
    points = simulated.frames("clear", seed=11, count=1)[0][0]
    found = boxcov.ExactGLM(detector, posterior.with_error_model(None))(points)
    network = detector.fused_network(points)
    packed = network.pack(points)
    with torch.no_grad():
        raw, _ = network(*packed)
        raw["signal inputs"] = network.signal_inputs(*packed)
        selection = detector.select(raw)
        signals = detector.signals(raw, selection)
        found = add_signals(found, {name: s[: len(found)] for name, s in signals.items()})
    config = detector.config
    assert counted(lambda: point_maps(*packed, 1, config)) <= 30
    assert counted(lambda: detector.signals(raw, selection)) <= 190
    assert counted(lambda: posterior.error_model.apply(found, check=False)) <= 115
