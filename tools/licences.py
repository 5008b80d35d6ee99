"""Check the licences of all installed distributions: ``python tools/licences.py``.

Permissive licences pass; copyleft and unknown ones are refused by name. The licence is read from
the metadata of a distribution: the SPDX expression, else the classifiers, else the short text.
Part of ``make audit``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "HPND",
    "ISC",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "PSF-2.0",
    "Python-2.0",
    "Unlicense",
    "Zlib",
}
# how older metadata names them
ALIASES = {
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# development tools under copyleft licences, which are no part of boxcov
TOOLS = {
    "certifi": "MPL-2.0",
    "codespell": "GPL-2.0-only",
    "hypothesis": "MPL-2.0",
    "pathspec": "MPL-2.0",
    "tqdm": "MPL-2.0",
}


def licence_of(distribution: Distribution) -> str | None:
    """Return the licence as an SPDX expression, or None if the metadata names none."""
    about = distribution.metadata
    if expression := about.get("License-Expression"):
        return str(expression)
    named = [
        line.rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    named = [name for name in named if name != "OSI Approved"]
    if named:
        return " AND ".join(ALIASES.get(name) or _atom(name) for name in named)
    text = str(about.get("License") or "").strip()
    return ALIASES.get(text, text) if text and "\n" not in text else None


def allowed(expression: str, more: Iterable[str] = ()) -> bool:
    """Return whether permissive licences, and those in ``more``, satisfy an SPDX expression.

    >>> allowed("MIT AND (GPL-3.0-only OR BSD-3-Clause)"), allowed("MIT AND LGPL-2.1-only")
    (True, False)
    """
    known = PERMISSIVE | set(more)
    tokens = re.findall(r"\(|\)|\bAND\b|\bOR\b|[^()\s]+(?: WITH [^()\s]+)?", expression)
    found, rest = _either(tokens, known)
    return found and not rest


def _either(tokens: list[str], known: set[str]) -> tuple[bool, list[str]]:
    found, tokens = _both(tokens, known)
    while tokens[:1] == ["OR"]:
        other, tokens = _both(tokens[1:], known)
        found = found or other
    return found, tokens


def _both(tokens: list[str], known: set[str]) -> tuple[bool, list[str]]:
    found, tokens = _one(tokens, known)
    while tokens[:1] == ["AND"]:
        other, tokens = _one(tokens[1:], known)
        found = found and other
    return found, tokens


def _one(tokens: list[str], known: set[str]) -> tuple[bool, list[str]]:
    if tokens[:1] == ["("]:
        found, tokens = _either(tokens[1:], known)
        return found and tokens[:1] == [")"], tokens[1:]
    return bool(tokens) and tokens[0] in known, tokens[1:]


def _atom(name: str) -> str:
    return re.sub(r"\W+", "-", name)  # an unknown licence as one word


def refused(installed: Iterable[Distribution]) -> list[str]:
    """Return one line per distribution whose licence is unknown or not permissive."""
    lines = []
    for distribution in installed:
        name, licence = distribution.metadata["Name"], licence_of(distribution)
        tool = TOOLS.get(str(name).lower())
        if licence is None or not allowed(licence, [tool] if tool else []):
            lines.append(
                f"{name} {distribution.version}: {licence or 'no licence in its metadata'}"
            )
    return sorted(lines)


def main() -> None:
    installed = list(distributions())
    wrong = refused(installed)
    if wrong:
        sys.exit("licences that are not permissive, or unknown:\n" + "\n".join(wrong))
    tools = ", ".join(TOOLS)
    print(f"licences of {len(installed)} distributions: permissive, or development tools ({tools})")


if __name__ == "__main__":
    main()
