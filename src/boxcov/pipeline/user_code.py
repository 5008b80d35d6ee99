"""Load the function that ``python:MODULE:FUNCTION`` or ``python:FILE.py:FUNCTION`` names.

This runs the user's own code, with all rights of the process. Nothing that boxcov reads from a file
of results or weights can name such a function: only options of the command line do. An error of
that code becomes a ``UserCodeError``, one line that names the function; the command line prints the
traceback above it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from boxcov._files.input_file import shorten
from boxcov.errors import BoxcovError, UserCodeError

PREFIX = "python:"
FORM = "python:MODULE:FUNCTION"  # or python:FILE.py:FUNCTION


@contextmanager
def user_code(where: str) -> Iterator[None]:
    """Turn errors of the user's code that runs inside into one line that starts with ``where``."""
    try:
        yield
    except BoxcovError as error:  # of boxcov.wrap, for example: it says what to do
        raise BoxcovError(f"{where}: {error}") from error
    except Exception as error:
        raise UserCodeError(
            f"{where} raises {type(error).__name__}: {shorten(error, 400)}"
        ) from error


@dataclass(frozen=True)
class UserFunction:
    """A function of the user's; its errors name it and its arguments."""

    name: str  # FILE.py:FUNCTION or MODULE:FUNCTION
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        with user_code(f"{self.name}({', '.join(map(str, arguments))})"):
            return self.function(*arguments)


def load_function(name: str) -> UserFunction:
    """Return the function ``name``; modules are also looked for in the working directory."""
    where, _, function = name.removeprefix(PREFIX).rpartition(":")
    if not name.startswith(PREFIX) or not where or not function:
        raise BoxcovError(f"{name!r} names no function: give {FORM} or python:FILE.py:FUNCTION")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    found = getattr(module, function, None)
    if not callable(found):
        called = {name: value for name, value in vars(module).items() if callable(value)}
        own = [n for n, v in called.items() if getattr(v, "__module__", None) == module.__name__]
        raise BoxcovError(
            f"{where}: has no function {function!r}; it has {', '.join(own) or 'none'}"
        )
    return UserFunction(f"{where}:{function}", found)


def _load_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    with user_code(name):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                raise  # an import inside the user's module
    raise BoxcovError(
        f"no module {missing!r} is installed or in {Path.cwd()}: give the name of a module, "
        "or a file as python:FILE.py:FUNCTION"
    )


def _load_file(path: Path) -> ModuleType:
    """Run a file as a module, once; like a script it can import the files beside it."""
    path = path.resolve()
    name = str(path)
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise BoxcovError(f"{path}: no such file")
    spec = spec_from_file_location(name, path)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    _add_to_path(path.parent)
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        with user_code(name):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
