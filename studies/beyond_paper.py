"""Tables beyond the paper, from a reproduction of it: chance, sampling noise, data and shifts.

Results: docs/results/reproduction.md.

    boxcov reproduce --out FOLDER
    python studies/beyond_paper.py FOLDER [--shift simulated:rain ...]

Predictions that the folder does not hold yet are added to it; the tables go to FOLDER/beyond.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcov._files.input_file import read_json
from boxcov._files.output_file import write_text
from boxcov.evaluate.quality import ERRORS, auroc
from boxcov.evaluate.records import Records
from boxcov.pipeline.reproduce.comparison import PAPER, Table, measure, spearman
from boxcov.pipeline.reproduce.plan import (
    DEPTHS,
    FORMS,
    SHARES,
    TEST,
    Form,
    Run,
    Setting,
    paper_mcglm,
)
from boxcov.pipeline.reproduce.workspace import Workspace

SHIFTS = tuple(f"simulated:{name}" for name in ("rain", "fog", "sparse", "crowd", "unseen"))
DRAWS = 20  # of the sampling noise


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


def paper_chance() -> Table:
    """Compare P(U|I) of each column of the paper with P(U), which its metrics determine."""
    rows = []
    for number, figures in zip(("I", "III", "IV", "V", "VI"), PAPER["tables"].values()):
        for column, metrics in figures.items():
            for error in ERRORS:
                avu, pac, pui = (metrics[name][error] for name in ("AvU", "P(A|C)", "P(U|I)"))
                low, high = bounds(avu, pac, pui)
                chance = shares(avu, pac, pui)
                verdict = "at chance"
                if pui - 0.005 > high.P_U:
                    verdict = "above"
                elif pui + 0.005 < low.P_U:
                    verdict = "below"
                row: dict[str, Any] = {"table: column": f"{number}: {column}", "error": error}
                row |= {"P(U|I)": pui, "its chance, P(U)": chance.P_U, "verdict": verdict}
                rows.append(row | {"P(A|C)": pac, "its chance, P(A)": chance.P_A})
    note = (
        "From the paper's numbers alone. The verdict allows for all of them being rounded to two "
        "digits."
    )
    return Table("chance-paper", "The paper's numbers against chance", rows, (note,))


def sampling_noise(workspace: Workspace) -> Table:
    """Compare the exact u, the same with the noise of ten samples, and the u of MC-GLM."""
    rows = []
    for form in FORMS:
        found = _noise_cases(workspace, form)
        for error in ERRORS:
            for name, cases in found.items():
                row = {"posterior": form, "u": name, "error": error}
                rows.append(row | _noise_cells(cases, error))
    note = (
        "The sample covariance of k directional derivatives is Wishart distributed around the "
        "exact one; the second row samples it, independently for each box. MC-GLM itself uses the "
        "same directions for all boxes. The last row of each block takes the size of the box (the "
        "product of its sides) for u: no uncertainty at all."
    )
    return Table("why", "What sampling and the step do to P(U|I)", rows, (note,))


def _noise_cases(workspace: Workspace, form: Form) -> dict[str, list[Records]]:
    exact = workspace.records(Run("exact", form))
    rng = np.random.default_rng(0)
    noisy = [exact.with_uncertainty(noisy_trace(exact, 10, rng)) for _ in range(DRAWS)]
    found = {"exact (= GLM)": [exact], f"exact + noise of k = 10, {DRAWS} draws": noisy}
    runs = {
        "MC-GLM, jvp": Run("mcglm", form),
        "MC-GLM, fd 1e-7": paper_mcglm(form),
        "MC-GLM, fd 1": paper_mcglm(form, 1.0),
    }
    for name, run in runs.items():
        if workspace.refusal(run) is None:
            found[name] = [workspace.records(run)]
    return {**found, "size of the box": [exact.with_uncertainty(box_size(exact))]}


def noisy_trace(records: Records, k: int, rng: np.random.Generator) -> NDArray[Any]:
    """Return the trace (n,) of a sample covariance of k draws from each box's exact covariance.

    The sample covariance is Wishart distributed, so its trace is a sum over the eigenvalues, each
    times a chi-square variable with k - 1 degrees of freedom, divided by k - 1.
    """
    assert records.covariance is not None
    values = np.linalg.eigvalsh(records.covariance).clip(min=0)  # (n, D)
    return (values * rng.chisquare(k - 1, values.shape)).sum(1) / (k - 1)


def box_size(records: Records) -> NDArray[Any]:
    """Return the product of the sides of each box (n,)."""
    sides = [records.fields.index(name) for name in ("w", "l", "h") if name in records.fields]
    return np.prod(records.boxes[:, sides], axis=1)


def _noise_cells(cases: list[Records], error: str) -> dict[str, Any]:
    found = [measure(records)[error] for records in cases]

    def mean(name: str) -> float:
        return float(np.mean([one[name]["value"] for one in found]))

    correlation = np.mean([spearman(records.uncertainty, box_size(records)) for records in cases])
    cells = {"P(U)": mean("P(U)"), "P(U|I)": mean("P(U|I)")}
    cells |= {"P(U|I) - P(U)": cells["P(U|I)"] - cells["P(U)"], "AUROC": mean("AUROC")}
    return {**cells, "rank correlation with size": float(correlation)}


def amount_of_data(workspace: Workspace) -> Table:
    """Compare the exact u of posteriors from 100, 10 and 5 % of the frames."""
    found = {
        name: workspace.records(Run("exact", "prior", share=part, counted=part < 1)).uncertainty
        for name, part in SHARES.items()
    }
    whole = found["100 %"]
    rows = [
        {
            "share of the data": name,
            "median u": float(np.median(u)),
            "median ratio to all data": float(np.median(u / whole)),
            "share of the boxes whose u is larger": float((u > whole).mean()),
        }
        for name, u in found.items()
        if len(u)
    ]
    note = (
        "Factors from that share of the frames, n_data that share of the training frames; head, "
        "exact."
    )
    return Table("data", "Uncertainty and the amount of data", rows, (note,))


def distribution_shift(workspace: Workspace, shifts: Sequence[str]) -> Table:
    """Return how much u rises under each shift, and how well it detects the shift."""
    found, rows = _shift_records(workspace, shifts), []
    for on in shifts:
        for name, by_frames in found.items():
            clear, shifted = by_frames[TEST], by_frames[on]
            u, shifted_u = clear.uncertainty, shifted.uncertainty
            rise = float(np.median(shifted_u) / np.median(u)) if np.median(u) > 0 else None
            by_frame = (_mean_per_frame(one, log=name != "1 - score") for one in (clear, shifted))
            row = {"shift": on.partition(":")[2] or on, "u": name, "median u, times clear": rise}
            row |= {"AUROC, boxes": _shift_auroc(u, shifted_u)}
            rows.append(row | {"AUROC, frames": _shift_auroc(*by_frame)})
    note = (
        f"{len(workspace.frames(shifts[0]))} shifted frames per row against the test frames, "
        f"predictions above a score of {workspace.setting.threshold}. Frames by the mean of log u "
        "over their boxes (of 1 - score itself). H, N, B: the posterior of head, neck and "
        "backbone, each alone, paper's form, k = 10."
    )
    return Table("shift", "Uncertainty under a shift", rows, (note,))


def _shift_records(workspace: Workspace, shifts: Sequence[str]) -> dict[str, dict[str, Records]]:
    """Return the records by kind of u, then by frames: those of the test and of each shift.

    One kind after the other, so that its predictor is built once.
    """
    every = (TEST, *shifts)
    found = {}
    for name, depth in zip(("H", "N", "B"), DEPTHS.values()):
        alone = Run("mcglm", "paper", depth, alone=True)
        found[name] = {on: workspace.records(replace(alone, on=on)) for on in every}
    found["MCI"] = {on: workspace.records(Run("mci", on=on)) for on in every}
    scores = {on: one.with_uncertainty(1 - one.scores) for on, one in found["B"].items()}
    return {**found, "1 - score": scores}


def _mean_per_frame(records: Records, log: bool) -> NDArray[Any]:
    u = np.log(np.maximum(records.uncertainty, 1e-300)) if log else records.uncertainty
    return np.array([u[records.frame == number].mean() for number in np.unique(records.frame)])


def _shift_auroc(clear: NDArray[Any], shifted: NDArray[Any]) -> float:
    is_shifted = np.repeat([False, True], [len(clear), len(shifted)])
    return auroc(is_shifted, np.concatenate([clear, shifted]))


def analyse(workspace: Workspace, shifts: Sequence[str]) -> list[Table]:
    """Write the tables into the folder of a reproduction, and return them."""
    tables = [paper_chance(), sampling_noise(workspace), amount_of_data(workspace)]
    tables.append(distribution_shift(workspace, shifts))
    text = "\n\n".join(table.markdown() for table in tables)
    write_text(workspace.folder / "beyond.md", f"{text}\n")
    return tables


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="written by boxcov reproduce")
    parser.add_argument("--shift", nargs="+", default=SHIFTS, help="data with a shift")
    args = parser.parse_args()
    stored = dict(read_json(args.folder / "setting.json"))
    del stored["version"]
    found = analyse(Workspace(args.folder, Setting(out=args.folder, **stored)), args.shift)
    print("\n\n".join(table.markdown() for table in found))
