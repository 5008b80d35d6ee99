"""Style rules that a machine can check: language, file names, sizes, one place for trust."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = ("tests", "benchmarks", "studies", "tools", "examples", "src/boxcov/report/assets")
OTHERS = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.*"))
    if path.suffix in (".py", ".html", ".js", ".css") and path != Path(__file__)
]
# Phrases that were invented where the field has words.
PHRASES = (
    r"leaves a method that is none",
    r"[Ww]hich weights what depends on",
    r"\bwhich is none\b",
    r"\bthat are none\b",
    r"\bin less room\b",
    r"all that is asked about",
    r"\b[Oo]f all that is drawn\b",
    r"\bdealt out\b",
    r"\bmay lose anything by\b",
    r"those of equal form together",
    r"\b(one )?row a (box|frame|kind|number|prediction|detection)\b",
    r"\ba frame costs\b",
    r"\b(is|are|was|never) told of\b",
    r"\bmade anew\b",
    r"\bas told\b",
    r"\bwhat there is to it\b",
    r"\bwhat other weights would give\b",
    r"\b(one|each) file a (format|verb|frame)\b",
    r"\bfrom here on\b",
)
PARTICIPLES = re.compile(r"(ing|ed|carried|together|frozen|drawn|told|held|kept|made|found)$")
NOUNS = {"matching", "training", "distributed", "simulated"}
TRUST = re.compile(r"\bself\._?(trusted|usable|known|suffice|stale)\b")
LONGEST_FILE = 400
LONGEST_TEST_NAME = 60


@pytest.mark.parametrize("phrase", PHRASES)
def test_phrases_that_no_textbook_prints_are_gone(phrase: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*SOURCES, *PAGES, *OTHERS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(phrase, line)
    ]
    assert not found, "\n".join(found)


def test_printed_percentages_have_a_space() -> None:
    keys = ROOT / "src/boxcov/evaluate/summary.py"  # of JSON, which the commands print with a space
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*SOURCES, *sorted((ROOT / "docs/guide").glob("*.md")))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if path != keys and re.search(r"\d%(?![0-9A-F]{2})", line) and "`coverage 90%" not in line
    ]
    assert not found, "\n".join(found)


def test_files_are_named_after_nouns() -> None:
    names = {path.stem for path in SOURCES} | {path.name for path in (ROOT / "src").rglob("*/")}
    assert not {name for name in names - NOUNS if PARTICIPLES.search(name)}


def test_no_two_files_differ_by_a_suffix() -> None:
    for folder in {path.parent for path in SOURCES}:
        stems = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
        pairs = [
            (one, other)
            for one in stems
            for other in stems
            if other in (f"{one}s", f"{one}ing", f"{one}ed", f"{one[:-1]}ies")
        ]
        assert not pairs, f"{folder.relative_to(ROOT)}: {pairs}"


def test_only_the_router_holds_trust() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {flag}"
        for path in SOURCES
        if path.parent.name != "route"
        for flag in TRUST.findall(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("paths", [SOURCES, TESTS], ids=["src", "tests"])
def test_no_file_has_more_than_400_lines(paths: list[Path]) -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE}


def test_names_of_tests_have_at_most_60_characters() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > LONGEST_TEST_NAME
    ]
    assert not long, "\n".join(long)
