from __future__ import annotations

import importlib.util
from email.message import Message
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


def tool(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


licences, wheel, hashes = tool("licences"), tool("wheel"), tool("hashes")


class Said:
    """A distribution as far as its licence goes."""

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
def test_expressions(expression, passes) -> None:
    assert licences.allowed(expression) is passes


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (Said(License_Expression="MIT"), None),
        (Said(License_Expression="AGPL-3.0-only", License="MIT"), "thing 1.0: AGPL-3.0-only"),
        (Said(Classifier=["Topic :: Software", "License :: OSI Approved :: BSD License"]), None),
        (
            Said(Classifier=["License :: OSI Approved", "License :: OSI Approved :: MIT License"]),
            None,
        ),
        (
            Said(Classifier="License :: OSI Approved :: GNU General Public License v3 (GPLv3)"),
            "thing 1.0: GNU-General-Public-License-v3-GPLv3-",
        ),
        (Said(License="Apache 2.0"), None),
        (Said(License="as you like it"), "thing 1.0: as you like it"),
        (Said(License="Copyright\nof somebody"), "thing 1.0: says nothing of its licence"),
        (Said(), "thing 1.0: says nothing of its licence"),
        (Said("hypothesis", License_Expression="MPL-2.0"), None),
        (Said("other", License_Expression="MPL-2.0"), "other 1.0: MPL-2.0"),
    ],
)
def test_what_a_distribution_says(said, line) -> None:
    assert licences.refused([said]) == ([] if line is None else [line])


def test_what_is_installed_here_may_be_used() -> None:
    ours = {
        "torch",
        "numpy",
        "safetensors",
        "typer",
        "rich",
        "matplotlib",
        "scipy",
        "pytest",
        "hypothesis",
        "shapely",
    }
    assert licences.refused(each for each in distributions() if each.metadata["Name"] in ours) == []


def test_hashes_of_all_but_folders() -> None:
    def entry(name: str, **info) -> dict:
        return {"metadata": {"name": name, "version": "1"}, "download_info": {"url": "x", **info}}

    archive = {"archive_info": {"hashes": {"sha256": "ab"}}}
    report = {
        "install": [entry("boxcov", dir_info={}), entry("b", **archive), entry("A", **archive)]
    }
    assert hashes.requirements(report) == ["A==1 --hash=sha256:ab", "b==1 --hash=sha256:ab"]
    with pytest.raises(KeyError):  # better none than one without a hash
        hashes.requirements({"install": [entry("b", archive_info={})]})


def test_a_wheel_that_lacks_or_adds_a_file(tmp_path) -> None:
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
        "boxcov/extra.py: does not belong there",
        "boxcov/report/lost.js: is missing",
        "boxcov/report/page.css: is another one",
    ]
