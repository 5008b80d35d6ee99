"""Mutation tests: every promise has a test that fails without the code that keeps it.

Each mutant is one small change to a copy of the project, with the test that must fail.
"""

from __future__ import annotations

import ast
import compileall
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from mutants.all import MUTANTS, SOAK
from mutants.mutant import Mutant

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns("__pycache__", ".*_cache")


def mutated(mutant: Mutant, text: str) -> str:
    """Return the text with the mutant's change, found regardless of line breaks and spaces."""
    if text.count(mutant.old) == 1:
        return text.replace(mutant.old, mutant.new)
    found = layout_free(mutant.old).findall(text)
    assert len(found) == 1, (
        f"{mutant.path}: {mutant.old!r} is there {len(found)} times: the list of mutants is stale"
    )
    return text.replace(found[0], mutant.new)


def layout_free(code: str) -> re.Pattern[str]:
    """Return a pattern of the same tokens, with any line breaks between them."""
    tokens = re.findall(r"\w+|[^\w\s]", code)
    parts = [re.escape(tokens[0])]
    for before, token in itertools.pairwise(tokens):
        if token in ")]}" and before != ",":
            parts.append(r"\s*,?\s*")  # a trailing comma comes with a line break
        else:
            apart = before[-1:].isalnum() and token[:1].isalnum()
            parts.append(r"\s+" if apart else r"\s*")
        parts.append(re.escape(token))
    return re.compile("".join(parts))


def outcome(
    root: Path, tests: Iterable[str], env: Mapping[str, str]
) -> tuple[int, dict[str, int], str]:
    """Return the tests' exit code in ``root``, the number of tests by result, and the output."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "slow or not slow",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        *(f"tests/{test}" for test in tests),
    ]
    own = {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        words, cwd=root, env={**os.environ, **own}, capture_output=True, text=True, timeout=3000
    )
    counts = re.findall(
        r"(\d+) (passed|failed|error|skipped)", done.stdout.splitlines()[-1] if done.stdout else ""
    )
    return done.returncode, {kind: int(count) for count, kind in counts}, done.stdout + done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project to change."""
    root = tmp_path_factory.mktemp("project")
    for name in ("src", "tests", "tools", "examples", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=IGNORED)
    for name in ("pyproject.toml", "README.md", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    compileall.compile_dir(root / "src", quiet=2)  # once, not for every mutant
    return root


def test_the_changes_are_changes_of_this_code() -> None:
    """Every mutant's text occurs once in the source."""
    for mutant in MUTANTS:
        compile(mutated(mutant, (ROOT / mutant.path).read_text()), mutant.path, "exec")
    assert len({(mutant.path, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_every_mutant_names_a_test() -> None:
    for mutant in MUTANTS:
        path, _, name = mutant.test.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert name.partition("[")[0] in functions, f"{mutant.promise}: no test {mutant.test}"


@pytest.mark.slow
def test_all_pass_without_a_change(project) -> None:
    code, counts, said = outcome(project, sorted({mutant.test for mutant in MUTANTS}), SOAK)
    assert code == 0, said[-3000:]
    assert set(counts) == {"passed"}, counts  # none is skipped


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.promise)
def test_without_the_code_its_test_fails(project, mutant: Mutant) -> None:
    path = project / mutant.path
    text, times = path.read_text(), path.stat()
    path.write_text(mutated(mutant, text))
    try:
        code, counts, said = outcome(
            project, [mutant.test], {"PYTHONDONTWRITEBYTECODE": "1", **mutant.env}
        )
    finally:
        path.write_text(text)
        os.utime(
            path, ns=(times.st_atime_ns, times.st_mtime_ns)
        )  # what was compiled from it is good again
    assert code == 1, f"{mutant.promise}: no test noticed: {said[-2000:]}"
    assert counts.get("failed", 0) > 0, said[-2000:]
    assert "error" not in counts, said[-2000:]
