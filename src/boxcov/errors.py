"""Errors and warnings of boxcov. A message names the value, the place and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral, Real
from operator import index
from traceback import format_exception
from typing import Any, get_args

_PIP_NAMES = {"rerun": "rerun-sdk", "PIL": "pillow", "yaml": "pyyaml"}


class BoxcovError(ValueError):
    """Invalid arguments or unusable input; nothing was changed.

    >>> raise BoxcovError("samples must be at least 2, got 1")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: samples must be at least 2, got 1
    """


class BoxcovWarning(UserWarning):
    """A result is correct but may not be what was intended.

    >>> import warnings
    >>> warnings.simplefilter("error", BoxcovWarning)  # turn the warnings into errors
    """


class NotFiniteError(BoxcovError):
    """A covariance is not finite, not symmetric, or has a negative variance."""


class NotFiniteFrameError(BoxcovError):
    """The inputs, loss or gradients of a frame hold NaN or infinite values.

    ``FitOptions(nonfinite="skip")`` leaves such frames out.
    """


class UserCodeError(BoxcovError):
    """Code of the user raised an error, which is the ``__cause__`` of this one."""

    def user_traceback(self) -> str:
        """Return the traceback of the user's error without the frames of boxcov above it."""
        error = self.__cause__
        while isinstance(error, UserCodeError):  # another process of torchrun added its rank
            error = error.__cause__
        if error is None:
            return ""
        trace = error.__traceback__
        while trace and _is_above(trace.tb_frame.f_globals.get("__name__", "")):
            trace = trace.tb_next
        return "".join(format_exception(type(error), error, trace)).rstrip()


def _is_above(module: str) -> bool:
    """Return whether frames of a module only lead to the user's code."""
    return module.partition(".")[0] in ("boxcov", "importlib", "contextlib")


def join_names(names: Iterable[str], most: int = 8) -> str:
    """Return the first few names for an error message.

    >>> join_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    names = list(names)
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one.

    >>> counted(1, "box"), counted(2, "box"), counted(0, "usual frame")
    ('1 box', '2 boxes', '0 usual frames')
    """
    plural = "es" if noun.endswith(("x", "s")) else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise if the argument ``name`` is not one of the values of the Literal ``choices``."""
    if value not in get_args(choices):
        raise BoxcovError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def check_instance(name: str, value: object, kind: type) -> None:
    """Raise if the argument ``name`` is not an object of the class ``kind``."""
    if not isinstance(value, kind):
        known = f"{kind.__module__}.{kind.__name__}"
        raise BoxcovError(f"{name} must be a {kind.__name__}, got {value!r}: see {known}")


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise if the argument ``name`` is not a whole number of at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise BoxcovError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_real(name: str, value: object) -> None:
    """Raise if the argument ``name`` is not a number: a text or a flag is none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise BoxcovError(f"{name} must be a number, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise if the argument ``name`` is not True or False: the text "no" would count as True."""
    if not isinstance(value, bool):
        raise BoxcovError(f"{name} must be True or False, got {value!r}")


def check_seed(seed: Any) -> int:
    """Return a random seed as an int, which may be one of numpy; raise if torch takes no such seed.

    >>> check_seed(3.7)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: seed must be a whole number from -2^63 to 2^64 - 1, got 3.7
    """
    try:
        number = index(seed)
    except TypeError:
        number = 2**64
    if not -(2**63) <= number < 2**64:
        raise BoxcovError(f"seed must be a whole number from -2^63 to 2^64 - 1, got {seed!r}")
    return number


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for an error message: the known name that looks most like ``name``.

    >>> did_you_mean("centrpoint", ["centerpoint", "yolox"]), did_you_mean("x", ["yolox"])
    (" (did you mean 'centerpoint'?)", '')
    """
    close = get_close_matches(name, list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def import_package(name: str) -> Any:
    """Import a package, or a module of one, that only some functions need."""
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0]  # no extra of boxcov: pip installs it anywhere
        advice = f"pip install {_PIP_NAMES.get(package, package)}"
        raise BoxcovError(f"{package} is not installed: {advice}") from None
