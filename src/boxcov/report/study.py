"""Study: everything that a report shows, in plain arrays. Made by the evaluation, read by the page and the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.errors import BoxcovError
from boxcov.evaluate.records import Records

Array = NDArray[Any]


@dataclass(frozen=True)
class Scene:
    """One frame to look at.

    >>> Scene("street 7", points=np.zeros((100, 5)), truth=np.zeros((2, 9)), truth_labels=np.zeros(2, int)).name
    'street 7'
    """

    name: str
    points: Array  # (p, 2 or more) x y ...; may be empty
    truth: Array  # (k, D) the objects, in the fields of the records
    truth_labels: Array  # (k,) index into classes

    def __post_init__(self) -> None:
        if self.points.ndim != 2 or self.points.shape[1] < 2:
            raise BoxcovError(
                f"scene {self.name!r}: points have shape {self.points.shape}, expected (p, 2 or more): x y ..."
            )
        if self.truth.ndim != 2 or len(self.truth) != len(self.truth_labels):
            raise BoxcovError(
                f"scene {self.name!r}: truth has shape {self.truth.shape} with {len(self.truth_labels)} labels, expected (k, D) with k labels"
            )


@dataclass(frozen=True)
class Method:
    """The predictions of one method on all frames; ``note`` says how it was set up."""

    name: str
    records: Records
    note: str = ""


@dataclass(frozen=True)
class Study:
    """What was compared, on what.

    >>> Study("Nothing yet").methods
    ()
    """

    title: str
    about: Mapping[str, Any] = field(
        default_factory=dict
    )  # provenance: versions, checkpoints, data, seeds ...
    methods: Sequence[Method] = ()
    scenes: Mapping[int, Scene] = field(default_factory=dict)  # by frame number of the records
    runtime: Sequence[
        Mapping[str, Any]
    ] = ()  # each with method, device, boxes, samples, ms, ratio, peak_mib, as far as known

    def __post_init__(self) -> None:
        names = [method.name for method in self.methods]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BoxcovError(
                f"the methods of a study need different names, {twice[0]!r} occurs {names.count(twice[0])} times"
            )
        for method in self.methods[1:]:
            first, other = self.methods[0].records, method.records
            if (first.fields, first.classes) != (other.fields, other.classes):
                raise BoxcovError(
                    f"method {method.name!r} has other box fields or classes than {names[0]!r}: "
                    f"{', '.join(other.fields)} of {len(other.classes)} classes, {', '.join(first.fields)} of {len(first.classes)}"
                )
        for method in self.methods:
            odd = int((~(np.asarray(method.records.uncertainty) >= 0)).sum())
            if odd:
                raise BoxcovError(
                    f"method {method.name!r}: {odd} of {len(method.records)} uncertainties are negative or NaN; leave those boxes out"
                )
        for number, scene in self.scenes.items():
            if self.methods and len(scene.truth) and scene.truth.shape[1] != len(self.fields):
                raise BoxcovError(
                    f"scene {number}: truth has {scene.truth.shape[1]} numbers a box, the records have {len(self.fields)}"
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of a box's numbers; none where there is no method."""
        return self.methods[0].records.fields if self.methods else ()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.methods[0].records.classes if self.methods else ()
