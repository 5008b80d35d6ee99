"""The code of the documentation runs as it is printed, and the pages keep the house rules.

Blocks marked ``python`` run; blocks marked ``py`` need data that the tests do not have.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from boxcov.error_model import network

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAMES = [str(page.relative_to(DOCS)) for page in PAGES]
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]


def run(page: str) -> dict:
    """Run all blocks of a page in one scope."""
    scope: dict = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), scope)
    return scope


@pytest.mark.parametrize(
    "page", [name for name, page in zip(NAMES, PAGES) if "```python\n" in page.read_text()]
)
@pytest.mark.filterwarnings("ignore::boxcov.errors.BoxcovWarning")
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(network, "EPOCHS", 2)  # the quality of an error model is tested elsewhere
    scope = run(page)
    found = scope.get("found")
    assert found is None or found.covariance.shape[1:] == (len(found.fields),) * 2
    if page == "guide/track.md":
        assert scope["measured"].R[0].diagonal().tolist() == pytest.approx([0.05, 0.05, 0.011])
    if page == "guide/formats.md":
        assert (tmp_path / "boxes.csv").exists()


@pytest.mark.parametrize("page", [*PAGES, *ROOT_PAGES], ids=lambda page: page.name)
def test_a_page_is_short(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= 1500
    assert [line for line in text.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("page", [*PAGES, *ROOT_PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        is_generated = target.endswith("command-line.md") or "notebooks/" in target
        assert is_generated or (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, *ROOT_PAGES], ids=lambda page: page.name)
def test_paths_in_the_text_exist(page: Path) -> None:
    places = (ROOT, ROOT / "src" / "boxcov")
    named = re.findall(
        r"`((?:tests|src)/[\w/.]*|[\w/]+/\w+\.(?:py|safetensors))`", page.read_text()
    )
    for path in named:
        assert any((place / path).exists() for place in places), f"{page.name} names {path}"
