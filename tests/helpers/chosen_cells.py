"""A CenterPoint that reports random cells of its map."""

from __future__ import annotations

import torch

from boxcov.detector import Selection
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.centerpoint.decode import CellIndex
from helpers.centerpoint_cases import detector_of, pillar_config

TASKS = (("car",), ("truck", "trailer"), ("bus",))


class Chosen(CenterPoint):
    """Reports random cells of the whole map, its border included, in the given tasks."""

    count: int
    only: int | None

    def select(self, raw: dict[str, object]) -> Selection:
        generator = torch.Generator().manual_seed(self.count)
        batch = len(raw["features"])  # type: ignore[arg-type]
        row, column = torch.randint(0, 8, (2, self.count), generator=generator)
        task = torch.randint(0, len(self.config.tasks), (self.count,), generator=generator)
        task = task if self.only is None else torch.full_like(task, self.only)
        where = CellIndex(torch.arange(self.count) % batch, task, row, column)
        return Selection(where.frame, torch.ones(self.count), task, where)


def chosen(count: int, only: int | None = None, dtype: torch.dtype = torch.float32) -> Chosen:
    detector = detector_of(pillar_config(tasks=TASKS), dtype=dtype)
    detector.__class__ = Chosen
    detector.count, detector.only = count, only
    return detector
