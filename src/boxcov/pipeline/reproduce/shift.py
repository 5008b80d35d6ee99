"""Epistemic or not: does u fall with the data behind the posterior, and rise where the detector has no business?"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.ranking import auroc
from boxcov.evaluate.records import Records
from boxcov.pipeline.reproduce.measures import records
from boxcov.pipeline.reproduce.runs import Workshop
from boxcov.pipeline.reproduce.setting import DEPTHS, SHARES, TEST, Run, Setting, part_alone
from boxcov.pipeline.reproduce.table import Table


def with_data(workshop: Workshop) -> Table:
    """The exact u of the head under posteriors that count 100, 10 and 5 % of the frames."""
    found = {
        name: records(workshop, Run("exact", "prior", share=part, counted=part < 1)).uncertainty
        for name, part in SHARES.items()
    }
    whole = found["100 %"]
    rows = [
        (name, float(np.median(u)), float(np.median(u / whole)), float((u > whole).mean()))
        for name, u in found.items()
        if len(u)
    ]
    columns = (
        "share of the data",
        "median u",
        "median ratio to all data",
        "share of the boxes whose u is larger",
    )
    note = "Factors from that share of the frames, n_data that share of the training frames; head, exact."
    return Table("data", "Uncertainty and the amount of data", columns, rows, (note,))


def scenarios(workshop: Workshop) -> Table:
    """For each shift and each part of the network: how much u rises, and how well it tells shifted boxes and frames."""
    setting = workshop.setting
    rows: list[tuple[Any, ...]] = []
    for on in setting.shifts:
        for name, clear, shifted in _measures(workshop, setting, on):
            box = auroc(_labels(clear.u, shifted.u), np.concatenate([clear.u, shifted.u]))
            frames = clear.by_frame(), shifted.by_frame()
            rise = (
                float(np.median(shifted.u) / np.median(clear.u)) if np.median(clear.u) > 0 else None
            )
            rows.append(
                (
                    on.partition(":")[2] or on,
                    name,
                    rise,
                    box,
                    auroc(_labels(*frames), np.concatenate(frames)),
                )
            )
    columns = ("shift", "u", "median u, times clear", "AUROC, boxes", "AUROC, frames")
    note = (
        f"{setting.shift_count} shifted frames a row against the test frames, predictions above a score of {setting.threshold}. "
        "Frames by the mean of log u over their boxes (of 1 - score itself). "
        "H, N, B: the posterior of head, neck and backbone, each alone, paper's form, k = 10."
    )
    return Table("shift", "Uncertainty under a shift", columns, rows, (note,))


class _Numbers:
    """u of all boxes (n,), and the frames they are from."""

    def __init__(self, rows: Records, u: NDArray[Any], logarithm: bool = True) -> None:
        self.u, self.frame, self.logarithm = u, rows.frame, logarithm

    def by_frame(self) -> NDArray[Any]:
        value = np.log(np.maximum(self.u, 1e-300)) if self.logarithm else self.u
        return np.array([value[self.frame == number].mean() for number in np.unique(self.frame)])


def _measures(
    workshop: Workshop, setting: Setting, on: str
) -> list[tuple[str, _Numbers, _Numbers]]:
    found = []
    for name, depth in zip(("H", "N", "B"), DEPTHS.values()):
        clear, shifted = (
            records(workshop, part_alone(depth, TEST)),
            records(workshop, part_alone(depth, on)),
        )
        found.append(
            (name, _Numbers(clear, clear.uncertainty), _Numbers(shifted, shifted.uncertainty))
        )
    mci = records(workshop, Run("mci")), records(workshop, Run("mci", on=on))
    found.append(
        ("MCI", _Numbers(mci[0], mci[0].uncertainty), _Numbers(mci[1], mci[1].uncertainty))
    )
    found.append(
        (
            "1 - score",
            _Numbers(clear, 1 - clear.scores, False),
            _Numbers(shifted, 1 - shifted.scores, False),
        )
    )
    return found


def _labels(clear: NDArray[Any], shifted: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([np.zeros(len(clear), dtype=bool), np.ones(len(shifted), dtype=bool)])
