"""Turn our plain docstrings into Markdown for the API reference (an extension of Griffe).

Examples become code blocks, and lines ``name: meaning`` that document a parameter or an
attribute become list items.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe


def to_markdown(text: str, names: Collection[str] = ()) -> str:
    """Return a docstring as Markdown; ``names`` are the documented parameters.

    >>> to_markdown("Add one.\\n\\nx: a number", ["x"])
    'Add one.\\n\\n\\n- `x`: a number'
    """
    blocks = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(_block(block, names) for block in blocks)


def _block(block: str, names: Collection[str]) -> str:
    lines = block.splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith(">>>")), len(lines))
    prose = [_item(line, names) for line in lines[:start]]
    example = ["```pycon", *lines[start:], "```"] if start < len(lines) else []
    return "\n".join([*prose, *([""] if prose and example else []), *example])


def _item(line: str, names: Collection[str]) -> str:
    match = re.match(r"(\w+(?:, \w+)*): (.*)", line)
    if match and set(match[1].split(", ")) & set(names):
        return f"\n- `{match[1]}`: {match[2]}"
    return line


class PlainDocstrings(griffe.Extension):
    """Applies ``to_markdown`` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value, _documented_names(obj))


def _documented_names(obj: griffe.Object) -> list[str]:
    names = list(obj.members) if obj.is_class else []
    function = obj.members.get("__init__") if obj.is_class else obj
    if isinstance(function, griffe.Function):
        names += [parameter.name for parameter in function.parameters]
    return names
