"""Text from files as it is shown: nothing in it controls a terminal, a page or a picture."""

from __future__ import annotations

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
