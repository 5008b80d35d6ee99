"""What boxcov raises and warns: one message that names the value, the place and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any


class BoxcovError(ValueError):
    """A user's mistake or unusable input; nothing was changed.

    >>> raise BoxcovError("samples must be at least 2, got 1")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: samples must be at least 2, got 1
    """


class BoxcovWarning(UserWarning):
    """Something that gives a right answer to a question you may not have meant to ask.

    >>> import warnings
    >>> warnings.simplefilter("error", BoxcovWarning)  # in a safety case, turn them into errors
    """


class NotFiniteError(BoxcovError):
    """A covariance came out as NaN, infinite, or as none at all (not symmetric, a negative variance): the step or the weights are out of range."""


class NotFiniteFrameError(BoxcovError):
    """A frame's inputs, loss or gradient hold a NaN or an infinity; ``fit(nonfinite="skip")`` leaves such frames out."""


def join_names(names: Iterable[str], most: int = 8) -> str:
    """Names for an error message, the first few of many.

    >>> join_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    names = list(names)
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def import_scipy(module: str) -> Any:
    """Import a submodule of scipy, which only the extra ``cli`` installs.

    >>> import_scipy("special").expit(0.0)
    np.float64(0.5)
    """
    try:
        return import_module(f"scipy.{module}")
    except ImportError:
        raise BoxcovError("scipy is not installed: pip install 'boxcov[cli]'") from None
