"""Whether every installed distribution may be used beside boxcov: ``python tools/licences.py``, part of ``make audit``.

Permissive licences pass; copyleft and anything unknown is refused, by name. Licences are read from the distributions' own metadata: the SPDX
expression, else the classifiers, else the short text.
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
# what older metadata calls them
WORDS = {
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
# copyleft for changes to their own files only, and no part of boxcov: tools of the tests
TOOLS = {"hypothesis": "MPL-2.0", "pathspec": "MPL-2.0", "tqdm": "MPL-2.0"}


def licence_of(distribution: Distribution) -> str | None:
    """As an SPDX expression; None where the distribution does not say."""
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
        return " AND ".join(WORDS.get(name) or _atom(name) for name in named)
    text = str(about.get("License") or "").strip()
    return WORDS.get(text, text) if text and "\n" not in text else None


def allowed(expression: str, more: Iterable[str] = ()) -> bool:
    """Whether an SPDX expression can be met with permissive licences alone, and ``more``: of AND every part, of OR one.

    >>> allowed("MIT AND (GPL-3.0-only OR BSD-3-Clause)"), allowed("MIT AND LGPL-2.1-only"), allowed("MPL-2.0", ["MPL-2.0"])
    (True, False, True)
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
    return re.sub(r"\W+", "-", name)  # one word, which is not known


def refused(installed: Iterable[Distribution]) -> list[str]:
    """A line for each distribution that may not be used, or does not say."""
    lines = []
    for distribution in installed:
        name, licence = distribution.metadata["Name"], licence_of(distribution)
        tool = TOOLS.get(str(name).lower())
        if licence is None or not allowed(licence, [tool] if tool else []):
            lines.append(
                f"{name} {distribution.version}: {licence or 'says nothing of its licence'}"
            )
    return sorted(lines)


def main() -> None:
    installed = list(distributions())
    wrong = refused(installed)
    if wrong:
        sys.exit("licences that are not known to be permissive:\n" + "\n".join(wrong))
    print(
        f"licences of {len(installed)} distributions: all permissive, or tools of the tests ({', '.join(TOOLS)})"
    )


if __name__ == "__main__":
    main()
