"""The numbers of the paper, tables I to VI: ``paper.json``.

"Instance-Level Post Hoc Uncertainty Quantification in Object Detection".
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from boxcov.input_file import read_json

# by column of the paper's table, metric and error
Figures = Mapping[str, Mapping[str, Mapping[str, float]]]
_NUMBERS = read_json(Path(__file__).with_suffix(".json"))
TABLES: Mapping[str, Figures] = _NUMBERS["tables"]  # I, III, IV, V and VI
RUNTIME: Mapping[str, float] = _NUMBERS["runtime"]  # II: ms per frame, 97.3 boxes on average
STORAGE: Mapping[str, float] = _NUMBERS["storage"]  # III: MB


class Shares(NamedTuple):
    """Shares of the predictions that three metrics determine."""

    P_U: float  # uncertain
    P_A: float  # accurate


def shares(avu: float, pac: float, pui: float) -> Shares:
    """Return P(U) and P(A), which the paper does not state, from its AvU, P(A|C) and P(U|I).

    With p = P(I): P(A, C) = AvU - P(U|I) p and P(C) = P(A, C) + (1 - P(U|I)) p, whose ratio is
    P(A|C). At chance level P(U|I) = P(U) and P(A|C) = P(A).
    """
    p = avu * (1 - pac) / (pui + pac * (1 - 2 * pui))
    return Shares(P_U=1 - (avu + (1 - 2 * pui) * p), P_A=1 - p)


def bounds(avu: float, pac: float, pui: float, rounding: float = 0.005) -> tuple[Shares, Shares]:
    """Return the smallest and largest shares compatible with numbers rounded to two digits."""
    steps = product((-rounding, rounding), repeat=3)
    ends = [shares(avu + a, pac + b, pui + c) for a, b, c in steps]
    return Shares(*map(min, zip(*ends))), Shares(*map(max, zip(*ends)))
