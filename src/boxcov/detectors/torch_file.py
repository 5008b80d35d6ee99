"""The tensors of a file that ``torch.save`` wrote, read without unpickling.

A pickle is a program for a stack machine. This one builds dicts, lists, tuples, texts, numbers and
tensors, and nothing else: other objects of torch and numpy become a ``Foreign`` that only has a
name, and a file with objects of other packages is refused. So no code runs, and whatever is made is
bounded by the bytes of the file.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import torch
from torch import Tensor

from boxcov._files.input_file import read_bytes, shorten

MAX_BYTES = 1 << 35
_MAGIC = 0x1950A86A20F9469CFC6C  # the first value in files of torch before 1.6
_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# of scores, arrays and settings that training scripts store with the weights
_PACKAGES = ("torch", "numpy", "collections", "_codecs")
Storage = Callable[[Any], Tensor | None]  # by persistent id: all numbers of a storage (n,)


@dataclass(frozen=True)
class Foreign:
    """An object that is not made: a class or function, or what calling it would give."""

    name: str


class ForeignCodeError(ValueError):
    """The file refers to a class or function of a package that no weights need."""


def read_torch_file(path: Path) -> Any:
    """Return the content of the file; raise ForeignCodeError, or any error if it is damaged."""
    data = BytesIO(read_bytes(path, MAX_BYTES))
    if is_zipfile(data):
        return _read_zip(data)
    data.seek(0)
    return _read_legacy(data)


def _read_zip(data: BytesIO) -> Any:
    """Read the format since torch 1.6: a zip archive with a pickle and one record per storage."""
    with ZipFile(data) as archive:
        records = {info.filename: info for info in archive.infolist()}
        packed = [n for n, i in records.items() if i.compress_type != ZIP_STORED]
        if packed:
            raise ValueError(f"the record {shorten(packed[0])} is compressed, torch stores as is")
        if sum(info.file_size for info in archive.infolist()) > data.getbuffer().nbytes:
            raise ValueError("the records are larger than the file")
        names = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("no record data.pkl, or several")
        folder = names[0].removesuffix("data.pkl")
        order = f"{folder}byteorder"
        if order in records and archive.read(order) != b"little":
            raise ValueError("the numbers are big-endian")
        known: dict[str, Tensor] = {}

        def storage(identity: Any) -> Tensor:
            key, dtype, numel = _storage(identity)
            if key not in known:
                known[key] = _numbers(archive.read(f"{folder}data/{key}"), dtype, numel)
            return known[key]

        return _Machine(storage).run(BytesIO(archive.read(names[0])))


def _read_legacy(data: BytesIO) -> Any:
    """Read the format before torch 1.6: five pickles, then the storages."""
    plain = _Machine(lambda identity: None)
    if plain.run(data) != _MAGIC:
        raise ValueError("neither a zip archive nor a file of an early torch")
    if plain.run(data) != 1001 or sys.byteorder != "little":
        raise ValueError("an unknown version of the format, or a big-endian machine")
    plain.run(data)  # sizes of types on the machine that wrote it
    start = data.tell()
    wanted: dict[str, tuple[torch.dtype, int]] = {}

    def note(identity: Any) -> None:
        key, dtype, numel = _storage(identity)
        wanted[key] = dtype, numel

    _Machine(note).run(data)  # once for the sizes of the storages, which come after the content
    known: dict[str, Tensor] = {}
    for key in _Machine(note).run(data):
        dtype, numel = wanted[_text(key)]
        if int.from_bytes(data.read(8), "little") != numel:
            raise ValueError(f"the storage {shorten(key)} has another size")
        known[key] = _numbers(data.read(numel * dtype.itemsize), dtype, numel)
    data.seek(start)
    return _Machine(lambda identity: known[_storage(identity)[0]]).run(data)


def _storage(identity: Any) -> tuple[str, torch.dtype, int]:
    """Return key, dtype and number of elements that the persistent id of a storage states."""
    kind, storage, key, _, numel, *view = identity
    if kind != "storage" or not isinstance(storage, Foreign) or any(v is not None for v in view):
        raise ValueError("a storage of another kind")
    module, _, name = storage.name.rpartition(".")
    if module not in ("torch", "torch.cuda") or name not in _DTYPES:
        raise ValueError(f"a storage of type {shorten(storage.name)}")
    if type(key) is not str or type(numel) is not int:
        raise ValueError("a storage without a name or size")
    return key, _DTYPES[name], numel


def _numbers(data: bytes, dtype: torch.dtype, numel: int) -> Tensor:
    if numel < 0 or len(data) != numel * dtype.itemsize:
        raise ValueError(f"a storage of {numel} numbers has {len(data)} bytes")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.zeros(0, dtype=dtype)


def _tensor(storage: Tensor | None, offset: int, size: Any, stride: Any, *_: Any) -> Any:
    """Return the part of a storage that is a tensor."""
    if storage is None:
        return Foreign("torch.Tensor")
    numbers = (offset, *size, *stride)
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers) or len(numbers) > 33:
        raise ValueError("a tensor of shape or stride out of range")
    if prod(size) > len(storage):
        raise ValueError(f"a tensor of shape {size} with {len(storage)} numbers")
    return storage.as_strided(size, stride, offset)  # raises where it leaves the storage


_MARK = Foreign("mark")
_CONSTANTS = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING"),
    *("SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_NEW: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": lambda: Foreign("set"),
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}

_MADE: dict[str, Callable[[list[Any]], Any]] = {
    "TUPLE": tuple,
    "LIST": list,
    "DICT": lambda items: _pairs(items),
    "FROZENSET": lambda items: Foreign("frozenset"),
}


class _Machine:
    """Runs one pickle after the other, and makes plain values and tensors only."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def run(self, data: BytesIO) -> Any:
        """Return the value of the pickle that starts at the position of ``data``."""
        self.stack: list[Any] = []
        self.memo: dict[Any, Any] = {}
        for opcode, value, _ in pickletools.genops(data):
            name = opcode.name
            if name in _CONSTANTS:
                self.stack.append(value)
            elif name in _NEW:
                self.stack.append(_NEW[name]())
            elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
                self.memo[len(self.memo) if name == "MEMOIZE" else value] = self.stack[-1]
            elif name in ("BINGET", "LONG_BINGET", "GET"):
                self.stack.append(self.memo[value])
            elif name in ("GLOBAL", "STACK_GLOBAL"):
                words = self._pop(2) if value is None else value.split(" ", 1)
                self.stack.append(_foreign(".".join(map(_text, words))))
            elif name == "STOP":
                return self.stack.pop()
            elif name not in ("PROTO", "FRAME"):
                self._combine(name)
        raise ValueError("a pickle without an end")

    def _combine(self, name: str) -> None:
        """Run an opcode that takes values from the stack."""
        if name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self.stack.append(tuple(self._pop(int(name[-1]))))
        elif name in ("TUPLE", "LIST", "DICT", "FROZENSET"):
            items = self._pop_mark()
            self.stack.append(_MADE[name](items))
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"):
            counts = {"APPEND": 1, "SETITEM": 2}
            items = self._pop(counts[name]) if name in counts else self._pop_mark()
            if isinstance(self.stack[-1], list):
                self.stack[-1].extend(items)
            elif isinstance(self.stack[-1], dict):
                self.stack[-1].update(_pairs(items))
        elif name in ("REDUCE", "NEWOBJ"):
            self.stack.append(_call(*self._pop(2)))
        elif name == "BUILD":  # attributes of an object that is plain or not made
            self._pop(1)
        elif name == "BINPERSID":
            self.stack.append(self.storage(self.stack.pop()))
        else:
            raise ValueError(f"the opcode {name}")

    def _pop(self, count: int) -> list[Any]:
        taken = self.stack[-count:]
        if len(taken) < count:
            raise ValueError("a pickle that takes more values than it has")
        del self.stack[-count:]
        return taken

    def _pop_mark(self) -> list[Any]:
        taken = []
        while (value := self.stack.pop()) is not _MARK:
            taken.append(value)
        return taken[::-1]


def _foreign(name: str) -> Foreign:
    if name.partition(".")[0] not in _PACKAGES:
        raise ForeignCodeError(name)
    return Foreign(name)


def _text(value: Any) -> str:
    """Return a text; raise for other values: those of shared tuples take for ever to print."""
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} instead of a name")
    return value


def _pairs(items: list[Any]) -> dict[str, Any]:
    """Return a dict of the entries with texts as keys: hashing others can take for ever."""
    return {key: value for key, value in zip(items[::2], items[1::2]) if type(key) is str}


def _call(function: Any, arguments: Any) -> Any:
    """Return what a call would give if that is plain or a tensor, and a ``Foreign`` otherwise."""
    name = function.name if isinstance(function, Foreign) else ""
    if name == "collections.OrderedDict":
        pairs = arguments[0] if arguments else []
        if type(pairs) is not list or any(len(pair) != 2 for pair in pairs):
            raise ValueError("entries of an OrderedDict that are no pairs")
        made = _pairs([value for pair in pairs for value in pair])
        pairs.clear()  # a list that many of them share would be copied again and again
        return made
    if name in ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"):
        return _tensor(*arguments)
    if name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
        return arguments[0]
    if name == "torch._tensor._rebuild_from_type_v2":
        return _call(arguments[0], arguments[2])
    return Foreign(name or "an object")
