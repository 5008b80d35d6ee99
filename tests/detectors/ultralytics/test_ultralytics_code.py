"""A .pt file of Ultralytics cannot run code: modules get their state, no constructor is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from boxcov import BoxcovError
from boxcov.detectors.ultralytics import checkpoints


class Call:
    """Stored as a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.parts = function, arguments

    def __reduce__(self) -> Any:
        return self.parts


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a file without Ultralytics itself; the network is returned as it is."""
    monkeypatch.setattr(checkpoints, "import_package", lambda name: None)
    monkeypatch.setattr(checkpoints, "wrap", lambda network, *_, **__: network)

    def loaded(content: Any) -> Any:
        torch.save(content, tmp_path / "x.pt")
        return checkpoints.load(tmp_path / "x.pt")

    return loaded


def test_a_network_is_made_from_its_state(load) -> None:
    network = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.SiLU())
    found = load({"model": network, "ema": None})
    assert [type(module) for module in found.modules()] == [type(m) for m in network.modules()]
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=0, atol=0)


def test_constructors_are_not_called(load) -> None:
    """That of a DetectionModel evaluates a text, that of an AutoBackend unpickles any file."""
    with pytest.raises(BoxcovError, match=r"x\.pt: calls torch\.nn\.modules\.linear\.Linear"):
        load({"model": Call(nn.Linear, 3, 4)})


def test_other_functions_are_refused(load, tmp_path) -> None:
    with pytest.raises(BoxcovError, match=r"x\.pt: (holds more than a network|not a)"):
        load({"model": Call(Path.touch, tmp_path / "ran")})
    assert not (tmp_path / "ran").exists()
