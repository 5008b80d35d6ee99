"""Study: everything that a report shows, in plain arrays."""

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
    """One frame to show."""

    name: str
    points: Array  # (p, 2 or more) x y ...; may be empty
    truth: Array  # (k, D) the objects, with the fields of the records
    truth_labels: Array  # (k,) index into classes
    image: Array | None = None  # (h, w, 3) bytes: red, green, blue; the boxes are in its pixels

    def __post_init__(self) -> None:
        if self.points.ndim != 2 or self.points.shape[1] < 2:
            raise BoxcovError(
                f"scene {self.name!r}: points have shape {self.points.shape}, "
                "expected (p, 2 or more)"
            )
        if self.truth.ndim != 2 or len(self.truth) != len(self.truth_labels):
            raise BoxcovError(
                f"scene {self.name!r}: truth has shape {self.truth.shape} "
                f"with {len(self.truth_labels)} labels, expected (k, D) with k labels"
            )


@dataclass(frozen=True)
class Method:
    """The predictions of one method on all frames; ``note`` describes its settings."""

    name: str
    records: Records
    note: str = ""
    is_probability: bool = False  # whether u is one, such as the risk


@dataclass(frozen=True)
class Study:
    """Methods compared on the same frames.

    >>> Study("Empty").methods
    ()
    """

    title: str
    about: Mapping[str, Any] = field(default_factory=dict)  # versions, checkpoints, data, seeds ...
    methods: Sequence[Method] = ()
    scenes: Mapping[int, Scene] = field(default_factory=dict)  # by frame number of the records
    # rows with any of method, device, boxes, samples, ms, ratio, peak_mib
    runtime: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        names = [method.name for method in self.methods]
        for name in names:
            if names.count(name) > 1:
                raise BoxcovError(
                    f"the methods of a study need different names: {name!r} occurs "
                    f"{names.count(name)} times"
                )
        for method in self.methods:
            _check_method(method, self.methods[0])
        for number, scene in self.scenes.items():
            if self.methods and len(scene.truth) and scene.truth.shape[1] != len(self.fields):
                raise BoxcovError(
                    f"scene {number}: truth has {scene.truth.shape[1]} fields per box, "
                    f"the records have {len(self.fields)}"
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the box fields; empty without a method."""
        return self.methods[0].records.fields if self.methods else ()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.methods[0].records.classes if self.methods else ()

    @property
    def has_boxes(self) -> bool:
        """Whether any method has a prediction."""
        return any(len(method.records) for method in self.methods)


def thin_points(points: Array, count: int) -> Array:
    """Return at most ``count`` of the points (p, 2), evenly spaced in the list.

    >>> thin_points(np.arange(20.0).reshape(10, 2), 3)[:, 0].tolist()
    [0.0, 8.0, 18.0]
    """
    if len(points) <= count:
        return points
    kept: Array = points[np.linspace(0, len(points) - 1, count).astype(int)]
    return kept


def _check_method(method: Method, first: Method) -> None:
    own, other = method.records, first.records
    if (own.fields, own.classes) != (other.fields, other.classes):
        raise BoxcovError(
            f"method {method.name!r} has other box fields or classes than {first.name!r}: "
            f"{', '.join(own.fields)} of {len(own.classes)} classes, "
            f"{', '.join(other.fields)} of {len(other.classes)}"
        )
    wrong = int((~(np.asarray(own.uncertainty) >= 0)).sum())
    if wrong:
        raise BoxcovError(
            f"method {method.name!r}: {wrong} of {len(own)} uncertainties are negative or NaN: "
            "remove those boxes"
        )
