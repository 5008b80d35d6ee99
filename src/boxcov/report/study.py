"""Study: everything that a report shows, in plain arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.detections import Detections
from boxcov.errors import BoxcovError, counted, join_names
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.evaluate.records import Records
from boxcov.outlines import background_of

Array = NDArray[Any]
METHOD_META = (
    *("method", "samples", "derivative", "epsilon", "dropout", "depth", "form", "n_data"),
    *("prior_precision", "fisher", "seed"),
)


@dataclass(frozen=True)
class Scene:
    """One frame to show."""

    name: str
    points: Array  # (p, 2 or more) x y ...; may be empty
    truth: Array  # (k, D) the objects, with the fields of the records
    truth_labels: Array  # (k,) index into classes
    image: Array | None = None  # (h, w, 3) bytes: red, green, blue; the boxes are in its pixels


@dataclass(frozen=True)
class Method:
    """The predictions of one method on all frames; ``note`` describes its settings."""

    name: str
    records: Records
    note: str = ""
    is_probability: bool = False  # whether u is one, such as the risk


@dataclass(frozen=True, repr=False)
class Study:
    """Methods compared on the same frames.

    >>> Study("Empty")
    Study('Empty': no methods, 0 scenes)
    """

    title: str
    about: Mapping[str, Any] = field(default_factory=dict)  # versions, checkpoints, data, seeds ...
    methods: Sequence[Method] = ()
    scenes: Mapping[int, Scene] = field(default_factory=dict)  # by frame number of the records
    # rows with any of method, device, boxes, samples, ms, ratio, peak_mib
    runtime: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        names = [method.name for method in self.methods]
        for method in self.methods:
            if (count := names.count(method.name)) > 1:
                raise BoxcovError(
                    f"the methods of a study need different names: {method.name!r} occurs "
                    f"{count} times"
                )
            _check_method(method, self.methods[0])

    @staticmethod
    def of(
        detections: Detections | Mapping[str, Detections],
        frames: Iterable[Any],
        title: str = "Uncertainty of boxes",
        scenes: int = 6,
    ) -> Study:
        """Return the study of detections, one or several by name, on labelled frames.

        ``detections.frame`` counts ``frames``, (inputs, targets) of one frame each, of which the
        first ``scenes`` are shown.
        """
        if isinstance(detections, Detections):
            detections = {str(detections.meta.get("method", "boxes")): detections}
        inputs: dict[int, Any] = {}

        def with_inputs() -> Iterator[Any]:
            for number, frame in enumerate(frames):
                if isinstance(frame[1], (list, tuple)) and len(frame[1]) > 1:
                    raise BoxcovError(
                        f"item {number} has targets of {len(frame[1])} frames: give one frame per "
                        "item, so that each is shown with its own boxes"
                    )
                if number < scenes:
                    inputs[number] = frame[0]
                yield frame

        truth = GroundTruth.from_frames(with_inputs())
        return Study.of_objects(detections, truth, inputs, title)

    @staticmethod
    def of_objects(
        detections: Mapping[str, Detections],
        truth: GroundTruth,
        inputs: Mapping[int, Any],
        title: str,
    ) -> Study:
        """Return the study of detections by name; ``inputs`` are those of the frames to show."""
        if not detections:
            raise BoxcovError("there are no detections to report on: give at least one method")
        methods = [m for name, found in detections.items() for m in methods_of(name, found, truth)]
        first = next(iter(detections.values()))
        about = {
            "frames": truth.frames,
            "objects": len(truth.labels),
            "u": "trace",
            **settings_of(first, ("detector", "posterior", "boxcov", "torch")),
            **{name: settings_of(found, METHOD_META) for name, found in detections.items()},
        }
        runtime = [runtime_row(name, found) for name, found in detections.items()]
        scenes = scenes_of(inputs, truth, first.fields)
        return Study(title, about, methods, scenes, [row for row in runtime if row])

    def __repr__(self) -> str:
        names = join_names(method.name for method in self.methods) or "no methods"
        return f"Study({self.title!r}: {names}, {counted(len(self.scenes), 'scene')})"

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


def methods_of(name: str, found: Detections, truth: GroundTruth) -> list[Method]:
    """Return detections matched with objects: u = trace, and u = risk if they are calibrated."""
    records = match_detections(found, truth)
    if not len(records):
        raise BoxcovError(f"{name}: no box has a score above 0.1: there is nothing to evaluate")
    described = [f"{key} {value}" for key, value in settings_of(found, METHOD_META).items()]
    by_trace = Method(name, records, ", ".join(described))
    if records.risk is None:
        return [by_trace]
    note = "u is the risk: the probability that the box is bad"
    as_risk = records.without_covariance(records.risk)
    return [by_trace, Method(f"{name}: risk", as_risk, note, is_probability=True)]


def scenes_of(
    inputs: Mapping[int, Any], truth: GroundTruth, fields: tuple[str, ...]
) -> dict[int, Scene]:
    """Return frames to show, by number, from their inputs: point clouds or images."""
    boxes, scenes = truth.columns(fields), {}
    for number, own in inputs.items():
        rows, background = truth.frame == number, background_of(own)
        points, image = np.zeros((0, 2)), background
        if background is not None and background.ndim == 2:
            points, image = last_sweep(background), None
        scenes[number] = Scene(f"frame {number}", points, boxes[rows], truth.labels[rows], image)
    return scenes


def last_sweep(points: Array) -> Array:
    """Return x y z of the points (n, 2 or more) of the last LiDAR sweep."""
    is_last = points[:, 4] == 0 if points.shape[1] > 4 else slice(None)
    return points[is_last, :3]


def settings_of(found: Detections, names: Sequence[str]) -> dict[str, Any]:
    """Return the settings with these names that a file of detections states."""
    return {name: found.meta[name] for name in names if found.meta.get(name) is not None}


def runtime_row(name: str, found: Detections) -> dict[str, Any]:
    """Return the median milliseconds per frame, without the first, which warms up; or nothing."""
    spent = found.meta.get("milliseconds")
    if not spent:
        return {}
    row = {"method": name, "device": found.meta.get("device", ""), "ms": median(spent[1:] or spent)}
    return {**row, "boxes": round(len(found) / len(spent)), **settings_of(found, ("samples",))}


def thin_points(points: Array, count: int) -> Array:
    """Return at most ``count`` of the points (p, ...), evenly spaced in the list."""
    if len(points) <= count:
        return points
    return points[np.linspace(0, len(points) - 1, count).astype(int)]


def _check_method(method: Method, first: Method) -> None:
    own, other = method.records, first.records
    if (own.fields, own.classes) != (other.fields, other.classes):
        raise BoxcovError(
            f"method {method.name!r} has other box fields or classes than {first.name!r}: "
            f"{', '.join(own.fields)} of {len(own.classes)} classes, "
            f"{', '.join(other.fields)} of {len(other.classes)}"
        )
    if wrong := int((~(np.asarray(own.uncertainty) >= 0)).sum()):
        raise BoxcovError(
            f"method {method.name!r}: {wrong} of {len(own)} uncertainties are negative or NaN: "
            "remove those boxes"
        )
