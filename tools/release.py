"""Try a wheel in bare environments, and write the release notes: ``python tools/release.py DIST``.

For every Python from 3.10 to 3.13 on this machine: a new environment, the wheel with the packages
of the command line, the README's quick start, and one prediction. Says which build of torch pip
chose: where the index has none for CPUs alone, the one with CUDA (3 GB). Part of ``make release``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).parents[1]
MINORS = (10, 11, 12, 13)
SECONDS = 1800  # for an installation, or for the quick start


def release_notes(changelog: str, version: str) -> str:
    """Return the section of the changelog about a version, without its title.

    >>> release_notes("# Changelog\\n\\n## 1.1 (today)\\n\\n- new\\n\\n## 1.0\\n\\n- old\\n", "1.1")
    '- new\\n'
    """
    sections = re.split(r"^## ", changelog, flags=re.M)[1:]
    for section in sections:
        title, _, text = section.partition("\n")
        if title.split()[0] == version:
            return f"{text.strip()}\n"
    sys.exit(f"CHANGELOG.md has no section '## {version}': write it first")


def quick_start(readme: str) -> str:
    """Return the first Python block of the README.

    >>> quick_start("x\\n```python\\nprint(1)\\n```\\n")
    'print(1)\\n'
    """
    found = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    return found[1]


def find_python(minor: int) -> str | None:
    """Return the path of Python 3.minor: on the PATH, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = sorted(pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"))
    on_path = shutil.which(f"python3.{minor}")
    for python in (*([on_path] if on_path else []), *map(str, reversed(places))):
        code = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, {minor}))"
        if not subprocess.run([python, "-c", code], capture_output=True).returncode:
            return python  # a shim of pyenv may be there without its Python
    return None


def run(*words: object, cwd: Path) -> str | None:
    """Run a command; return the last line that it printed if it fails, else None."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other on a busy machine
    try:
        done = subprocess.run(
            list(map(str, words)), cwd=cwd, env=clean, capture_output=True, text=True,
            timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS} s: {' '.join(map(str, words))[:80]}"
    if not done.returncode:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
    errors = [line for line in lines if "ERROR" in line or "Error" in line]
    return (errors or lines)[-1]


def try_python(python: str, wheel: Path) -> tuple[str | None, str]:
    """Install the wheel into a bare environment and use it.

    Return what went wrong, if anything, and the version of torch.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        binaries = place / "env" / "bin"
        pip = ("-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")
        (place / "start.py").write_text(quick_start((ROOT / "README.md").read_text()))
        for step in (
            (python, "-m", "venv", place / "env"),
            (binaries / "python", *pip, "-c", ROOT / "constraints.txt", f"{wheel}[cli]"),
            (binaries / "python", "start.py"),
            (binaries / "boxcov", "--version"),
            (binaries / "boxcov", "predict", "--count", "1", "--out", "boxes.safetensors"),
        ):
            wrong = run(*step, cwd=place)
            if wrong is not None:
                return wrong, ""
        ask = (binaries / "python", "-c", "import torch; print('torch', torch.__version__)")
        return None, subprocess.run(ask, capture_output=True, text=True, cwd=place).stdout.strip()


def judge(minor: int, wheel: Path) -> tuple[bool, str]:
    """Return whether the wheel works with Python 3.minor, and a line about it."""
    python = find_python(minor)
    if python is None:
        return True, f"3.{minor}: not on this machine, not tried"
    began = perf_counter()
    wrong, torch = try_python(python, wheel)
    seconds = f"{perf_counter() - began:.0f} s"
    return wrong is None, f"3.{minor}: " + (wrong or f"the quick start runs, {seconds}, {torch}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="the folder with the wheel")
    parser.add_argument("--notes", type=Path, default=ROOT / "build" / "release-notes.md")
    parser.add_argument("--minors", type=int, nargs="*", default=MINORS)
    given = parser.parse_args()
    (wheel,) = given.dist.absolute().glob("boxcov-*.whl")
    version = wheel.name.split("-")[1]
    given.notes.parent.mkdir(exist_ok=True)
    released = re.sub(r"\.?(dev|rc)\d*$", "", version)
    given.notes.write_text(release_notes((ROOT / "CHANGELOG.md").read_text(), released))
    print(f"notes of {released}: {given.notes}" + ("" if released == version else " (a rehearsal)"))
    failed = 0
    for minor in given.minors:
        is_right, line = judge(minor, wheel)
        print(line, flush=True)
        failed += not is_right
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
