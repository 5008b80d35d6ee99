"""Is the paper's P(U|I) above chance, and why does its MC-GLM beat its GLM although the one estimates the other? Measured."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.quality import ERRORS
from boxcov.evaluate.records import Records
from boxcov.pipeline.reproduce import paper
from boxcov.pipeline.reproduce.measures import known, measured, records, refused, spearman
from boxcov.pipeline.reproduce.runs import Workshop
from boxcov.pipeline.reproduce.setting import FORMS, Run, published
from boxcov.pipeline.reproduce.table import Table

DRAWS = 20


def published_chance() -> Table:
    """P(U) and P(A) behind each column of the paper, which its three metrics determine, and P(U|I) against P(U)."""
    named = (
        ("I", paper.QUALITY),
        ("III", paper.DEPTH),
        ("IV", paper.SHARE),
        ("V", paper.EPSILON),
        ("VI", paper.SAMPLES),
    )
    rows: list[tuple[Any, ...]] = []
    for number, figures in named:
        for column, metrics in figures.items():
            for error in ERRORS:
                three = metrics["AvU"][error], metrics["P(A|C)"][error], metrics["P(U|I)"][error]
                low, high = paper.bounds(*three)
                at = paper.shares(*three)
                verdict = (
                    "above"
                    if three[2] - 0.005 > high.P_U
                    else "below"
                    if three[2] + 0.005 < low.P_U
                    else "at chance"
                )
                rows.append(
                    (f"{number}: {column}", error, three[2], at.P_U, verdict, three[1], at.P_A)
                )
    columns = (
        "table: column",
        "error",
        "P(U|I)",
        "its chance, P(U)",
        "verdict",
        "P(A|C)",
        "its chance, P(A)",
    )
    note = "From the paper's figures alone. The verdict allows for all figures being rounded to two digits."
    return Table("chance-paper", "The paper's figures against chance", columns, rows, (note,))


def glm_and_mcglm(workshop: Workshop) -> Table:
    """The exact covariance, the same with the noise of ten samples, and the real MC-GLM: what the noise and the step do to each metric."""
    rows: list[tuple[Any, ...]] = []
    for form in FORMS:
        exact = records(workshop, Run("exact", form))
        rng = np.random.default_rng(0)
        noisy = [exact.with_uncertainty(noisy_trace(exact, 10, rng)) for _ in range(DRAWS)]
        runs = {
            "MC-GLM, jvp": Run("mcglm", form),
            "MC-GLM, fd 1e-7": published(form),
            "MC-GLM, fd 1": published(form, 1.0),
        }
        found = {"exact (= GLM)": [exact], f"exact + noise of k = 10, {DRAWS} draws": noisy}
        found |= {
            name: [records(workshop, run)]
            for name, run in runs.items()
            if refused(workshop, run) is None
        }
        found["size of the box"] = [exact.with_uncertainty(size(exact))]
        for error in ERRORS:
            rows += [(form, name, error, *_cells(parts, error)) for name, parts in found.items()]
    columns = (
        "posterior",
        "u",
        "error",
        "P(U)",
        "P(U|I)",
        "P(U|I) - P(U)",
        "AUROC",
        "rank correlation with size",
    )
    note = (
        "The sample covariance of k directional derivatives is Wishart distributed around the exact one; the second row draws it, "
        "independently for each box. MC-GLM itself uses the same directions for all boxes. The last row of each block takes the size of the "
        "box (the product of its sides) for u: no uncertainty at all."
    )
    return Table("why", "What sampling and the step do to P(U|I)", columns, rows, (note,))


def noisy_trace(rows: Records, k: int, rng: np.random.Generator) -> NDArray[Any]:
    """The trace (n,) of a sample covariance of k draws from each box's exact covariance: that of a Wishart matrix over k - 1.

    It is the sum over the eigenvalues, each times a chi-square number of k - 1 degrees of freedom, over k - 1.

    >>> one = Records(("x",), ("car",), *[np.zeros((5000, 1))], np.zeros(5000), *[np.zeros(5000)] * 3, np.zeros((5000, 1)),
    ...               np.zeros(5000), np.zeros(5000), covariance=np.full((5000, 1, 1), 4.0))
    >>> drawn = noisy_trace(one, 10, np.random.default_rng(0))
    >>> bool(abs(drawn.mean() - 4) < 0.1), bool(abs(drawn.std() - 4 * (2 / 9) ** 0.5) < 0.1)
    (True, True)
    """
    assert rows.covariance is not None
    values = np.linalg.eigvalsh(rows.covariance).clip(min=0)  # (n, D)
    trace: NDArray[Any] = (values * rng.chisquare(k - 1, values.shape)).sum(1) / (k - 1)
    return trace


def size(rows: Records) -> NDArray[Any]:
    """The product of the sides of each box (n,)."""
    sides: NDArray[Any] = np.prod(
        rows.boxes[:, [rows.fields.index(name) for name in ("w", "l", "h") if name in rows.fields]],
        axis=1,
    )
    return sides


def _cells(parts: list[Records], error: str) -> tuple[Any, ...]:
    found = [measured(part)[error] for part in parts]

    def mean(name: str) -> float:
        return float(np.mean([f[name]["value"] for f in found]))

    alike = float(np.mean([spearman(part.uncertainty, size(part)) for part in parts]))
    cells = mean("P(U)"), mean("P(U|I)"), mean("P(U|I)") - mean("P(U)"), mean("AUROC"), alike
    return tuple(known(cell) for cell in cells)
