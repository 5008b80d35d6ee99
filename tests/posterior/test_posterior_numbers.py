"""Numbers of a posterior that would give wrong covariances are refused, also from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from boxcov import BoxcovError
from boxcov.detectors.tiny import TinyCenter
from boxcov.posterior.posterior import Posterior
from helpers.error_models import make_error_model

KEY = "boxcov.posterior"


def edit(path: Path, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Replace entries of a posterior's header and some of its tensors."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[KEY])
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file({**held, **tensors}, path, {KEY: json.dumps({**header, **about})})


def assert_refused(path: Path, detector: TinyCenter, words: str) -> None:
    with pytest.raises(BoxcovError, match=words) as error:
        Posterior.load(path, detector)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("tau", [1e45, 1e31, 1e-45, 0.0, -1.0, float("nan"), float("inf")])
def test_prior_precisions_out_of_range_are_refused(posterior, tau) -> None:
    with pytest.raises(BoxcovError, match="prior_precision must lie between 1e-30"):
        posterior.with_prior(tau)


def test_the_largest_prior_precision_gives_a_covariance(posterior) -> None:
    assert (posterior.with_prior(1e30).variances("head.shared.0") > 0).all()


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"n_data": 1e200}, "n_data times the Fisher"),
        ({"n_data": 1e16}, "n_data must be above 0 and at most 1e15"),
        ({"n_data": 10**400}, "expected a finite number"),
        ({"prior_precision": 1e45}, "prior_precision must lie between"),
        ({"blocks": []}, "it has no layers"),
        ({"blocks": {}}, "it has no layers"),
    ],
)
def test_headers_out_of_range_are_refused(tmp_path, tiny, posterior, about, words) -> None:
    path = tmp_path / "p.safetensors"
    posterior.save(path)
    edit(path, about, {})
    assert_refused(path, tiny, words)


@pytest.mark.parametrize("kind", ["equal columns", "one vector too short", "all 0.9", "zero"])
def test_vectors_that_are_not_orthonormal_are_refused(tmp_path, tiny, posterior, kind) -> None:
    path = tmp_path / "p.safetensors"
    posterior.save(path)
    with safe_open(path, framework="pt") as file:
        name = next(n for n in file.keys() if n.endswith(".vectors"))  # noqa: SIM118
        vectors = file.get_tensor(name)
    if kind == "equal columns":
        vectors[:, :, 1] = vectors[:, :, 0]
    elif kind == "one vector too short":
        vectors[:, :, 5] *= 0.95
    elif kind == "all 0.9":
        vectors = 0.9 * torch.ones_like(vectors)
    else:
        vectors = torch.zeros_like(vectors)
    edit(path, {}, {name: vectors.contiguous()})
    assert_refused(path, tiny, "not orthonormal")


def test_a_fisher_that_overflows_is_refused(tmp_path, tiny, posterior) -> None:
    path = tmp_path / "p.safetensors"
    posterior.save(path)
    with safe_open(path, framework="pt") as file:
        names = [n for n in file.keys() if n.endswith(".values")]  # noqa: SIM118
        values = {name: torch.full_like(file.get_tensor(name), 1e25) for name in names}
    edit(path, {}, values)
    assert_refused(path, tiny, "n_data times the Fisher")


def with_model(posterior: Posterior, **about: Any) -> Posterior:
    from dataclasses import replace

    fields = ("x", "y", "w", "h", "yaw")
    model = make_error_model(fields, ("car",), fingerprint=posterior.fingerprint)
    return posterior.with_error_model(replace(model, **about))


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"unit": torch.full((5,), 1e30)}, "unit of the error model is out of range"),
        ({"unit": torch.full((5,), 1e-30)}, "unit of the error model is out of range"),
        ({"dof": torch.full((5,), 2.0 + 1e-6)}, "dof of the error model is out of range"),
        ({"correlation": -torch.eye(5)}, "correlation of the error model is out of range"),
        ({"correlation": torch.ones(5, 5).triu()}, "correlation of the error model is out"),
        ({"correlation": 4e4 * torch.eye(5)}, "diagonal of the correlation of the error model"),
        ({"inputs": ("colour",)}, "inputs colour of the error model are unknown"),
        ({"inputs": ("class bus",)}, "inputs class bus of the error model are unknown"),
        ({"thresholds": (0.5, 0.4, 0.3)}, "thresholds .* do not rise from 0 to 1"),
    ],
)
def test_error_models_out_of_range_are_refused(tmp_path, tiny, posterior, about, words) -> None:
    path = tmp_path / "p.safetensors"
    with_model(posterior).save(path)
    Posterior.load(path, tiny)
    with_model(posterior, **about).save(path)
    assert_refused(path, tiny, words)
