"""Advice in messages works wherever boxcov came from: it names packages that PyPI has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from boxcov.errors import BoxcovError, import_package

ROOT = Path(__file__).parents[1]
SOURCES = {path: path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# heavy, or for one function only: no extra of boxcov installs them
OTHERS = {"supervision", "fiftyone"}


def advised() -> set[str]:
    """The packages that messages tell the reader to install."""
    found = set()
    for text in SOURCES.values():
        for line in re.findall(r"pip install ([a-z][\w -]*)", text):
            found |= set(line.split())
        for name in re.findall(r'import_package\("(\w+)', text):
            if name != "no_such_package":
                found.add({"rerun": "rerun-sdk", "PIL": "pillow", "yaml": "pyyaml"}.get(name, name))
    return found - {"no_such_package"}


def test_nothing_advises_an_extra_of_boxcov() -> None:
    """It is not on PyPI: a package does work, and so does an extra of a checkout, '.[cli]'."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    texts = {**SOURCES, **{path: path.read_text() for path in pages}}
    assert not [
        path.name for path, text in texts.items() if re.search(r"install\s+['\"]?boxcov\[", text)
    ]


def test_advised_packages_are_those_that_boxcov_uses() -> None:
    known = {re.split(r"[<>=\[]", line)[0] for lines in EXTRAS.values() for line in lines}
    assert advised() <= known | OTHERS
    assert {"rerun-sdk", "pandas", "scipy"} <= advised()


def test_missing_submodules_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rerun.blueprint", None)
    with pytest.raises(BoxcovError, match=r"^rerun is not installed: pip install rerun-sdk$"):
        import_package("rerun.blueprint")
