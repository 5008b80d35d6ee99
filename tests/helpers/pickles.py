"""Pickles written by hand, which ``pickle.dumps`` would not write."""

from __future__ import annotations

import random
import struct
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def integer(value: int) -> bytes:
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def call(name: str, arguments: bytes) -> bytes:
    """Return the code that calls ``module.name`` with the arguments on the stack."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + arguments + b"tR"


def whole(code: bytes) -> bytes:
    """Return a pickle of ``{"state_dict": {"x": code}}``."""
    return b"\x80\x02}" + text("state_dict") + b"}" + text("x") + code + b"ss."


def rebuilt(
    numel: int = 4,
    size: tuple[int, ...] = (2, 2),
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
) -> bytes:
    """Return a pickle with one float tensor ``x`` of the storage "0" of ``numel`` numbers."""
    stride = (2, 1)[-len(size) :] if stride is None else stride
    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
        + integer(numel) + b"tQ"
    )  # fmt: skip
    shape = (b"(" + b"".join(map(integer, numbers)) + b"t" for numbers in (size, stride))
    hooks = call("collections.OrderedDict", b"")
    tensor = storage + integer(offset) + b"".join(shape) + b"\x89" + hooks
    return whole(call("torch._utils._rebuild_tensor_v2", tensor))


def _nested(depth: int) -> bytes:
    """Return the code of a tuple of two equal tuples, ``depth`` deep: 2^depth to hash or print."""
    code = b")q\x00"
    for level in range(depth):
        code += b"h" + bytes([level]) + b"\x86q" + bytes([level + 1])
    return code


HUGE_PICKLES = {
    "hash of nested tuples": b"\x80\x02}" + text("state_dict") + b"}" + _nested(60) + b"K\x01ss.",
    "names of nested tuples": b"\x80\x02}" + _nested(60) + b"K\x01s.",
    "numpy scalar": whole(
        call(
            "numpy.core.multiarray.scalar",
            call("numpy.dtype", text("S8000000000") + b"\x89\x88") + text(""),
        )
    ),
    "numpy dtype": whole(call("numpy.dtype", text("f8," * 10_000_000) + b"\x89\x88")),
    "bytearray": whole(call("builtins.bytearray", integer(8 * 10**9))),
    "torch.Size": whole(call("torch.Size", _nested(60))),
    "counter": whole(call("collections.Counter", text("x" * 10_000))),
    "equal hashes": b"\x80\x02}" + text("state_dict") + b"}("
    + b"".join(integer(k * (2**61 - 1)) + b"K\x01" for k in range(100_000)) + b"us.",
    "lists of lists": b"\x80\x02}" + text("meta") + b"}" + text("mmdet3d_version")
    + b"]q\x00" + b"".join(b"]q" + bytes([i + 1]) + (b"h" + bytes([i])) * 2 + b"\x86a"
                          for i in range(60)) + b"ss.",
    "storage of nested tuples": b"\x80\x02(" + _nested(60) + b"h\x05" * 5 + b"tQ.",
    "name of nested tuples": b"\x80\x04" + _nested(60) + text("x") + b"\x93.",
    "shape of nested tuples": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage")
    + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x00tQK\x00(" + _nested(60)
    + b"t(K\x01t\x89NtR.",
    "pairs of a shared list": b"\x80\x02}" + text("y") + b"]q\x00(" + b"K\x01" * 100_000 + b"es"
    + text("state_dict") + b"ccollections\nOrderedDict\n(](" + b"h\x00" * 100_000 + b"etRs.",
}  # fmt: skip


def hostile_pickle(draw: random.Random) -> bytes:
    """Return a file of ``torch.save`` with a hostile or lying pickle, compressed or not."""
    sizes = [0, 1, 2, -1, 10**9, 2**40, 2**62]
    lie = rebuilt(
        numel=draw.choice([4, *sizes]),
        size=tuple(draw.choice([2, *sizes]) for _ in range(draw.choice([0, 1, 2, 5]))),
        stride=tuple(draw.choice([1, 2, *sizes]) for _ in range(draw.choice([0, 1, 2, 5]))),
        offset=draw.choice([0, 0, *sizes]),
    )
    code = draw.choice([lie, draw.choice(list(HUGE_PICKLES.values()))])
    if draw.random() < 0.4:  # other opcodes and arguments
        place, count = draw.randrange(len(code)), draw.choice([1, 1, 3])
        code = code[:place] + draw.randbytes(count) + code[place + draw.choice([0, count]) :]
    out = BytesIO()
    method = draw.choice([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED])
    torch_zip(out, code, {"0": bytes(draw.choice([0, 16, 100_000]))}, method)
    return out.getvalue()


def torch_zip(
    path: Path | BytesIO,
    code: bytes,
    storages: dict[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> Any:
    """Write a file in the format of ``torch.save`` with this pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", code)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", b"3\n")
    return path
