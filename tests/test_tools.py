"""The tools behind make: licences, wheel, hashes, results, reference pages, hooks."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from email.message import Message
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree
from zipfile import ZipFile

import pytest
import yaml

import boxcov

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"
DATA = ROOT / "docs" / "results" / "data"


def load_tool(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


licences, wheel, hashes, results = map(load_tool, ("licences", "wheel", "hashes", "results"))
slow_tests = load_tool("slow_tests")
notebook, release = load_tool("notebook"), load_tool("release")
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


class FakeDistribution:
    """A distribution with a name, a version and licence metadata."""

    version = "1.0"

    def __init__(self, name: str = "thing", **headers: str | list[str]) -> None:
        self.metadata = Message()
        self.metadata["Name"] = name
        for key, values in headers.items():
            for value in [values] if isinstance(values, str) else values:
                self.metadata[key.replace("_", "-")] = value


@pytest.mark.parametrize(
    ("expression", "passes"),
    [
        ("MIT", True),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("Apache-2.0 WITH Something-else", False),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("MIT AND (GPL-3.0-only OR BSD-2-Clause)", True),
        ("(MIT OR GPL-3.0-only) AND LGPL-2.1-or-later", False),
        ("MPL-2.0", False),
        ("MIT)", False),
        ("(MIT", False),
        ("MIT MIT", False),
        ("", False),
    ],
)
def test_licence_expressions(expression, passes) -> None:
    assert licences.allowed(expression) is passes


@pytest.mark.parametrize(
    ("distribution", "line"),
    [
        (FakeDistribution(License_Expression="MIT"), None),
        (
            FakeDistribution(License_Expression="AGPL-3.0-only", License="MIT"),
            "thing 1.0: AGPL-3.0-only",
        ),
        (
            FakeDistribution(
                Classifier=["Topic :: Software", "License :: OSI Approved :: BSD License"]
            ),
            None,
        ),
        (
            FakeDistribution(
                Classifier=["License :: OSI Approved", "License :: OSI Approved :: MIT License"]
            ),
            None,
        ),
        (
            FakeDistribution(
                Classifier="License :: OSI Approved :: GNU General Public License v3 (GPLv3)"
            ),
            "thing 1.0: GNU-General-Public-License-v3-GPLv3-",
        ),
        (FakeDistribution(License="Apache 2.0"), None),
        (FakeDistribution(License="as you like it"), "thing 1.0: as you like it"),
        (
            FakeDistribution(License="Copyright\nof somebody"),
            "thing 1.0: no licence in its metadata",
        ),
        (FakeDistribution(), "thing 1.0: no licence in its metadata"),
        (FakeDistribution("hypothesis", License_Expression="MPL-2.0"), None),
        (FakeDistribution("other", License_Expression="MPL-2.0"), "other 1.0: MPL-2.0"),
    ],
)
def test_refused_distributions(distribution, line) -> None:
    assert licences.refused([distribution]) == ([] if line is None else [line])


def test_licences_of_installed_packages_are_accepted() -> None:
    ours = {
        "torch",
        "numpy",
        "safetensors",
        "click",
        "rich",
        "matplotlib",
        "scipy",
        "pytest",
        "hypothesis",
        "shapely",
    }
    assert licences.refused(each for each in distributions() if each.metadata["Name"] in ours) == []


def test_every_archive_has_a_hash_and_folders_are_left_out() -> None:
    def entry(name: str, **info) -> dict:
        return {"metadata": {"name": name, "version": "1"}, "download_info": {"url": "x", **info}}

    archive = {"archive_info": {"hashes": {"sha256": "ab"}}}
    report = {
        "install": [entry("boxcov", dir_info={}), entry("b", **archive), entry("A", **archive)]
    }
    assert hashes.requirements(report) == ["A==1 --hash=sha256:ab", "b==1 --hash=sha256:ab"]
    with pytest.raises(KeyError):  # no requirement without a hash
        hashes.requirements({"install": [entry("b", archive_info={})]})


def test_missing_unexpected_and_different_files_in_a_wheel(tmp_path) -> None:
    source = tmp_path / "src"
    (source / "boxcov" / "report").mkdir(parents=True)
    for name in ("__init__.py", "report/page.css", "report/lost.js"):
        (source / "boxcov" / name).write_text(name)
    with ZipFile(tmp_path / "x.whl", "w") as file:
        file.writestr("boxcov/__init__.py", "__init__.py")
        file.writestr("boxcov/report/page.css", "another")
        file.writestr("boxcov/extra.py", "")
        file.writestr("boxcov-1.dist-info/METADATA", "")
    assert wheel.differences(tmp_path / "x.whl", source) == [
        "boxcov/extra.py: unexpected",
        "boxcov/report/lost.js: missing",
        "boxcov/report/page.css: different",
    ]


def test_tables_of_the_documentation_are_up_to_date() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    stale = [page.name for page in pages if results.updated(page.read_text()) != page.read_text()]
    assert stale == [], "run make results"


def test_the_gain_is_made_from_measured_tables() -> None:
    made = results.gain()
    assert made == json.loads((DATA / "gain.json").read_text()), "run make results"
    rows = json.loads((DATA / "error-model-rows.json").read_text())["rows"]
    ours = {row[0]: row for row in rows}["ours: free + covariances"]
    assert made["rows"][-1][:2] == ["**boxcov**", ours[1]]
    assert "<!-- table gain bare -->" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_result_files_are_complete(path: Path) -> None:
    content = json.loads(path.read_text())
    if path.stem == "reproduction-all-tables":
        assert all(len(row) == len(one["columns"]) for one in content for row in one["rows"])
        return
    fields = ["title", "command", "date", "machine", "columns", "digits", "rows", "notes"]
    assert list(content) == fields
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert {len(row) for row in content["rows"]} == {len(content["columns"])}
    assert len(content["digits"]) == len(content["columns"])
    scripts = re.findall(r"python (\S+\.py)", content["command"])
    assert [script for script in scripts if not (ROOT / script).exists()] == []
    used = [
        page for page in (ROOT / "docs").rglob("*.md") if f"table {path.stem} " in page.read_text()
    ]
    assert used, "no page shows this table"


def test_a_table_block_is_replaced(tmp_path: Path) -> None:
    result = {
        "title": "Speed",
        "command": "boxcov bench",
        "date": "2026-01-01",
        "machine": "CPU",
        "columns": ["method", "P(U|I)"],
        "digits": [None, 2],
        "rows": [["exact", 0.5], ["plain", None]],
        "notes": ["One run."],
    }
    (tmp_path / "speed.json").write_text(json.dumps(result))
    page = "before\n<!-- table speed -->\nold\n<!-- end -->\nafter"
    once = results.updated(page, tmp_path)
    assert "|method|P(U\\|I)|\n|---|---:|\n|exact|0.50|\n|plain||" in once
    assert "```sh\nboxcov bench\n```" in once
    assert "old" not in once
    assert once.startswith("before\n<!-- table speed -->")
    assert results.updated(once, tmp_path) == once


def test_the_report_of_the_slow_tests_becomes_a_table() -> None:
    def case(name: str, inner: str = "", **properties: str) -> str:
        told = "".join(f'<property name="{k}" value="{v}"/>' for k, v in properties.items())
        return f'<testcase classname="t" name="{name}"><properties>{told}</properties>{inner}'

    hostile = "90 damaged files of 7 kinds: 80 refused by name, 10 read; 5 were no regular file; "
    cases = [
        case("test_kills_of_train", train="5 kills, 3 finished runs; stored at a kill: [(0, 5)]"),
        case("test_twenty", outcome=f"{hostile}3.28 s and 389 MiB at most", cost="{}"),
        case("test_memory", soak="exact: 70 frames, 28 boxes, 450 s, +0.01 MiB after the first 5"),
        case(f"{slow_tests.MUTANT}[a]"),
        case(f"{slow_tests.MUTANT}[b]", "<failure/>"),
        case("test_upstream", "<skipped/>"),
    ]
    text = f'<testsuite time="3013.4">{"</testcase>".join(cases)}</testcase></testsuite>'
    assert slow_tests.rows(ElementTree.fromstring(text)) == [
        ["boxcov train, SIGKILL", 5, "3 runs finished, equal to an uninterrupted one"],
        ["hostile files, 7 kinds", 90, "80 refused by name, 10 read; 3.28 s and 389 MiB at most"],
        ["of these pipes, devices, folders, links", 5, "refused by name, or not what is read"],
        ["ExactGLM frames in one process", 70, "+0.01 MiB after the first 500"],
        ["mutants of the source", 2, "1 detected by a test, 1 not detected"],
        ["all slow tests", 6, "50 minutes: 4 passed, 1 failed, 1 skipped"],
    ]


def test_the_command_line_page_lists_every_command() -> None:
    page = load_tool("command_line").page()
    commands = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert {"fit", "predict", "evaluate", "calibrate", "demo", "stream"} <= set(commands)
    assert "|`--detector`|`centerpoint:small`|" in page
    assert "|`--legacy`, `--no-legacy`|what the checkpoint tells|" in page
    assert "|`--count`|100 simulated frames, or the whole split|" in page


def test_docstrings_become_markdown() -> None:
    pytest.importorskip("griffe")
    to_markdown = load_tool("docstrings").to_markdown
    text = "Add.\n\nx: a number\nwhich may be negative\n\n>>> add(1)[0]\n2"
    shown = to_markdown(text, ["x"])
    assert "\n- `x`: a number\nwhich may be negative" in shown
    assert shown.endswith("```pycon\n>>> add(1)[0]\n2\n```")
    assert to_markdown("y: not a parameter", ["x"]) == "y: not a parameter"


def test_pre_commit_hooks_run_tools_of_the_environment() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert {"ruff", "mypy", "import-linter", "codespell"} <= {hook["id"] for hook in hooks}
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)


def test_the_version_is_the_same_everywhere() -> None:
    import boxcov

    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == boxcov.__version__
    release = boxcov.__version__.partition(".dev")[0]
    assert f"\n## {release}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    content = json.loads(path.read_text())
    stored = [kinds(cell) for cell in content["cells"]]
    notebook.run(content)
    assert [kinds(cell) for cell in content["cells"]] == stored  # make notebook
    assert sum(kind == "image/png" for cell in stored for kind in cell) >= 2


def kinds(cell: dict) -> list[str]:
    """The kinds of the outputs of a cell."""
    return [next(iter(one.get("data", ["text"]))) for one in cell.get("outputs", ())]


def test_a_notebook_becomes_a_page() -> None:
    page = notebook.markdown(json.loads(NOTEBOOKS[0].read_text()), "x.ipynb")
    assert page.startswith("# First boxes")
    assert "![figure](data:image/png;base64," in page
    assert "[Download this notebook](x.ipynb)" in page


def test_a_failing_cell_is_an_error() -> None:
    cell = {"cell_type": "code", "source": ["1 / 0"], "metadata": {}}
    with pytest.raises(ZeroDivisionError):
        notebook.run({"cells": [cell]})
    left = {**cell, "metadata": {"tags": ["needs-no_such_package"]}, "outputs": []}
    notebook.run({"cells": [left]})
    assert left["outputs"] == []


def test_release_notes_are_those_of_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    version = re.sub(r"\.?dev\d*$", "", boxcov.__version__)
    notes = release.release_notes(text, version)
    assert notes.strip()
    assert notes.strip() in text
    assert "## 0.1.0" not in notes
    with pytest.raises(SystemExit, match=r"no section '## 9\.9'"):
        release.release_notes(text, "9.9")


def test_release_tries_the_quick_start_of_the_readme() -> None:
    start = release.quick_start((ROOT / "README.md").read_text())
    assert start.startswith("import boxcov\n")
    compile(start, "README.md", "exec")


def test_release_says_which_pythons_are_missing(monkeypatch) -> None:
    monkeypatch.setattr(release, "find_python", lambda minor: None if minor == 13 else "python")
    monkeypatch.setattr(release, "try_python", lambda *words: (None, "torch 2.13.0+cu130"))
    assert release.judge(13, Path("x.whl")) == (True, "3.13: not on this machine, not tried")
    is_right, line = release.judge(12, Path("x.whl"))
    assert is_right
    assert line.startswith("3.12: the quick start runs")
    assert line.endswith("torch 2.13.0+cu130")
    monkeypatch.setattr(release, "try_python", lambda *words: ("ERROR: nothing works", ""))
    assert release.judge(12, Path("x.whl")) == (False, "3.12: ERROR: nothing works")


# run by the lowest Python that is supported, without packages
NAMES = """
import ast, importlib, sys
from pathlib import Path
for path in Path(sys.argv[1]).rglob("*.py"):
    tree, modules = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            asked = [(node.module, one.name) for one in node.names]
        elif isinstance(node, ast.Import):
            modules.update((one.name, one.name) for one in node.names if not one.asname)
            asked = [(one.name, None) for one in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            asked = [(modules.get(node.value.id), node.attr)]
        else:
            continue
        for module, name in asked:
            if module and module.split(".")[0] in sys.stdlib_module_names:
                found = importlib.import_module(module)
                if name and not hasattr(found, name):
                    importlib.import_module(f"{module}.{name}")
            elif module == "tomllib":
                sys.exit(f"{path}: tomllib")
"""


def test_the_lowest_python_has_what_the_sources_import() -> None:
    lowest = release.MINORS[0]
    assert f'requires-python = ">=3.{lowest}"' in (ROOT / "pyproject.toml").read_text()
    python = release.find_python(lowest)
    if python is None:
        pytest.skip(f"Python 3.{lowest} is not on this machine")
    command = [python, "-c", NAMES, str(ROOT / "src")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
