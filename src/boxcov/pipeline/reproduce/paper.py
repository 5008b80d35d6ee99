"""The numbers of the paper, tables I to VI.

"Instance-Level Post Hoc Uncertainty Quantification in Object Detection".
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

# by column of the paper's table, metric and error
Figures = Mapping[str, Mapping[str, Mapping[str, float]]]


def _columns(
    names: tuple[str, ...], **rows: tuple[tuple[float, ...], tuple[float, ...]]
) -> Figures:
    metrics = {"AvU": rows["avu"], "P(A|C)": rows["pac"], "P(U|I)": rows["pui"]}
    return {
        name: {metric: {"IoU": iou[i], "l2": l2[i]} for metric, (iou, l2) in metrics.items()}
        for i, name in enumerate(names)
    }


QUALITY = _columns(
    ("MCI", "GLM", "MC-GLM"),
    avu=((0.87, 0.64, 0.62), (0.90, 0.66, 0.62)),
    pac=((0.92, 0.92, 0.92), (0.95, 0.93, 0.95)),
    pui=((0.09, 0.14, 0.40), (0.10, 0.10, 0.40)),
)
DEPTH = _columns(
    ("H", "N+H", "B+N+H"),
    avu=((0.62, 0.63, 0.72), (0.62, 0.63, 0.73)),
    pac=((0.92, 0.92, 0.93), (0.95, 0.95, 0.95)),
    pui=((0.40, 0.40, 0.33), (0.40, 0.42, 0.34)),
)
SHARE = _columns(
    ("100 %", "10 %", "5 %"),
    avu=((0.72, 0.61, 0.66), (0.73, 0.62, 0.67)),
    pac=((0.93, 0.92, 0.92), (0.95, 0.95, 0.95)),
    pui=((0.33, 0.37, 0.32), (0.34, 0.39, 0.35)),
)
EPSILON = _columns(
    ("1", "1e-3", "1e-7"),
    avu=((0.88, 0.92, 0.62), (0.90, 0.94, 0.62)),
    pac=((0.92, 0.92, 0.92), (0.94, 0.94, 0.95)),
    pui=((0.08, 0.01, 0.40), (0.08, 0.01, 0.40)),
)
SAMPLES = _columns(
    ("10", "20", "30"),
    avu=((0.62, 0.64, 0.63), (0.62, 0.64, 0.64)),
    pac=((0.92, 0.92, 0.92), (0.95, 0.95, 0.95)),
    pui=((0.40, 0.39, 0.38), (0.40, 0.40, 0.39)),
)
TABLES = {
    "quality": QUALITY,
    "depth": DEPTH,
    "share": SHARE,
    "epsilon": EPSILON,
    "samples": SAMPLES,
}  # I, III, IV, V and VI
RUNTIME = {"MCI": 525.0, "GLM": 10636.0, "MC-GLM": 542.0}  # ms per frame, 97.3 boxes on average
STORAGE = {"H": 173.0, "N+H": 497.0, "B+N+H": 651.0}  # MB


class Shares(NamedTuple):
    """Shares of the predictions that three metrics determine."""

    P_U: float  # uncertain
    P_A: float  # accurate


def shares(avu: float, pac: float, pui: float) -> Shares:
    """Return P(U) and P(A), which the paper does not state, from its AvU, P(A|C) and P(U|I).

    With p = P(I): P(A, C) = AvU - P(U|I) p and P(C) = P(A, C) + (1 - P(U|I)) p, whose ratio is
    P(A|C). At chance level P(U|I) = P(U) and P(A|C) = P(A).

    >>> found = shares(avu=0.62, pac=0.92, pui=0.40)  # MC-GLM, IoU
    >>> round(found.P_U, 2), round(found.P_A, 2)
    (0.36, 0.92)
    """
    p = avu * (1 - pac) / (pui + pac * (1 - 2 * pui))
    return Shares(P_U=1 - (avu + (1 - 2 * pui) * p), P_A=1 - p)


def bounds(avu: float, pac: float, pui: float, rounding: float = 0.005) -> tuple[Shares, Shares]:
    """Return the smallest and largest shares compatible with numbers rounded to two digits.

    >>> low, high = bounds(0.62, 0.92, 0.40)
    >>> round(low.P_U, 2), round(high.P_U, 2)
    (0.36, 0.37)
    """
    steps = product((-rounding, rounding), repeat=3)
    ends = [shares(avu + a, pac + b, pui + c) for a, b, c in steps]
    return Shares(*map(min, zip(*ends))), Shares(*map(max, zip(*ends)))
