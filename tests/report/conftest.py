from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from boxcov.report.page import write
from helpers.browser import Browser
from helpers.viewer_page import STUDY, choose, still


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    window = Browser(tmp_path_factory.mktemp("profile"))
    yield window
    window.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "report.html"
    write(path, STUDY, replicates=2)
    return path


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Browser]:
    """The study's page, freshly opened; any message on the console is a failure."""
    browser.open(file)
    still(browser)
    choose(browser, "score-filter", 0)
    yield browser
    assert browser.complaints() == []
