"""Damage files as an attacker or a failing disk would."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.hostile_images import hostile_image
from helpers.pickles import hostile_pickle

LARGEST = 2_000_000  # bytes of a mutated file, about
# names that would control a terminal, a spreadsheet, a figure, a page or a log
ESCAPES = (
    *("\x1b[2J\x1b]0;owned\x07", "\x9b31m", "a\rb\nerror: c", "\u202egpj.exe", "\u2028", "\ud800"),
    *("[bold]x[/nope]", "[link=file:///x]y", "=cmd|' /C calc'!A0", "@SUM(A1)", "-1+2", "\t=1"),
    *(r"$\frac{1$", "<script>x</script>", "</script><img src=x>", "{0.__class__}", "%s%n", "\x00"),
)
HOSTILE: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**63),
        10**400,
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        -0.0,
    ),
    *("", "x", "NaN", "../../../etc/passwd", "/etc/passwd", "x" * 5000, "\x00", "\ud800", "é"),
    *([], {}, [[]], [{}], [1, "a", None], {"": {}}, [0] * 3000, {"token": []}),
]


def mutated(content: bytes, kind: str, draw: random.Random) -> bytes:
    """``content`` with one to three mutations.

    kind: "bytes", "json" or "safetensors"; "image" and "pickle" make a hostile file instead.
    """
    if kind in ("image", "pickle"):
        made = hostile_image(draw) if kind == "image" else hostile_pickle(draw)
        return flipped(made, draw) if draw.random() < 0.2 else made
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        ways: list[Callable[[bytes, random.Random], bytes]] = [flipped, cut, grown, patched, moved]
        if kind == "json":
            ways += [*[in_json] * 6, *[lying_counts] * 3, *[escapes] * 3]
        if kind == "safetensors":
            ways += [lying_length, *[in_header] * 4, *[in_metadata] * 6, *[lying_metadata] * 3]
            ways += [lambda data, draw: in_metadata(data, draw, escapes)] * 3
        if len(content) <= LARGEST:
            content = draw.choice(ways)(content, draw)
    return content


def put_special(path: Path, draw: random.Random) -> str:
    """Replace a file by one that is no regular file, and return its kind."""
    kind = draw.choice(["pipe", "folder", "socket", "nothing", "loop", "link", "endless", "null"])
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        here = os.open(path.parent, os.O_RDONLY)  # the path of a socket has at most 107 characters
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    else:
        to = {"nothing": "/nowhere", "loop": path.name, "link": "/etc", "null": "/dev/null"}
        path.symlink_to(to.get(kind, "/dev/zero"))
    return kind


def remove_special(path: Path) -> None:
    """Remove whatever ``put_special`` put there."""
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


# bytes


def flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 4, 30])):
        if changed:
            changed[_place(changed, draw)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(content: bytes, draw: random.Random) -> bytes:
    """The end, or a piece of the middle."""
    start = _place(content, draw)
    return (
        content[:start]
        if draw.random() < 0.5
        else content[:start] + content[start + draw.randrange(1, 200) :]
    )


def grown(content: bytes, draw: random.Random) -> bytes:
    start, count = _place(content, draw), draw.choice([1, 3, 100, 5000])
    extra = draw.choice(
        [
            draw.randbytes(count),
            b"\x00" * count,
            b"[" * count,
            b"{" * count,
            b'"' * count,
            b"9" * count,
            b" " * count,
        ]
    )
    return content[:start] + extra + content[start:]


def patched(content: bytes, draw: random.Random) -> bytes:
    """Numbers and signs that mean much, over what is there."""
    start = _place(content, draw)
    patch = draw.choice(
        [
            b"\xff" * 8,
            b"\x00" * 8,
            b"\x7f\xff\xff\xff",
            b"\x80\x00\x00\x00",
            b"-1",
            b"1e999",
            b"NaN",
            b"null",
            b'"',
            b"}",
            b"]",
            b",",
        ]
    )
    return content[:start] + patch + content[start + len(patch) :]


def moved(content: bytes, draw: random.Random) -> bytes:
    """A piece over another place, or twice."""
    start, to, count = _place(content, draw), _place(content, draw), draw.randrange(1, 300)
    return content[:to] + content[start : start + count] + content[to + draw.choice([0, count]) :]


def _place(content: bytes | bytearray, draw: random.Random) -> int:
    """Return a random position, more often near the beginning, where headers are."""
    return draw.randrange(max(1, min(len(content), draw.choice([16, 400, len(content)]))))


# structure


def in_json(content: bytes, draw: random.Random) -> bytes:
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return flipped(content, draw)
    if draw.random() < 0.02:
        return b"[" * 100_000 + content
    return json.dumps(_changed(tree, draw)).encode()


def _changed(tree: Any, draw: random.Random) -> Any:
    """The tree with one node replaced, removed, doubled or renamed, at a random depth."""
    if not isinstance(tree, (dict, list)) or not tree or draw.random() < 0.1:
        return draw.choice(HOSTILE)
    key = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    way = draw.random()
    if way < 0.7:
        tree[key] = _changed(tree[key], draw)
    elif way < 0.85:
        del tree[key]
    elif isinstance(tree, list):
        tree.append(tree[key])
    else:
        tree[draw.choice(list(tree))] = tree[key]
    return tree


def lying_counts(content: bytes, draw: random.Random) -> bytes:
    """Replace a number by a huge one, or repeat a list, a text or the nesting of a value."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return flipped(content, draw)
    return json.dumps(_inflated(tree, draw)).encode()


def _inflated(tree: Any, draw: random.Random) -> Any:
    if isinstance(tree, (dict, list)) and tree and draw.random() < 0.8:
        key = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        tree[key] = _inflated(tree[key], draw)
        return tree
    if isinstance(tree, list) and tree:
        most = LARGEST // len(json.dumps(tree))
        return tree * min(1 + draw.choice([10, 3000, 100_000]) // len(tree), most + 1)
    if isinstance(tree, str):
        return tree * draw.choice([0, 100, 1_000_000 // max(len(tree), 1)])
    if isinstance(tree, dict):
        return {**tree, **{f"key {i}": i for i in range(draw.choice([1, 1000]))}}
    if draw.random() < 0.2:
        depth = draw.choice([30, 40, 400])
        return json.loads("[" * depth + "]" * depth)
    return draw.choice([0, -1, 10**5, 10**9, 10**12, 2**40, 2**62, 1e12, 1e308, -(10**12)])


def escapes(content: bytes, draw: random.Random) -> bytes:
    """Put characters that control a terminal, or text of another language, into names."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return flipped(content, draw)
    return json.dumps(_escaped(tree, draw)).encode()


def _escaped(tree: Any, draw: random.Random) -> Any:
    if not isinstance(tree, (dict, list)) or not tree:
        name = draw.choice(ESCAPES)
        return tree + name if isinstance(tree, str) and draw.random() < 0.3 else name
    key = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    if isinstance(tree, dict) and draw.random() < 0.2:
        tree[draw.choice(ESCAPES)] = tree.pop(key)
    else:
        tree[key] = _escaped(tree[key], draw)
    return tree


def lying_length(content: bytes, draw: random.Random) -> bytes:
    """Replace the length of a safetensors header by an invalid one."""
    length = int.from_bytes(content[:8], "little")
    lie = draw.choice(
        [
            0,
            1,
            length - 1,
            length + 1,
            2**32,
            2**63,
            2**64 - 1,
            100_000_000,
            len(content),
            len(content) - 8,
        ]
    )
    return (lie % 2**64).to_bytes(8, "little") + content[8:]


def in_header(content: bytes, draw: random.Random) -> bytes:
    """Names, types, shapes and offsets of tensors."""
    header, data = _split(content)
    if header is None:
        return flipped(content, draw)
    names = [name for name in header if name != "__metadata__" and isinstance(header[name], dict)]
    if names and draw.random() < 0.7:
        entry = header[draw.choice(names)]
        key = draw.choice(["dtype", "shape", "data_offsets"])
        sizes = [0, 1, -1, 2**31, 2**40, 2**62, 2**64]
        entry[key] = {
            "dtype": draw.choice(["F64", "F16", "BF16", "I64", "U8", "BOOL", "X9", 7]),
            "shape": draw.choice(
                [[], [draw.choice(sizes)], [draw.choice(sizes), draw.choice(sizes)], "x", [[1]]]
            ),
            "data_offsets": draw.choice(
                [[0, draw.choice(sizes)], [draw.choice(sizes), 0], [5], None]
            ),
        }[key]
    else:
        header = _changed(header, draw)
    return _joined(header, data)


def lying_metadata(content: bytes, draw: random.Random) -> bytes:
    """Counts in the metadata, or the shape of a tensor without numbers."""
    header, data = _split(content)
    if header is None or draw.random() < 0.7:
        return in_metadata(content, draw, lying_counts)
    names = [name for name in header if name != "__metadata__" and isinstance(header[name], dict)]
    shapes = [[10**9, 0], [0, 10**9], [10**9, 0, 1, 1], [0] * 5]
    for name in draw.sample(names, min(len(names), 3)):
        header[name] = {"dtype": "F32", "shape": draw.choice(shapes), "data_offsets": [0, 0]}
    return _joined(header, data)


def in_metadata(
    content: bytes,
    draw: random.Random,
    change: Callable[[bytes, random.Random], bytes] | None = None,
) -> bytes:
    """The JSON texts in a safetensors header."""
    header, data = _split(content)
    if (
        header is None
        or not isinstance(header.get("__metadata__"), dict)
        or not header["__metadata__"]
    ):
        return flipped(content, draw)
    texts = header["__metadata__"]
    key = draw.choice(list(texts))
    if isinstance(texts[key], str):
        text = texts[key].encode("utf-8", "surrogatepass")
        texts[key] = (change or in_json)(text, draw).decode("utf-8", "replace")
    return _joined(header, data)


def _split(content: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return None, b""
    return (header, content[8 + length :]) if isinstance(header, dict) else (None, b"")


def _joined(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data
