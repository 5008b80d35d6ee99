"""Read files that others wrote: what a file says is bounded, typed and checked before it is used.

Every reader of boxcov opens its files here. The limits are far above real data; a file beyond one
is refused with the limit in the message.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from hashlib import sha256
from io import BufferedReader, TextIOWrapper
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TextIO, Union, get_args, get_origin, get_type_hints

from safetensors import SafetensorError, safe_open

from boxcov.errors import BoxcovError

MAX_BYTES = 1 << 30  # of a file that is read as a whole: text, JSON, points
MAX_STREAM = 1 << 50  # of a file that is read in pieces, with checks on the way
MAX_METADATA = 1 << 25  # characters of the JSON in a safetensors header
MAX_DEPTH = 32  # of lists and objects inside each other in metadata
MAX_TEXT = 4096  # characters of a name or path in metadata
MAX_FRAMES = 1 << 20  # that one file describes
MAX_CLASSES = 1 << 15  # of a detector
MAX_FIELDS = 64  # of a box: exports have a column for each pair

# what readers raise on damaged files; RuntimeError includes the RecursionError of deep nesting
DAMAGE = (
    *(SafetensorError, LookupError, TypeError, ValueError, OSError, AttributeError),
    *(ArithmeticError, RuntimeError, EOFError, MemoryError),
)


@contextmanager
def reading(path: str | Path, what: str, advice: str = "") -> Iterator[None]:
    """Turn whatever a damaged file makes its reader raise into one error that names the file.

    advice: what to do about it, at the end of the message.
    """
    try:
        yield
    except FileNotFoundError:
        raise BoxcovError(f"{path}: no such file" + (advice and f": {advice}")) from None
    except BoxcovError as error:
        if str(path) in str(error):
            raise
        raise BoxcovError(f"{path}: {error}") from None
    except DAMAGE as error:
        raise BoxcovError(
            f"{path}: not {what}, or a damaged one ({type(error).__name__}: {shorten(error, 400)})"
            + (advice and f": {advice}")
        ) from None


@contextmanager
def open_bytes(path: str | Path, limit: int = MAX_STREAM) -> Iterator[BufferedReader]:
    """Open a regular file of at most ``limit`` bytes; raise OSError for anything else."""
    if "\0" in str(path):
        raise OSError(22, "a NUL in the path", str(path))
    # without O_NONBLOCK the opening of a pipe would wait for its writer
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        check_regular(path, limit, os.fstat(handle))
        yield file


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest = sha256()
    with open_bytes(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_regular(path: str | Path, limit: int, found: os.stat_result | None = None) -> None:
    """Raise OSError unless ``path`` is a regular file of at most ``limit`` bytes."""
    found = os.stat(path) if found is None else found
    if not stat.S_ISREG(found.st_mode):
        raise OSError(22, "not a regular file", str(path))
    if found.st_size > limit:
        raise OSError(27, f"{found.st_size} bytes, at most {limit} are read", str(path))


def read_bytes(path: str | Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes; raise OSError otherwise."""
    with open_bytes(path, limit) as file:
        return file.read()


@contextmanager
def open_text(path: str | Path) -> Iterator[TextIO]:
    """Open a regular text file in UTF-8 of any size, to be read in pieces."""
    with open_bytes(path) as file, TextIOWrapper(file, encoding="utf-8") as text:
        yield text


def read_text(path: str | Path) -> str:
    """Return the content of a text file in UTF-8; raise OSError or UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8")


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file; raise OSError, ValueError or RecursionError."""
    return json.loads(read_bytes(path))


def parse_metadata(text: str) -> Any:
    """Return the value of a JSON text in a file's header; raise ValueError beyond the limits."""
    if len(text) > MAX_METADATA:
        raise ValueError(f"{len(text)} characters of metadata, at most {MAX_METADATA} are read")
    value = json.loads(text)
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _children(outer)]
    if level:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    return value


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


# the files that users mix up, by the key of their metadata: what they are, and who writes them
_KINDS = {
    "boxcov.detections": ("predictions", "boxcov predict"),
    "boxcov.posterior": ("a posterior", "boxcov fit or calibrate"),
    "boxcov.centerpoint": ("weights of a detector", "boxcov train"),
}


@contextmanager
def open_tensors(
    path: str | Path, what: str, key: str, advice: str = ""
) -> Iterator[tuple[Any, Any]]:
    """Open a safetensors file; yield its metadata under ``key`` and the file.

    Damage is one error that names the file, also if it shows only later, inside the ``with``.
    """
    with open_safetensors(path, what, key, advice) as file:
        yield parse_metadata(file.metadata()[key]), file


@contextmanager
def open_safetensors(
    path: str | Path, what: str, key: str | None = None, advice: str = ""
) -> Iterator[Any]:
    """Open a safetensors file with ``key`` in its metadata; None: of any program, not our own."""
    with reading(path, what, advice):
        check_regular(path, MAX_STREAM)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if key not in metadata:
                _refuse_others(path, what, key, metadata)
            yield file


def _refuse_others(path: str | Path, what: str, key: str | None, metadata: Any) -> None:
    """Raise if the file is one of boxcov's that belongs elsewhere, or lacks the key."""
    found = next((_KINDS[name] for name in metadata if name in _KINDS), None)
    if found is not None and not (key is None and "boxcov.centerpoint" in metadata):
        name, writer = _KINDS.get(key or "boxcov.centerpoint", (what, ""))
        raise BoxcovError(
            f"{path}: this is {found[0]} (written by {found[1]}): give {name}"
            + (writer and f" (written by {writer})")
        )
    if key is not None:
        raise BoxcovError(f"{path}: a safetensors file of another program, expected {what}")


# schema


def conform(value: Any, kind: Any, name: str) -> Any:
    """Return a JSON value as ``kind``; raise BoxcovError with ``name`` if it is something else.

    kind: a type as in annotations: int, float, str, bool, None, Any, Literal, unions, ``list[T]``,
    ``tuple[T, ...]``, ``dict[str, T]``, or a dataclass, whose unknown and missing fields are
    refused. Numbers are finite, integers have 64 bits, and texts at most MAX_TEXT characters.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return conform(value, next((k for k in inner if _is_like(value, k)), inner[0]), name)
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        is_uniform = origin is list or Ellipsis in inner
        if is_uniform and all(map(_SCALARS.get(inner[0], lambda _: False), value)):
            return origin(value)  # a million of numbers in a tenth of the time
        kinds = [inner[0]] * len(value) if is_uniform else inner
        if len(kinds) != len(value):
            raise _unexpected(value, kind, name)
        return origin(conform(v, k, f"{name}[{i}]") for i, (v, k) in enumerate(zip(value, kinds)))
    if origin is dict and isinstance(value, Mapping):
        return {
            conform(k, str, f"a key of {name}"): conform(v, inner[1], f"{name}.{shorten(k)}")
            for k, v in value.items()
        }
    if is_dataclass(kind) and _is_like(value, kind):
        return _dataclass(value, kind, name) if isinstance(value, Mapping) else value
    if kind is Any or _is_scalar(value, kind):
        return value
    raise _unexpected(value, kind, name)


def _dataclass(value: Mapping[str, Any], kind: Any, name: str) -> Any:
    known = {field.name: field for field in fields(kind)}
    for key in value:
        if key not in known:
            raise BoxcovError(f"{name} has an unknown entry {shorten(repr(key))}")
    for key, field in known.items():
        if key not in value and field.default is field.default_factory is MISSING:
            raise BoxcovError(f"{name} has no {key}")
    kinds = get_type_hints(kind)
    return kind(**{key: conform(v, kinds[key], f"{name}.{key}") for key, v in value.items()})


def _is_like(value: Any, kind: Any) -> bool:
    """Return whether a value could be of this member of a union."""
    origin = get_origin(kind)
    if is_dataclass(kind):
        return isinstance(value, (Mapping, kind))  # type: ignore[arg-type]
    if origin is dict:
        return isinstance(value, Mapping)
    if origin in (list, tuple):
        return isinstance(value, (list, tuple))
    return kind is Any or _is_scalar(value, kind)


def _is_scalar(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    return kind in _SCALARS and _SCALARS[kind](value)


def is_text(value: Any) -> bool:
    """Return whether a value is a short text that can be a path: no NUL, no half of a surrogate."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


_SCALARS: dict[Any, Callable[[Any], bool]] = {
    NoneType: lambda value: value is None,
    None: lambda value: value is None,
    bool: lambda value: isinstance(value, bool),
    int: lambda value: type(value) is int and abs(value) < 1 << 63,
    float: lambda value: type(value) in (int, float) and abs(value) < 1e308 and isfinite(value),
    str: is_text,
}


def _unexpected(value: Any, kind: Any, name: str) -> BoxcovError:
    return BoxcovError(f"{name} is {shorten(repr(value))}, expected {_describe(kind)}")


def _describe(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType, Literal):
        return " or ".join(repr(k) if origin is Literal else _describe(k) for k in inner)
    if origin in (list, tuple):
        count = "" if origin is list or Ellipsis in inner else f"{len(inner)} "
        return f"a list of {count}{_describe(inner[0])}"
    names = {int: "a whole number", float: "a finite number", bool: "true or false"}
    names |= {str: f"a text of at most {MAX_TEXT} characters", NoneType: "null"}
    return names.get(kind, "an object")


def shorten(value: Any, most: int = 80) -> str:
    """Return the text of a value, cut to the length that a message can show.

    >>> shorten("x" * 1000).count("x")
    80
    """
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
