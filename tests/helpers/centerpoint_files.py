"""Checkpoint files of CenterPoint for tests: write them, and compare the boxes of two networks."""

from __future__ import annotations

import re
from math import pi

import torch

from boxcov.detectors.centerpoint.frameworks import layer_names


def saved(content, folder, name="x.pth"):
    """Write a checkpoint and return its path."""
    path = folder / name
    torch.save(content, path)
    return path


def same_boxes(a, b, slack=1e-4):
    yaw = (a[..., 6] - b[..., 6] + pi).remainder(2 * pi) - pi
    rest = [i for i in range(9) if i != 6]
    assert float(yaw.abs().max()) < slack
    torch.testing.assert_close(a[..., rest], b[..., rest], rtol=slack, atol=slack)


def exported(detector, framework, legacy=False):
    """Return a detector's weights in the names and conventions of a framework."""
    own, state = detector.state_dict(), {}
    generator = torch.Generator().manual_seed(0)
    for layer in layer_names(detector.config, framework):
        module = detector.get_submodule(layer.own)
        weight = own[f"{layer.own}.weight"]
        if hasattr(module, "kernel"):
            weight = weight.reshape(module.n_out, *module.kernel, module.n_in).permute(
                1, 2, 3, 4, 0
            )
        if framework == "openpcdet" and "deblocks" in layer.own and weight.shape[2:] == (1, 1):
            weight = weight.transpose(0, 1)
        state[f"{layer.foreign}.weight"] = weight
        if layer.own_norm is None:
            state[f"{layer.foreign}.bias"] = own[f"{layer.own}.bias"]
        else:
            for leaf in ("weight", "bias", "running_mean", "running_var"):
                state[f"{layer.foreign_norm}.{leaf}"] = own[f"{layer.own_norm}.{leaf}"]
            if framework != "mmdet3d" and ".linear" not in layer.own:
                bias = torch.randn(len(own[f"{layer.own_norm}.bias"]), generator=generator)
                state[f"{layer.foreign}.bias"] = bias
                state[f"{layer.foreign_norm}.running_mean"] = (
                    own[f"{layer.own_norm}.running_mean"] + bias
                )
    turned = framework == "det3d" or legacy
    for name, tensor in state.items():
        if re.search(r"\.rot\.[13]\.(weight|bias)$", name) and len(tensor) == 2:
            state[name] = (
                -tensor.flip(0)
                if turned
                else tensor.flip(0)
                if framework == "openpcdet"
                else tensor
            )
        if re.search(r"\.dim\.[13]\.(weight|bias)$", name) and len(tensor) == 3 and turned:
            state[name] = tensor[[1, 0, 2]]
    return state
