from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from boxcov import cli, demo
from boxcov.report.bev import corners, ellipse


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


def test_help_has_an_example() -> None:
    shown = subprocess.run([sys.executable, "-m", "boxcov", "demo", "--help"], capture_output=True, text=True, check=True)
    assert "Example: boxcov demo --out demo" in shown.stdout


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
