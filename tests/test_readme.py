"""The README's example runs, its commands exist, and CONTRIBUTING tells the truth."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from boxcov import Detections
from helpers.command_line import boxcov as run_boxcov

ROOT = Path(__file__).parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


README = (ROOT / "README.md").read_text()


def test_the_landing_page_is_short_and_complete() -> None:
    assert len(README.splitlines()) < 120
    assert (ROOT / "docs/images/drive.webp").stat().st_size < 1_500_000
    assert README.index("docs/images/drive.webp") < README.index("## ")  # before any heading
    for name in ("track.md", "gate.md", "CITATION.cff", "docs/results/reproduction.md"):
        assert name in README


def test_the_picture_moves() -> None:
    with Image.open(ROOT / "docs/images/drive.webp") as picture:
        assert picture.n_frames >= 20
        first = np.asarray(picture.convert("RGB"), dtype=int)
        picture.seek(picture.n_frames - 1)
        last = np.asarray(picture.convert("RGB"), dtype=int)
    assert (np.abs(first - last).max(2) > 60).mean() > 0.01


def numbers(text: str, name: str) -> list[float]:
    (line,) = re.findall(rf"^{name} .*?\[(.*?)\]", text, re.MULTILINE)
    return [float(word) for word in line.split()]


@pytest.mark.filterwarnings("ignore:the loss of 8 frames has a zero gradient")
def test_the_example_prints_what_the_page_shows(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 11
    scope: dict = {}
    exec(code, scope)
    found = scope["found"]
    assert found.covariance.shape == (len(found), 9, 9)
    assert 0.05 < float(found.std("x")[:4].median()) < 0.5
    assert 0.03 < float(found.region(0.9)[:4, 0].median()) < 0.3  # decimetres, as the README says
    assert float(found.risk[:4].min()) < 0.05 < 0.3 < float(found.risk[:4].max())
    assert (tmp_path / "posterior.safetensors").exists()
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == shown.splitlines()[0]
    for name in ("risk", "x ±"):  # the last digits depend on the processor
        assert numbers(printed, name) == pytest.approx(numbers(shown, name), abs=0.05)


def test_one_command_gives_calibrated_boxes_and_pictures(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (words,) = re.findall(r"^boxcov (.*?)  #", README, re.MULTILINE)
    done = run_boxcov(words.replace("--count 10", "--count 1"))
    assert done.code == 0, done.err
    assert "boxes in 1 frame, " in done.out
    assert Detections.load("boxes.safetensors").risk.min() < 0.2
    assert Image.open("boxes.gif").size[0] >= 640


@pytest.mark.parametrize("target", ["demo", "test", "docs", "pictures"])
def test_the_commands_exist(target: str) -> None:
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
