"""Run an exported ONNX file in onnxruntime and compare it with PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from boxcov import Detections
from boxcov.predict.static_frame import ERROR_OUTPUTS


@dataclass
class File:
    """An exported file, run by onnxruntime; the arguments are its inputs, in order."""

    path: Path

    def __post_init__(self) -> None:
        runtime = pytest.importorskip("onnxruntime")
        self.session = runtime.InferenceSession(str(self.path), providers=["CPUExecutionProvider"])

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        given = {
            put.name: value.numpy()
            for put, value in zip(self.session.get_inputs(), inputs, strict=True)
        }
        names = [out.name for out in self.session.get_outputs()]
        return dict(zip(names, map(torch.from_numpy, self.session.run(None, given))))


def check_rows(found: dict[str, Tensor], expected: Detections, slack: float = 1e-3) -> None:
    """Check that the rows are the detector's boxes, as many as fit, then padding."""
    n = int(found["count"])
    assert n == min(len(expected), len(found["scores"]))
    assert int(found["left_off"]) == len(expected) - n
    assert found["labels"][:n].tolist() == expected.labels[:n].tolist()
    for name in ("boxes", "scores", "covariance"):
        own = getattr(expected, name)[:n].unsqueeze(1).flatten(1)
        off, size = (found[name][:n].unsqueeze(1).flatten(1) - own).norm(dim=1), own.norm(dim=1)
        assert bool((off <= slack * size).all()), f"{name}: {(off / size).max():.1e} off"
        assert not bool(found[name][n:].any())
    assert found["labels"][n:].tolist() == [-1] * (len(found["labels"]) - n)
    if expected.no_object is None:
        assert not set(ERROR_OUTPUTS) & set(found)
        return
    if n < len(expected):  # neighbours of a box were left off, so its risk is another
        return
    for name in ERROR_OUTPUTS:
        own = getattr(expected, name)
        assert (own is None) == (name not in found)
        if own is not None:
            torch.testing.assert_close(found[name][:n], own, rtol=2e-3, atol=1e-5)
            assert not bool(found[name][n:].any())
