"""Text as it is shown: in columns, and nothing in it controls a terminal, a page or a picture."""

from __future__ import annotations

from collections.abc import Sequence
from unicodedata import category

_HARMFUL = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, direction, half a surrogate, line separators
MAX_NAME = 60  # characters of a name in a picture: a longer one takes seconds, or is the picture


def printable(text: object, one_line: bool = False) -> str:
    """Return the text with escape codes in place of characters that control how it is shown.

    one_line: also in place of line breaks.
    """
    allowed = "" if one_line else "\n"
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if category(c) in _HARMFUL and c not in allowed else c
        for c in text
    )


def short_name(name: str, length: int = MAX_NAME) -> str:
    """Return a name for a picture: one printable line of at most ``length`` characters."""
    shown = printable(name, one_line=True)
    end = length // 2
    return shown if len(shown) <= length else f"{shown[: length - 1 - end]}…{shown[-end:]}"


def aligned(rows: Sequence[Sequence[object]], right: bool = True) -> list[str]:
    """Return a line per row, with aligned columns: the first on the left, the others on the right.

    right: False aligns all of them on the left.

    >>> aligned([("method", "ms"), ("exact", 12.5)])
    ['method    ms', 'exact   12.5']
    """
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows)]
    marks = ["<", *(">" if right else "<") * (len(widths) - 1)]
    forms = [f"{mark}{width}" for mark, width in zip(marks, widths)]
    lines = ([format(str(cell), form) for cell, form in zip(row, forms)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in lines]
