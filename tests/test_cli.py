from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest
import torch

import boxcov as package
from boxcov import cli, demo
from boxcov.report.bev import corners, ellipse
from command_line import boxcov


@pytest.fixture
def small(monkeypatch, tiny, train_frames) -> None:
    """The demo without its training."""
    monkeypatch.setattr(demo, "prepare", lambda: (tiny, train_frames[:16]))
    monkeypatch.setattr(demo, "posterior_of", lambda detector, frames: demo.fit(detector, frames, depth="neck", prior_precision=100.0))
    compare = demo.compare
    monkeypatch.setattr(demo, "compare", lambda detector, posterior: compare(detector, posterior, count=2, slow=1))


@pytest.mark.usefixtures("small")
def test_demo_writes_what_it_says(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["boxcov", "demo", "--out", str(tmp_path / "out"), "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == json.loads((tmp_path / "out" / "demo.json").read_text())
    by_method = {row["method"]: row for row in rows}
    assert by_method["exact"]["off"] == 0
    assert by_method["GLM (1 frames)"]["off"] < 1e-4
    assert by_method["MC-GLM, k = 10"]["off"] > by_method["MC-GLM, k = 100"]["off"]
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "posterior.safetensors").exists()


@pytest.mark.parametrize("verb", [verb.__name__ for verb in cli.EXAMPLES])
def test_help_has_an_example(verb) -> None:
    done = boxcov(verb, "--help")
    assert done.code == 0
    assert f"Example: boxcov {verb} " in done.out


def test_the_examples_are_words_that_the_verbs_know() -> None:
    for verb, example in cli.EXAMPLES.items():
        known = set(inspect.signature(verb).parameters)
        words = {word.removeprefix("--").replace("-", "_") for word in example.split() if word.startswith("--")}
        assert example.split()[1] == verb.__name__
        assert words <= known


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, boxcov.cli\nassert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    assert {*package._HOMES, "__version__"} == set(package.__all__) == set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_warnings_are_one_line() -> None:
    """In a process of its own: pytest has its own way with warnings."""
    code = """
import sys, warnings
from boxcov import BoxcovWarning, cli

def warned():
    warnings.warn("look", BoxcovWarning)

cli.EXAMPLES[warned] = ""
sys.argv = ["boxcov", "warned"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == "boxcov: look\n"


def test_import_needs_torch_numpy_and_safetensors_alone() -> None:
    """So that it runs on a bare machine: nothing else is imported by ``import boxcov``."""
    code = "import sys\nfor name in ('typer', 'rich', 'matplotlib', 'scipy', 'plotly', 'PIL'):\n    sys.modules[name] = None\nimport boxcov"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ellipse_is_that_of_the_covariance() -> None:
    covariance = torch.tensor([[4.0, 1.0], [1.0, 2.0]]).numpy()
    line = ellipse(torch.tensor([1.0, -1.0]).numpy(), covariance, 2.0)
    off = torch.as_tensor(line - [1.0, -1.0])
    mahalanobis = (off @ torch.linalg.inv(torch.as_tensor(covariance).double()) * off).sum(1).sqrt()
    assert torch.allclose(mahalanobis, torch.full_like(mahalanobis, 2.0))


def test_corners_turn_with_the_heading() -> None:
    ahead, left = corners(torch.tensor([[1.0, 2.0, 2.0, 4.0, 0.0], [1.0, 2.0, 2.0, 4.0, torch.pi / 2]]).numpy())
    assert ahead[:, 0].max() == pytest.approx(3)
    assert left[:, 1].max() == pytest.approx(4)
    assert left[:, 0].max() == pytest.approx(2)
