"""The time after all work of a device is done."""

from __future__ import annotations

from time import perf_counter

import torch


def seconds(device: torch.device | str) -> float:
    """Return the time of a clock in seconds, once a GPU has finished what it was given."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
