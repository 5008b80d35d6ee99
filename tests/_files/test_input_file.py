"""What files say is read and checked in one place."""

from __future__ import annotations

import ast
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from boxcov import BoxcovError
from boxcov._files.input_file import MAX_TEXT, conform, parse_metadata, read_bytes, reading

SOURCES = Path(__file__).parents[2] / "src" / "boxcov"
READERS = {
    *("open", "read_text", "read_bytes", "safe_open", "load_file", "fromfile", "memmap"),
    *("loadtxt", "genfromtxt", "ZipFile", "json.load", "json.loads", "torch.load", "onnx.load"),
    *("torch.from_file", "np.load", "Image.open", "os.open"),
}
# Calls of readers outside input_file.py that read nothing that others wrote.
OWN = {
    ("_torch/distributed.py", "json.loads"): "text of another rank of the same run",
    ("data/loader.py", "torch.load"): "items of the run's own worker processes",
    ("data/nuscenes/index.py", "read_text"): "a file of the package",
    ("data/nuscenes/index.py", "json.loads"): "a file of the package",
    ("report/page.py", "read_text"): "a file of the package",
    ("data/coco/images.py", "Image.open"): "bytes that input_file.py read",
    ("detectors/torch_file.py", "ZipFile"): "bytes that input_file.py read",
    ("pipeline/predict.py", "json.loads"): "its own text",
    ("_files/output_file.py", "open"): "the file that is being written",
    ("_files/output_file.py", "os.open"): "a folder, to flush it, and a lock",
    ("_files/output_file.py", "read_text"): "the lock of an output",
    ("data/video.py", "open"): "a file that input_file.py opened",
    ("data/video.py", "Image.open"): "a file that input_file.py opened",
    ("detectors/ultralytics/checkpoints.py", "torch.load"): "weights only, no constructors",
    ("pipeline/show.py", "open"): "the file that is being written",
    ("pipeline/terminal.py", "os.open"): "the null device, for writing",
    ("export/tables.py", "open"): "the file that is being written",
    ("data/nuscenes/results.py", "open"): "the file that is being written",
}


def reader_calls(path: Path) -> set[str]:
    """Return the calls in a module that read a file, as READERS names them."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom)]
    checked = {a.name for n in imports if n.module == "boxcov._files.input_file" for a in n.names}
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    foreign = {call for call in calls if call not in checked}
    return {call if call in READERS else call.rpartition(".")[2] for call in foreign} & READERS


def test_no_module_reads_files_by_itself() -> None:
    found = {
        (str(path.relative_to(SOURCES)), call)
        for path in SOURCES.rglob("*.py")
        if path.name != "input_file.py"
        for call in reader_calls(path)
    }
    assert found - set(OWN) == set(), "read files through boxcov._files.input_file"
    assert set(OWN) - found == set(), "these exceptions are no longer needed"


@pytest.mark.parametrize(
    "code",
    [
        "from safetensors import safe_open\nsafe_open(path)",
        "json.loads(text)",
        "json.load(file)",
        "open(path)",
        "path.open()",
        "path.read_text()",
        "np.fromfile(path)",
        "torch.load(path)",
    ],
)
def test_a_module_that_reads_by_itself_is_found(tmp_path, code) -> None:
    (tmp_path / "x.py").write_text(code)
    assert reader_calls(tmp_path / "x.py")


@dataclass(frozen=True)
class Example:
    name: str
    count: int = 1
    kind: Literal["a", "b"] = "a"
    sizes: tuple[float, ...] = ()
    pair: tuple[int, int] | None = None


GOOD = {"name": "x", "count": 3, "kind": "b", "sizes": [1, 2.5], "pair": [1, 2]}


def test_a_value_becomes_what_its_schema_says() -> None:
    expected = Example("x", 3, "b", (1.0, 2.5), (1, 2))
    assert conform(GOOD, Example, "it") == expected
    assert conform({"name": "x", "pair": None}, Example, "it") == Example("x")
    assert conform([[1], [2]], list[list[int]], "it") == [[1], [2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "it.name is 3, expected a text"),
        ({"name": "x" * (MAX_TEXT + 1)}, "it.name is .*characters.*, expected a text"),
        ({"name": "\0"}, "it.name is"),
        ({"name": "\ud800"}, "it.name is"),
        ({"count": "3"}, "it.count is '3', expected a whole number"),
        ({"count": True}, "it.count is True"),
        ({"count": 2.0}, "it.count is 2.0"),
        ({"count": 10**30}, "it.count is 1000000"),
        ({"kind": "c"}, "it.kind is 'c', expected 'a' or 'b'"),
        ({"kind": []}, "it.kind is"),
        ({"sizes": [1, "2"]}, r"it.sizes\[1\] is '2', expected a finite number"),
        ({"sizes": [float("nan")]}, r"it.sizes\[0\] is nan"),
        ({"sizes": 10**400}, "it.sizes is 1000"),
        ({"sizes": [10**400]}, r"it.sizes\[0\] is 1000"),
        ({"pair": [1]}, r"it.pair is \[1\], expected a list of 2"),
        ({"pair": "12"}, "it.pair is '12'"),
        ({"other": 1}, "it has an unknown entry 'other'"),
    ],
)
def test_other_values_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BoxcovError, match=message) as caught:
        conform({**GOOD, **change}, Example, "it")
    assert len(str(caught.value)) < 300


def test_missing_entries_and_other_types_are_refused() -> None:
    with pytest.raises(BoxcovError, match="it has no name"):
        conform({}, Example, "it")
    for value in (None, [], 3, "x"):
        with pytest.raises(BoxcovError, match=r"it is .*, expected an object"):
            conform(value, Example, "it")


def test_metadata_has_limits() -> None:
    assert parse_metadata("[" * 32 + "]" * 32)
    for text in ("[" * 34 + "]" * 34, '{"a":' * 40 + "1" + "}" * 40, "[" * 10**6, "9" * 10**5):
        with pytest.raises((ValueError, RecursionError)):
            parse_metadata(text)
    wide = json.dumps([[[i] for i in range(1000)] for _ in range(10)])
    assert len(parse_metadata(wide)) == 10


def test_only_regular_files_of_a_size_are_read(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(100))
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory|a NUL"):
            read_bytes(path)
    with pytest.raises(OSError, match="100 bytes, at most 99 are read"):
        read_bytes(tmp_path / "large", 99)
    assert len(read_bytes(tmp_path / "large", 100)) == 100


def test_a_lack_of_memory_names_the_file() -> None:
    with pytest.raises(BoxcovError, match=r"x\.bin: not points"), reading("x.bin", "points"):
        raise MemoryError
