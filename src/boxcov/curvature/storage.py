"""One safetensors file a posterior: eigenbases as tensors, everything else as JSON in its header."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from boxcov.calibration import Calibration
from boxcov.curvature.blocks import Block, Eigen
from boxcov.curvature.fisher import Layer
from boxcov.curvature.layers import Geometry
from boxcov.curvature.posterior import Posterior
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.files import write_safetensors
from boxcov.frozen import fingerprint
from boxcov.version import __version__

FORMAT = 1  # "calibration" and "locations" came later and are optional: files without them are read, and older readers pass over them
REFINED = 2  # "corrected" and "full", which older readers must not pass over
_KEY = "boxcov.posterior"


@dataclass(frozen=True)
class Storage:
    """What a posterior weighs, in bytes."""

    factors: int  # as the paper counts: n_in^2 + n_out^2 for every layer, biases aside
    stored: int  # what the file holds: biases included, shared factors once
    weights: int  # the parameters that it is about

    def __str__(self) -> str:
        mib = [f"{size / 2**20:.2f}" for size in (self.factors, self.stored, self.weights)]
        return f"factors {mib[0]} MiB, stored {mib[1]} MiB, for weights of {mib[2]} MiB"


def storage(posterior: Posterior) -> Storage:
    """Storage figures.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> print(storage(boxcov.fit(TinyCenter(), shapes.frames(count=2))))
    factors 0.95 MiB, stored 0.73 MiB, for weights of 0.06 MiB
    """
    factors = weights = 0
    for block in posterior.blocks.values():
        layer, itemsize = block.layer, block.H.values.element_size()
        n_in = layer.n_in - (layer.bias is not None)
        factors += itemsize * layer.geometry.groups * (n_in**2 + layer.n_out**2)
        weights += itemsize * block.size
    stored = sum(t.numel() * t.element_size() for t in _tensors(posterior)[0].values())
    return Storage(factors, stored, weights)


def save(posterior: Posterior, path: str | Path) -> None:
    """Write the posterior: there whole or not at all."""
    tensors, numbers = _tensors(posterior)
    about = {
        "format": REFINED if any(block.refined for block in posterior.blocks.values()) else FORMAT,
        "version": __version__,
        "blocks": [_about(block, numbers) for block in posterior.blocks.values()],
        "n_data": posterior.n_data,
        "prior_precision": posterior.prior_precision,
        "fisher": posterior.fisher,
        "frames": posterior.frames,
        "loss": posterior.loss,
        "weights_sha256": posterior.fingerprint,
        "depth": posterior.depth,
        "locations": posterior.locations,
        "form": posterior.form,
        "jitter": posterior.jitter,
        "meta": dict(posterior.meta),
    }
    if posterior.calibration is not None:
        about["calibration"] = json.loads(posterior.calibration.to_json())
    write_safetensors(path, tensors, {_KEY: json.dumps(about)})


def load(path: str | Path, detector: Detector) -> Posterior:
    """Read a posterior for ``detector``; one that was made for other weights is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[_KEY])
            if about["format"] not in (FORMAT, REFINED):
                raise BoxcovError(
                    f"{path}: written by boxcov {about['version']} in format {about['format']}, this one reads up to {REFINED}"
                )
            check_fingerprint(about["weights_sha256"], detector, str(path))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        posterior = _posterior(about, tensors).to(next(detector.parameters()).device)
        return posterior.with_calibration(_calibration(path, about))
    except FileNotFoundError:
        raise BoxcovError(f"{path}: no such file") from None
    except BoxcovError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, OSError, AttributeError, RuntimeError) as error:
        raise BoxcovError(f"{path}: not a boxcov posterior, or a damaged one ({type(error).__name__}: {error})") from None


def _calibration(path: str | Path, about: dict[str, Any]) -> Calibration | None:
    try:
        return Calibration.from_json(json.dumps(about["calibration"])) if "calibration" in about else None
    except BoxcovError as error:
        raise BoxcovError(f"{path}: {error}") from None


def check_fingerprint(known: str, detector: Detector, what: str) -> None:
    """Refuse a posterior of other weights, with both fingerprints in the error."""
    own = fingerprint(detector)
    if own != known:
        raise BoxcovError(
            f"{what}: this posterior was made for weights with the fingerprint {known}, the detector's is {own}: "
            "load the weights it belongs to, or fit a new posterior"
        )


def _tensors(posterior: Posterior) -> tuple[dict[str, Tensor], dict[int, int]]:
    """The file's tensors, and the number of each distinct factor."""
    numbers: dict[int, int] = {}
    tensors = {}
    for block in posterior.blocks.values():
        for factor in (block.Q, block.H, block.full):
            if factor is not None and id(factor) not in numbers:
                number = numbers[id(factor)] = len(numbers)
                tensors[f"factor.{number}.vectors"] = factor.vectors
                tensors[f"factor.{number}.values"] = factor.values
        if block.corrected is not None:
            tensors[f"corrected.{block.layer.name}"] = block.corrected
    return tensors, numbers


def _about(block: Block, numbers: dict[int, int]) -> dict[str, Any]:
    layer = block.layer
    about: dict[str, Any] = {
        "weight": layer.weight,
        "bias": layer.bias,
        "shape": list(layer.shape),
        "geometry": asdict(layer.geometry),
        "Q": numbers[id(block.Q)],
        "H": numbers[id(block.H)],
        "square_norm": block.square_norm,
    }
    if block.full is not None:
        about["full"] = numbers[id(block.full)]
    return about


def _posterior(about: dict[str, Any], tensors: dict[str, Tensor]) -> Posterior:
    factors = {
        int(name.split(".")[1]): Eigen(tensor, tensors[name.replace("vectors", "values")])
        for name, tensor in tensors.items()
        if name.endswith(".vectors")
    }
    blocks = {}
    for entry in about["blocks"]:
        form = entry["geometry"]
        geometry = Geometry(tuple(form["kernel"]), groups=form["groups"], transposed=form["transposed"])
        layer = Layer(entry["weight"], entry["bias"], torch.Size(entry["shape"]), geometry)
        Q, H, full = factors[entry["Q"]], factors[entry["H"]], factors[entry["full"]] if "full" in entry else None
        for factor, n, side in ((Q, layer.n_in, "Q"), (H, layer.n_out, "H"), (full, layer.n_in * layer.n_out, "the Fisher")):
            expected = (geometry.groups, n, n)
            if factor is not None and (tuple(factor.vectors.shape) != expected or tuple(factor.values.shape) != expected[:2]):
                raise ValueError(f"{side} of {layer.name} has shape {tuple(factor.vectors.shape)}, expected {expected}")
        corrected = tensors.get(f"corrected.{layer.name}")
        if corrected is not None and tuple(corrected.shape) != (geometry.groups, layer.n_out, layer.n_in):
            raise ValueError(f"the corrected eigenvalues of {layer.name} have shape {tuple(corrected.shape)}")
        blocks[layer.name] = Block(layer, Q, H, entry["square_norm"], corrected, full)
    return Posterior(
        blocks=blocks,
        n_data=about["n_data"],
        prior_precision=about["prior_precision"],
        fisher=about["fisher"],
        frames=about["frames"],
        loss=about["loss"],
        fingerprint=about["weights_sha256"],
        depth=about["depth"],
        form=about["form"],
        jitter=about["jitter"],
        meta=about["meta"],
        locations=about.get("locations", "all"),
    )
