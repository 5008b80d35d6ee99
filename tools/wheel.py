"""Whether a wheel holds all of src/boxcov and nothing else, and, with --installed, whether it is what ``import boxcov`` finds.

``python tools/wheel.py dist/boxcov-*.whl [--installed]``, part of ``make wheel``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

SOURCE = Path(__file__).parents[1] / "src"


def differences(wheel: Path, source: Path = SOURCE) -> list[str]:
    """What is missing in the wheel, what it should not hold, and what is not as in ``source``."""
    there = {
        str(path.relative_to(source)): path
        for path in (source / "boxcov").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
        missing = [f"{name}: is missing" for name in there if name not in inside]
        foreign = [f"{name}: does not belong there" for name in inside if name not in there]
        changed = [
            f"{name}: is another one"
            for name in inside
            if name in there and file.read(name) != there[name].read_bytes()
        ]
    return sorted(missing + foreign + changed)


def main() -> None:
    wheel = Path(sys.argv[1])
    wrong = differences(wheel)
    if wrong:
        sys.exit(f"{wheel} is not what src/ holds:\n" + "\n".join(wrong))
    if "--installed" in sys.argv[2:]:
        import boxcov
        from boxcov.detectors import centerpoint

        found = Path(boxcov.__file__).resolve()
        if not found.is_relative_to(Path(sys.prefix).resolve()):
            sys.exit(
                f"import boxcov finds {found}, which is not in {sys.prefix}: these are not the files of the wheel"
            )
        centerpoint.load("small")  # the weights it ships
        print(f"{wheel.name}: all of src/, and import boxcov finds it in {found.parent}")


if __name__ == "__main__":
    main()
