"""The README's example runs, its commands exist, and CONTRIBUTING tells the truth."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.filterwarnings("ignore:the loss of 8 frames has a zero gradient")
def test_the_example_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 11
    scope: dict = {}
    exec(code, scope)
    found = scope["found"]
    assert found.covariance.shape == (len(found), 9, 9)
    assert 0.05 < float(found.std("x")[:4].median()) < 0.5
    assert 0.03 < float(found.region(0.9)[:4, 0].median()) < 0.3  # decimetres, as the README says
    assert float(found.risk[:4].min()) < 0.05 < 0.3 < float(found.risk[:4].max())
    assert (tmp_path / "posterior.safetensors").exists()
    assert "torch.Size" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_exist(target: str) -> None:
    assert f"make {target}" in (ROOT / "README.md").read_text()
    assert re.search(rf"^{target}: ", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w./]+/[\w./]*)`", CONTRIBUTING))))
def test_a_path_named_in_contributing_exists(path: str) -> None:
    assert any((place / path).exists() for place in (ROOT, ROOT / "src" / "boxcov"))


def test_contributing_answers_ten_questions() -> None:
    answers = re.findall(r"^\|(Where .*?\?)\|(.*)\|$", CONTRIBUTING, re.MULTILINE)
    assert len(answers) >= 10
    assert all("`" in answer for _, answer in answers)


def test_the_import_diagram_is_the_contract() -> None:
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    names = [
        layer.replace("boxcov.", "")
        for layer in layers["contracts"][0]["layers"]
        if layer != "boxcov.__main__"
    ]
    for page in (CONTRIBUTING, (ROOT / "docs/concepts/architecture.md").read_text()):
        assert "\n".join(names) in page
