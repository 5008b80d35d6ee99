"""Posterior files: one safetensors file, eigenbases as tensors and the rest as JSON metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from boxcov._files.input_file import conform, open_tensors
from boxcov._files.output_file import to_json, write_safetensors
from boxcov._torch.modules import check_fingerprint
from boxcov.detector import Detector, check_configuration, own_configuration
from boxcov.error_model.model_file import error_model_text, read_error_model
from boxcov.errors import BoxcovError, BoxcovWarning, join_names
from boxcov.posterior.compress import TENSORS, PackedFactor, check_packed
from boxcov.posterior.kronecker_block import (
    MAX_PRECISION,
    Eigendecomposition,
    KroneckerBlock,
    Layer,
)
from boxcov.posterior.posterior import FisherKind, Form, Posterior
from boxcov.version import __version__

FORMAT = 1  # "error_model", "skipped" and "configuration" are optional
CORRECTED = 2  # with the eigenvalues of EKFAC; the "full" Fishers of boxcov 0.1 are left out
PACKED = 3  # compressed factors, and "error"
SHIPPED = Path(__file__).parents[1] / "detectors/centerpoint/weights/small-posterior.safetensors"
_KEY = "boxcov.posterior"
_PROBES = 4
_ORTHONORMAL = 1e-2  # rounding is at most 1e-4 for 3,500 eigenvectors of float32
_ERROR_MODEL = "error_model."  # prefix of its tensors
# entries of the header that are fields of Posterior under the same name
_ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("n_data", "loss", "jitter"), float),
    **dict.fromkeys(("frames", "skipped"), int),
    "fisher": FisherKind,
    "form": Form,
    "meta": dict[str, Any],
    "prior_precision": float | dict[str, float],
}


@dataclass(frozen=True)
class Storage:
    """The size of a posterior, in bytes."""

    factors: int  # as in the paper: n_in^2 + n_out^2 per layer, without biases
    stored: int  # in the file: with biases, shared factors once
    weights: int  # the parameters themselves

    def __str__(self) -> str:
        mib = [f"{size / 2**20:.2f}" for size in (self.factors, self.stored, self.weights)]
        return f"factors {mib[0]} MiB, stored {mib[1]} MiB, for weights of {mib[2]} MiB"


def storage(posterior: Posterior) -> Storage:
    """Return the size of a posterior."""
    factors = weights = 0
    for block in posterior.blocks.values():
        layer, itemsize = block.layer, block.H.values.element_size()
        n_in = layer.n_in - (layer.bias is not None)
        factors += itemsize * layer.geometry.groups * (n_in**2 + layer.n_out**2)
        weights += itemsize * block.size
    stored = sum(t.numel() * t.element_size() for t in _tensors(posterior)[0].values())
    return Storage(factors, stored, weights)


def save(posterior: Posterior, path: str | Path) -> None:
    """Write the posterior; the file replaces ``path`` as a whole."""
    tensors, numbers = _tensors(posterior)
    about = {
        "format": _format(posterior),
        "version": __version__,
        "blocks": [
            {
                **block.layer.to_json(),
                "Q": numbers[id(block.Q)],
                "H": numbers[id(block.H)],
                "square_norm": block.square_norm,
            }
            for block in posterior.blocks.values()
        ],
        "weights_sha256": posterior.fingerprint,
        "depth": posterior.depth,
        "configuration": dict(posterior.configuration),
        **{name: getattr(posterior, name) for name in _ENTRIES},
    }
    if posterior.error_model is not None:
        about["error_model"] = error_model_text(posterior.error_model)
        own = posterior.error_model.to("cpu").tensors()
        tensors |= {f"{_ERROR_MODEL}{name}": tensor.contiguous() for name, tensor in own.items()}
    if posterior.error:
        about["error"] = posterior.error if isfinite(posterior.error) else None
    write_safetensors(path, tensors, {_KEY: to_json(about)})


def _format(posterior: Posterior) -> int:
    if any(block.Q.packed is not None for block in posterior.blocks.values()):
        return PACKED
    return CORRECTED if posterior.ekfac_layers else FORMAT


def load(path: str | Path, detector: Detector) -> Posterior:
    """Load a posterior for ``detector``; raise if its weights or its configuration differ."""
    path = SHIPPED if str(path) == "small" else path
    with open_tensors(path, "a boxcov posterior", _KEY) as (about, file):
        if about["format"] not in (FORMAT, CORRECTED, PACKED):
            raise BoxcovError(
                f"{path}: written by boxcov {about['version']} in format {about['format']}, "
                f"this version reads up to {PACKED}: update boxcov"
            )
        _check_header(about, detector, str(path))
        # clones are aligned like new tensors: the alignment decides how products round
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        shapes = {
            name: tuple(p.shape) for name, p in detector.named_parameters(remove_duplicate=False)
        }
        posterior = _posterior(about, tensors, shapes).to(next(detector.parameters()).device)
        if "error_model" not in about:
            return posterior
        error_model = read_error_model(about["error_model"], _under(_ERROR_MODEL, tensors))
        return posterior.with_error_model(error_model)


def named_detector(path: str | Path) -> str:
    """Return the ``--detector`` that the file of a posterior names; "" if it was made in Python."""
    with open_tensors(path, "a boxcov posterior", _KEY) as (about, _):
        return str(conform(about["meta"], dict[str, Any], "meta").get("detector", ""))


def _check_header(about: Mapping[str, Any], detector: Detector, path: str) -> None:
    """Raise if a file belongs to another detector; warn of what it lacks and what is left out."""
    check_fingerprint(about["weights_sha256"], detector, path)
    if "configuration" in about:
        saved = conform(about["configuration"], dict[str, str], "configuration")
        check_configuration(saved, detector.configuration(), path)
    elif own := own_configuration(detector):
        message = (
            f"{path}: an older boxcov wrote it and did not store the configuration of the detector "
            f"({', '.join(sorted(own)[:3])} ...): make sure that it is the one of the fit, and "
            "save the posterior again"
        )
        warn(message, BoxcovWarning, stacklevel=4)
    left_out = []  # of boxcov 0.1
    if about.get("calibration") is not None:
        left_out.append("its calibration (run `boxcov calibrate` again)")
    full = [str(entry["weight"]) for entry in about["blocks"] if "full" in entry]
    if layers := join_names([name.removesuffix(".weight") for name in full]):
        left_out.append(f"the full Fisher of {layers} (Q (x) H is used there)")
    if left_out:
        message = f"{path}: boxcov 0.1 wrote it, and this version leaves out "
        warn(message + " and ".join(left_out), BoxcovWarning, stacklevel=4)


def _under(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``start``, without it."""
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(start)}
    return {name.removeprefix(start): tensor for name, tensor in own.items()}


def _tensors(posterior: Posterior) -> tuple[dict[str, Tensor], dict[int, int]]:
    """Return the tensors of the file, and the number of each distinct factor by id."""
    numbers: dict[int, int] = {}
    tensors: dict[str, Tensor] = {}
    for block in posterior.blocks.values():
        for factor in (block.Q, block.H):
            if id(factor) not in numbers:
                number = numbers[id(factor)] = len(numbers)
                held = {"vectors": factor.vectors, "values": factor.values}
                held = held if factor.packed is None else factor.packed.tensors()
                tensors |= {f"factor.{number}.{name}": tensor for name, tensor in held.items()}
        if block.ekfac_eigenvalues is not None:
            tensors[f"corrected.{block.layer.name}"] = block.ekfac_eigenvalues
    return tensors, numbers


def _posterior(
    about: dict[str, Any], tensors: dict[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> Posterior:
    about = {"skipped": 0, "error": 0.0, "configuration": {}, **about}
    values = {name: conform(about[name], kind, name) for name, kind in _ENTRIES.items()}
    if not about["blocks"]:
        raise ValueError("it has no layers")
    factors: dict[tuple[int, int], Eigendecomposition] = {}
    blocks: dict[str, KroneckerBlock] = {}
    for entry in about["blocks"]:
        layer = Layer.from_json(entry)  # checked first: it decides the size of packed factors
        if shapes.get(layer.weight) != tuple(layer.shape) or layer.name in blocks:
            raise ValueError(
                f"{layer.weight} of shape {tuple(layer.shape)} is not a weight of the detector, "
                "or occurs twice"
            )
        block = blocks[layer.name] = _block(layer, entry, tensors, factors)
        largest = values["n_data"] * float(block.curvature.max())
        if not largest <= MAX_PRECISION:
            raise ValueError(
                f"n_data times the Fisher of {layer.name} is {largest:g}, "
                f"at most {MAX_PRECISION:g} is possible"
            )
    return Posterior(
        blocks=blocks,
        fingerprint=about["weights_sha256"],
        depth=str(about["depth"]),
        configuration=about["configuration"],
        error=float("inf") if about["error"] is None else conform(about["error"], float, "error"),
        **values,
    )


def _block(
    layer: Layer,
    entry: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    factors: dict[tuple[int, int], Eigendecomposition],
) -> KroneckerBlock:
    """Return the block of one header entry; ``factors`` (by number, size) are shared by blocks."""
    groups, n_in, n_out = layer.geometry.groups, layer.n_in, layer.n_out
    pair = []
    for key, n in (("Q", n_in), ("H", n_out)):
        own = entry[key], n
        if own not in factors or len(factors[own].values) != groups:
            factors[own] = _factor(tensors, entry[key], groups, n, f"{key} of {layer.name}")
        pair.append(factors[own])
    Q, H = pair
    eigenvalues = tensors.get(f"corrected.{layer.name}")
    if eigenvalues is not None:
        what = f"the corrected eigenvalues of {layer.name}"
        _check_numbers(eigenvalues, (groups, n_out, n_in), Q.values.dtype, what, 0)
    square_norm = conform(entry["square_norm"], float, "square_norm")
    return KroneckerBlock(layer, Q, H, square_norm, eigenvalues)


def _factor(
    tensors: Mapping[str, Tensor], number: int, groups: int, n: int, what: str
) -> Eigendecomposition:
    """Read one factor; a packed one is checked before memory is allocated for it."""
    held = _under(f"factor.{int(number)}.", tensors)
    if "vectors" in held:
        factor = Eigendecomposition(held["vectors"], held["values"])
    else:
        packed = PackedFactor(n, **{name: held[name] for name in TENSORS})
        check_packed(packed, groups, what)
        factor = Eigendecomposition(*packed.unpack(), packed)
    vectors, values = factor.vectors, factor.values
    _check_numbers(vectors, (groups, n, n), values.dtype, what, -1.001)
    _check_numbers(values, (groups, n), vectors.dtype, f"the eigenvalues of {what}", 0)
    if factor.packed is None:
        _check_orthonormal(vectors, what)
    return factor


def _check_numbers(
    numbers: Tensor, shape: tuple[int, ...], dtype: torch.dtype, what: str, lowest: float
) -> None:
    found = tuple(numbers.shape), numbers.dtype
    if found != (shape, dtype) or dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{what} has shape {found[0]} and {found[1]}, not {shape} and {dtype}")
    if not bool(((numbers >= lowest) & numbers.isfinite()).all()):
        raise ValueError(f"{what} holds a NaN, an infinity or a number below {lowest}")


def _check_orthonormal(vectors: Tensor, what: str) -> None:
    """Raise ValueError unless ``V^T V x = x`` for random x: n^2 steps, not the n^3 of V^T V."""
    G, n, _ = vectors.shape
    generator = torch.Generator().manual_seed(0)
    x = vectors.new_empty(G, n, _PROBES).normal_(generator=generator)
    error = float((vectors.transpose(1, 2) @ (vectors @ x) - x).norm(dim=1).max())
    if not error <= _ORTHONORMAL:
        raise ValueError(f"{what} has eigenvectors that are not orthonormal (off by {error:.3g})")
