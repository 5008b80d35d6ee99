"""How usual the sides of a label are among those of its class, or of another one."""

from __future__ import annotations

from math import ceil, log, pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_BANDWIDTHS = (0.04, 0.08, 0.16, 0.32, 0.64)  # of logarithms: 4 % to 64 % of a side
_MOST = 500  # labels of a class that are compared with
_ROWS = 4000  # labels at once
_SPREAD = 0.1  # of the log sides of all labels, at least


def log_density(x: Array, labels: Array, asked: Array) -> Array:
    """Return the log density (n,) of the log sides x (n, d) of label i in the class asked[i].

    It is a kernel estimate from the other labels of that class, and one more that may have any
    size. The bandwidth of a class gives its own labels the highest density. Class -1 has no labels:
    any size.

    >>> x, car = np.log([[2.0], [2.0], [2.0], [9.0]]), np.zeros(4, int)
    >>> found = log_density(x, car, car)
    >>> bool(found[0] > found[3] + 2)
    True
    """
    broad = _broad(x)
    found = np.zeros(len(x))
    for label in np.unique(asked):
        members = np.flatnonzero(labels == label)
        members = members[:: max(ceil(len(members) / _MOST), 1)]
        rows = np.flatnonzero(asked == label)
        tried = [_density(x, broad, members, members, h).sum() for h in _BANDWIDTHS]
        h = _BANDWIDTHS[int(np.argmax(tried))]
        parts = [rows[i : i + _ROWS] for i in range(0, len(rows), _ROWS)]
        found[rows] = np.concatenate([_density(x, broad, part, members, h) for part in parts])
    return found


def _broad(x: Array) -> Array:
    """Return the log density (n,) of a normal distribution of all labels, of any class."""
    n, d = x.shape
    if not n:
        return np.zeros(0)
    off = x - x.mean(0)
    S = off.T @ off / n + _SPREAD**2 * np.eye(d)
    squares = (off @ np.linalg.inv(S) * off).sum(1).clip(max=100)  # no density is 0
    found: Array = -0.5 * (squares + np.linalg.slogdet(S)[1] + d * log(2 * pi))
    return found


def _density(x: Array, broad: Array, rows: Array, members: Array, bandwidth: float) -> Array:
    """Return the log density of some labels among the members of a class, themselves left out."""
    off = (x[rows, None] - x[None, members]) / bandwidth
    peak = (2 * pi * bandwidth**2) ** (-x.shape[1] / 2)
    is_other = rows[:, None] != members
    kernels = np.where(is_other, peak * np.exp(-0.5 * (off**2).sum(2)), 0.0)
    found: Array = np.log((kernels.sum(1) + np.exp(broad[rows])) / (is_other.sum(1) + 1))
    return found
