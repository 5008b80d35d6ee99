from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import boxcov as package
from boxcov.cli import app as cli
from boxcov.cli.command import typer_command
from boxcov.evaluate.geometry import corners, ellipse
from helpers.command_line import boxcov


@pytest.mark.parametrize("verb", [verb.__name__ for verb in cli.EXAMPLES])
def test_help_has_an_example(verb) -> None:
    done = boxcov(f"{verb} --help")
    assert done.code == 0
    assert f"Example: boxcov {verb} " in done.out


def test_examples_use_existing_options() -> None:
    for verb, example in cli.EXAMPLES.items():
        known = set(inspect.signature(typer_command(verb)).parameters)
        words = {
            word.removeprefix("--").replace("-", "_")
            for word in example.split()
            if word.startswith("--")
        }
        assert words <= known


def test_help_does_not_import_torch() -> None:
    code = """
import sys
from boxcov.cli.app import build_app

build_app()
assert not {"torch", "numpy", "matplotlib"} & set(sys.modules), sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_imports() -> None:
    assert {*package._HOMES, "__version__"} == set(package.__all__) == set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_warnings_are_one_line() -> None:
    """In a separate process, because pytest handles warnings itself."""
    code = """
import sys, warnings
from boxcov.cli import app as cli
from boxcov import BoxcovWarning

def warned() -> None:
    warnings.warn("look", BoxcovWarning)

cli.EXAMPLES[warned] = ""
sys.argv = ["boxcov", "warned"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == "boxcov: look\n"


def test_import_needs_only_torch_numpy_and_safetensors() -> None:
    """``import boxcov`` works without the packages of the extras."""
    code = """
import sys
for name in ("typer", "rich", "matplotlib", "scipy", "plotly", "PIL"):
    sys.modules[name] = None
import boxcov
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ellipse_matches_the_covariance() -> None:
    covariance = torch.tensor([[4.0, 1.0], [1.0, 2.0]]).numpy()
    line = ellipse(torch.tensor([1.0, -1.0]).numpy(), covariance, 2.0)
    off = torch.as_tensor(line - [1.0, -1.0])
    mahalanobis = (off @ torch.linalg.inv(torch.as_tensor(covariance).double()) * off).sum(1).sqrt()
    assert torch.allclose(mahalanobis, torch.full_like(mahalanobis, 2.0))


def test_corners_turn_with_the_heading() -> None:
    ahead, left = corners(
        torch.tensor([[1.0, 2.0, 2.0, 4.0, 0.0], [1.0, 2.0, 2.0, 4.0, torch.pi / 2]]).numpy()
    )
    assert ahead[:, 0].max() == pytest.approx(3)
    assert left[:, 1].max() == pytest.approx(4)
    assert left[:, 0].max() == pytest.approx(2)
