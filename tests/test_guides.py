"""The guides run as they stand, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def run(page: str) -> dict:
    """All blocks of a page, one after another, in one scope."""
    scope: dict = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), scope)
    return scope


def test_a_detector_is_attached_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run("your-detector.md")["found"]
    out = capsys.readouterr().out
    assert len(found) > 2
    assert found.covariance.shape == (len(found), 4, 4)
    assert "WrappedNet: " in out
    # what the page shows is what it prints, but for numbers
    shown = re.findall(r"^  (?:ok|-)  .*$", (DOCS / "your-detector.md").read_text(), re.MULTILINE)
    assert len(shown) > 4
    printed = {re.sub(r"[\d.,e+-]+", "#", line) for line in out.splitlines()}
    assert {re.sub(r"[\d.,e+-]+", "#", line) for line in shown} <= printed


def test_the_formats_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = run("formats.md")["made"]
    assert made.R[0].diagonal().tolist() == pytest.approx([0.05, 0.05, 0.011])
    assert made.residual == "given"
    assert (tmp_path / "boxes.csv").exists()
    assert "['frame', 'label', 'class', 'score', 'x', 'y']" in capsys.readouterr().out
