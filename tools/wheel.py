"""Check that a wheel holds exactly src/boxcov: ``python tools/wheel.py FILE [--installed]``.

With ``--installed`` also check that ``import boxcov`` finds the installed wheel. Part of
``make wheel``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

SOURCE = Path(__file__).parents[1] / "src"


def differences(wheel: Path, source: Path = SOURCE) -> list[str]:
    """Return one line per file that is missing, unexpected or different in the wheel."""
    there = {
        str(path.relative_to(source)): path
        for path in (source / "boxcov").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
        missing = [f"{name}: missing" for name in there if name not in inside]
        foreign = [f"{name}: unexpected" for name in inside if name not in there]
        changed = [
            f"{name}: different"
            for name in inside
            if name in there and file.read(name) != there[name].read_bytes()
        ]
    return sorted(missing + foreign + changed)


def main() -> None:
    wheel = Path(sys.argv[1])
    wrong = differences(wheel)
    if wrong:
        sys.exit(f"{wheel} differs from src/:\n" + "\n".join(wrong))
    if "--installed" in sys.argv[2:]:
        import boxcov
        from boxcov.detectors import centerpoint

        found = Path(boxcov.__file__).resolve()
        if not found.is_relative_to(Path(sys.prefix).resolve()):
            sys.exit(f"import boxcov finds {found}, which is not the wheel in {sys.prefix}")
        centerpoint.load("small")  # the weights are in the wheel
        print(f"{wheel.name}: holds src/, and import boxcov finds it in {found.parent}")


if __name__ == "__main__":
    main()
