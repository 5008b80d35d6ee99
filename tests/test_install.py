"""Every extra can be installed with ``constraints.txt``: no pin contradicts a requirement."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.pins import pins

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def wanted(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def needed_by(extra: str) -> dict[str, set[str]]:
    """Requirements of an extra by package, of the packages that are installed also theirs."""
    found: dict[str, set[str]] = {}
    todo = [Requirement(line) for line in (*PROJECT["dependencies"], *EXTRAS[extra])]
    seen = set()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        found.setdefault(name, set()).add(str(one.specifier))
        if (name, frozenset(one.extras)) in seen:
            continue
        seen.add((name, frozenset(one.extras)))
        if name == "boxcov":
            todo += [Requirement(line) for inner in one.extras for line in EXTRAS[inner]]
            continue
        try:
            lines = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue  # the slow test asks the index
        todo += [r for r in lines if any(wanted(r, inner) for inner in ("", *one.extras))]
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_pin_contradicts_a_requirement(extra: str) -> None:
    known, wrong = pins(), []
    for name, ranges in needed_by(extra).items():
        for text in ranges if name in known else ():
            if not Requirement(f"{name}{text}").specifier.contains(known[name], prereleases=True):
                wrong.append(f"{name}=={known[name]} is pinned, but {text} is required")
    assert wrong == []


def test_pins_are_what_the_tests_run_with() -> None:
    """Installed packages have the pinned version, so that their metadata is that of the pins."""
    for name, pin in pins().items():
        try:
            assert version(name).partition("+")[0] == pin, name
        except PackageNotFoundError:
            continue


def test_every_package_of_the_tests_is_pinned() -> None:
    free = re.compile("boxcov$|nvidia-|cuda-|triton$")  # torch pins those for CUDA
    assert [one for one in needed_by("test") if one not in pins() and not free.match(one)] == []


@pytest.mark.parametrize("extra", ["torchvision", "ultralytics"])
def test_the_environment_of_the_adapters_has_the_extra(extra: str) -> None:
    lines = (ROOT / "tests" / "environments" / "adapters.txt").read_text().splitlines()
    found = dict(line.split("==") for line in lines if "==" in line)
    (needed,) = (Requirement(line) for line in EXTRAS[extra])
    assert needed.specifier.contains(found[needed.name])


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_pip_resolves_the_extra(extra: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-input"]
    command += ["-c", str(ROOT / "constraints.txt"), f"{ROOT}[{extra}]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if "ResolutionImpossible" not in done.stderr and "No module named pip" in done.stderr:
        pytest.skip("there is no pip here")
    if done.returncode and "onnect" in done.stderr:  # NewConnectionError, "Connection refused"
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
