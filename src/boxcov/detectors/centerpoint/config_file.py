"""Read the configuration files of det3d, mmdetection3d and OpenPCDet without running them.

A Python file is parsed, and only literals, ``dict(...)`` and names of earlier literals are
understood. Everything else is ``UNKNOWN``, and asking for it is an error.
"""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from boxcov._files.input_file import read_bytes, reading
from boxcov.errors import BoxcovError, import_package, join_names

SUFFIXES = (".py", ".yaml", ".yml")
MAX_FILES = 100  # that are read for one configuration
MAX_BYTES = 1 << 20  # of a configuration; real ones have some 10,000
MAX_VALUES = 10_000  # of one setting, those of lists inside each other included

UNKNOWN = object()  # a value that only running the file would give


@dataclass(frozen=True)
class Settings:
    """The nested settings of a configuration file."""

    values: Mapping[str, Any]
    source: str  # of the messages: a file, or a place in a checkpoint
    missing_bases: tuple[str, ...] = ()

    def at(self, path: str) -> Any:
        """Return the value at a dotted path; None if there is none."""
        value: Any = self.values
        for key in path.split("."):
            if value is not UNKNOWN:
                value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def get(self, *paths: str, default: Any = None) -> Any:
        """Return the value at the first of the dotted ``paths`` that exists.

        The default is used only if no base file is missing that might hold the value. Without a
        default the value is required.
        """
        for path in paths:
            value = self.at(path)
            if is_unknown(value):
                raise BoxcovError(
                    f"{self.source}: {path} is not a plain value, and boxcov does not run "
                    "configuration files"
                )
            if value is not None:
                return value
        if self.missing_bases:
            raise BoxcovError(
                f"{self.source}: no {paths[0]}; it may be in {join_names(self.missing_bases)}, "
                "which is not there: put that file in its place"
            )
        if default is None:
            raise BoxcovError(f"{self.source}: no {' or '.join(paths)}")
        return default


def is_unknown(value: Any) -> bool:
    """Return whether any part of a setting is UNKNOWN; raise if it has too many parts.

    A list that holds another one twice, which holds a third one twice, and so on, is small in the
    file, and its text or a copy would fill any memory.
    """
    left, count = [value], 0
    while left:
        part = left.pop()
        if part is UNKNOWN:
            return True
        if isinstance(part, Mapping | list | tuple):
            left.extend(part.values() if isinstance(part, Mapping) else part)
        count += 1
        if count + len(left) > MAX_VALUES:
            raise BoxcovError(f"a setting of more than {MAX_VALUES} values")
    return False


@dataclass
class _Bases:
    """The base files of a configuration so far."""

    missing: list[str] = field(default_factory=list)
    files: int = 0


def read_settings(path: Path) -> Settings:
    """Return the settings of a ``.py`` or ``.yaml`` file, including those of its base files."""
    bases = _Bases()
    with reading(path, "a configuration file"):  # its settings may lie too deep in each other
        values = _read(path, bases)
    return Settings(values, str(path), tuple(bases.missing))


def parse_settings(text: str, source: str) -> Settings:
    """Return the settings in the text of a Python configuration."""
    if len(text) > MAX_BYTES:
        raise BoxcovError(f"{source}: {len(text)} characters, at most {MAX_BYTES} are read")
    with reading(source, "a Python file"):
        return Settings(_run_literals(_parse(text), {}), source)


def _read(path: Path, bases: _Bases) -> dict[str, Any]:
    bases.files += 1
    if bases.files > MAX_FILES:
        raise BoxcovError(f"{path}: more than {MAX_FILES} base files")
    is_python = path.suffix == ".py"
    with reading(path, "a Python file" if is_python else "a YAML file"):
        text = read_bytes(path, MAX_BYTES).decode("utf-8")
        content = _parse(text) if is_python else _parse_yaml(text)
    if isinstance(content, ast.Module):
        return _read_python(path, content, bases)
    return {key: _with_base(value, path, bases) for key, value in content.items()}


def _read_python(path: Path, tree: ast.Module, bases: _Bases) -> dict[str, Any]:
    named = _run_literals(tree, {}).get("_base_", [])
    base: dict[str, Any] = {}
    for name in named if isinstance(named, list) else [named]:
        file = path.parent / (name if isinstance(name, str) else "a file of unknown name")
        if file.is_file():
            base = _merge(base, _read(file, bases))
        else:
            bases.missing.append(str(file))
    return _merge(base, _run_literals(tree, base))


def _with_base(value: Any, path: Path, bases: _Bases) -> Any:
    """Return a section of a YAML file merged into its ``_BASE_CONFIG_``, and lists by NAME."""
    if not isinstance(value, dict):
        return value
    if isinstance(name := value.get("_BASE_CONFIG_"), str):
        # relative to the folder tools/ of OpenPCDet, which holds cfgs/
        places = [folder / name for folder in (path.parent, *path.parents)]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            bases.missing.append(name)
        else:
            value = {**_read(file, bases), **value}
    return {key: _by_name(entry) for key, entry in value.items()}


def _by_name(value: Any) -> Any:
    """Return a list of dicts with a NAME as a dict of dicts."""
    if isinstance(value, list) and all(isinstance(v, dict) for v in value):
        names = [v.get("NAME") for v in value]
        if all(isinstance(name, str) for name in names):
            return dict(zip(names, value))
    return value


def _parse_yaml(text: str) -> dict[str, Any]:
    yaml = import_package("yaml")

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        def flatten_mapping(self, node: Any) -> None:
            if any(key.tag.endswith(":merge") for key, _ in node.value):
                # a mapping that merges another one twice, and so on, would fill any memory
                raise BoxcovError("merge keys (<<) are not read: write the settings out")

    try:
        values = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(type(error).__name__) from None
    if not isinstance(values, dict):
        raise BoxcovError("not a configuration: its content is no mapping")
    return {str(key): value for key, value in values.items()}


# Python files


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None


def _run_literals(tree: ast.Module, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that the statements assign. base: what ``_base_`` stands for."""
    names: dict[str, Any] = {}
    scope = ChainMap({"_base_": base}, names)
    for statement in tree.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.Assign) and isinstance(target, ast.Name):
            names[target.id] = _value(statement.value, scope)
        else:  # a call or a loop may change any name in it
            names.update({n.id: UNKNOWN for n in ast.walk(statement) if isinstance(n, ast.Name)})
    return names


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression, or UNKNOWN."""
    match node:
        case ast.Constant():
            return node.value
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_value(entry, names) for entry in entries]
        case ast.Dict(keys=keys, values=values):
            if not all(isinstance(key, ast.Constant) for key in keys):
                return UNKNOWN
            pairs = zip(keys, values)
            return {key.value: _value(value, names) for key, value in pairs}  # type: ignore[union-attr]
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=entries):
            if any(entry.arg is None for entry in entries):
                return UNKNOWN
            return {str(entry.arg): _value(entry.value, names) for entry in entries}
        case ast.Name(id=name):
            return names.get(name, UNKNOWN)
        case ast.Attribute(value=inner, attr=key):
            held = _value(inner, names)
            return held.get(key, UNKNOWN) if isinstance(held, Mapping) else UNKNOWN
        case ast.Set(elts=[ast.Set(elts=[inner])]):  # {{_base_.name}}
            return _value(inner, names)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Subscript(value=inner, slice=index):
            return _item(_value(inner, names), index)
    return UNKNOWN


def _item(held: Any, index: ast.expr) -> Any:
    try:
        if isinstance(index, ast.Slice):
            ends = (index.lower, index.upper, index.step)
            return held[slice(*(None if end is None else ast.literal_eval(end) for end in ends))]
        return held[ast.literal_eval(index)]
    except (TypeError, ValueError, LookupError):
        return UNKNOWN


def _merge(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``new`` merged into ``base``, as mmcv does: dicts by key, ``_delete_`` replaces."""
    out = dict(base)
    for key, value in new.items():
        held = out.get(key)
        if isinstance(value, Mapping) and isinstance(held, Mapping) and not value.get("_delete_"):
            out[key] = _merge(held, value)
        else:
            out[key] = value
    return out
