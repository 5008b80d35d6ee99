"""The guides run as they stand, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["your-detector.md"])
def test_the_blocks_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "guide"}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(blocks) > 5
    for block in blocks:
        exec(compile(block, page, "exec"), scope)
    out = capsys.readouterr().out
    found = scope["found"]
    assert len(found) > 2
    assert found.covariance.shape == (len(found), 4, 4)
    assert "WrappedNet: " in out
    # what the page shows is what it prints, but for numbers
    shown = re.findall(r"^  (?:ok|-)  .*$", (DOCS / page).read_text(), re.MULTILINE)
    printed = {re.sub(r"[\d.,e+-]+", "#", line) for line in out.splitlines()}
    assert {re.sub(r"[\d.,e+-]+", "#", line) for line in shown} <= printed
