"""The v1.0 JSON tables, read row by row: sample_data with 2.6 million rows does not fit memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from os.path import isfile
from pathlib import Path
from typing import Any, TypeVar

from boxcov._files.input_file import MAX_TEXT, is_text, open_text, reading, shorten
from boxcov.errors import BoxcovError

Row = dict[str, Any]
T = TypeVar("T")

_CHUNK = 1 << 20  # characters read at a time
_LONGEST = 1 << 24  # characters of the longest row that is accepted
_LARGEST = 1e100  # absolute value of the largest coordinate that is accepted
_TEXT = f"a text of at most {MAX_TEXT} characters"
_GAP = re.compile(r"[\s,]*")


class Table:
    """The rows of one table, read again for each iteration, with typed access to their entries.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "scene.json").write_text('[{"token": "a", "name": "scene-0001"}]')
    ...     table = Table(Path(folder), "scene")
    ...     [table.text(row, "name") for row in table]
    ['scene-0001']
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.json"
        if not isfile(self.path):
            raise BoxcovError(
                f"{self.path}: no such table: unpack the metadata archive of this version there"
            )

    def __iter__(self) -> Iterator[Row]:
        with reading(self.path, "a table of nuScenes"), open_text(self.path) as file:
            yield from self._objects(file)

    def text(self, row: Row, key: str) -> str:
        return self._entry(row, key, is_text, _TEXT)

    def integer(self, row: Row, key: str) -> int:
        return int(self._entry(row, key, _is_integer, "a whole number of 64 bits"))

    def flag(self, row: Row, key: str) -> bool:
        return self._entry(row, key, lambda value: isinstance(value, bool), "true or false")

    def vector(self, row: Row, key: str) -> list[float]:
        return self._entry(row, key, _is_vector, "3 finite numbers")

    def size(self, row: Row, key: str) -> list[float]:
        return self._entry(row, key, lambda v: _is_vector(v) and min(v) > 0, "3 lengths above 0")

    def quaternion(self, row: Row, key: str) -> list[float]:
        return self._entry(row, key, lambda v: _is_vector(v, 4) and any(v), "a quaternion")

    def refer(self, row: Row, key: str, index: Mapping[str, T], to: str) -> T:
        """Look up the token ``row[key]`` in the index of another table."""
        token = self.text(row, key)
        if token not in index:
            raise BoxcovError(
                f"{self._describe(row)}: its {key} {shorten(repr(token))} is not in {to}: the "
                "tables are of different versions"
            )
        return index[token]

    def _entry(self, row: Row, key: str, is_sound: Callable[[Any], bool], wanted: str) -> Any:
        if key not in row:
            raise BoxcovError(
                f"{self._describe(row)} has no {key!r}: not a v1.0 table, or a damaged one"
            )
        if not is_sound(row[key]):
            raise self.unexpected(row, key, wanted)
        return row[key]

    def unexpected(self, row: Row, key: str, wanted: str) -> BoxcovError:
        """Return the error for an entry that is not what was ``wanted``."""
        return BoxcovError(
            f"{self._describe(row)}: {key} is {shorten(repr(row[key]))}, expected {wanted}"
        )

    def _describe(self, row: Row) -> str:
        return f"{self.path}: the row of token {shorten(repr(row.get('token')))}"

    def _objects(self, file: Any) -> Iterator[Row]:
        """Yield the objects of a JSON list, with one chunk and one row in memory."""
        decode = json.JSONDecoder().raw_decode
        buffer, count, chunk = file.read(_CHUNK).lstrip(), 0, " "
        if not buffer.startswith("["):
            raise self._damaged("no JSON list" if buffer else "an empty file")
        at = 1
        while chunk:
            while True:
                at = _GAP.match(buffer, at).end()  # type: ignore[union-attr]  # the pattern matches everywhere
                if buffer.startswith("]", at):
                    return
                try:
                    row, at = decode(buffer, at)
                except (ValueError, RecursionError):  # the chunk may end within the row
                    break
                if not isinstance(row, dict):
                    raise self._damaged(f"entry {count} is not an object")
                yield row
                count += 1
            if len(buffer) - at > _LONGEST:
                break
            chunk = file.read(_CHUNK)
            buffer, at = buffer[at:] + chunk, 0
        raise self._damaged(f"it ends or is invalid after {count} rows")

    def _damaged(self, why: str) -> BoxcovError:
        return BoxcovError(f"{self.path}: damaged JSON ({why}): unpack the metadata archive again")


def _is_integer(value: Any) -> bool:
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    return is_whole and abs(value) < 1 << 63


def _is_vector(value: Any, size: int = 3) -> bool:
    return (
        isinstance(value, list)
        and len(value) == size
        and all(isinstance(v, (int, float)) and abs(v) < _LARGEST for v in value)
    )
