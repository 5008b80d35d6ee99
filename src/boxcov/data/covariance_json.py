"""Covariances in the JSON result files of all data sets, and checks before a file is written.

A file has ``covariance_fields``, ``covariance_frame`` (the coordinate frame) and ``uncertainty``
(how it was computed) once, and ``covariance`` and ``uncertainty`` (its trace) per box. Calibrated
boxes also have ``predictive``, ``risk``, ``no_object``, ``misplaced``, ``iou_below`` (one
probability per threshold of ``uncertainty.error_model``), ``flipped``, ``scale``, and the half
widths ``region_widths`` and ``joint_widths`` (levels x fields). Matrices are flat, row by row.
Unknown numbers and infinite half widths are null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from boxcov.concatenation import check_single_frame
from boxcov.detection_meta import check_meta, meta_to_write
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.result_check import check_result

Row = dict[str, Any]
_PROBABILITIES = ("risk", "misplaced", "no_object", "flipped")  # (m,)
_LISTS = ("iou_below", "scale", "region_widths", "joint_widths")  # (m, ...)


def pair_with_frames(
    names: Sequence[str], detections: Iterable[Detections], classes: Sequence[str]
) -> Iterator[tuple[str, Detections]]:
    """Yield each frame's name with its detections.

    Raise if the numbers of frames differ, a ``Detections`` holds several frames, a class is
    unknown, or the covariances were computed in different ways.
    """
    count, first = 0, None
    for count, found in enumerate(detections, 1):
        if count > len(names):
            break
        name = names[count - 1]
        check_single_frame(found, f"frame {name}")
        check_result(found, f"frame {name}")
        used = {found.classes[int(label)] for label in found.labels.unique()}
        _check_classes(f"frame {name}", used, classes)
        meta = covariance_meta(found, found.fields, "")
        first = meta if first is None else first
        if meta != first:
            raise BoxcovError(
                f"the covariances of frame {name} were not computed like those of frame "
                f"{names[0]} ({meta} and {first}): write them to separate files"
            )
        yield name, found
    if count != len(names):
        raise BoxcovError(
            f"detections of {'more' if count > len(names) else count} frames for {len(names)} "
            "frames: give one Detections per frame, an empty one where nothing was detected"
        )


def _check_classes(where: str, used: set[str], classes: Sequence[str]) -> None:
    if unknown := sorted(used - set(classes)):
        raise BoxcovError(
            f"{where}: no class {', '.join(unknown)}: the data set has {', '.join(classes)}"
        )


def covariance_meta(detections: Detections, fields: Sequence[str], frame: str) -> Row:
    """Return what a file says once about its covariances; empty if there are none."""
    if detections.covariance is None:
        return {}
    meta: Row = {
        "covariance_fields": list(fields),
        "covariance_frame": frame,
        "uncertainty": meta_to_write(detections.meta),
    }
    return meta if detections.predictive is None else {**meta, "predictive": True}


def covariance_rows(found: Detections) -> list[Row]:
    """Return what a file says about the uncertainty of each box; empty rows if it has none."""
    rows: list[Row] = [{} for _ in range(len(found))]
    error_model = () if found.no_object is None else (*_PROBABILITIES, *_LISTS)
    for name in ("covariance", "predictive", *error_model):
        values = getattr(found, name)
        if values is None:
            continue
        for row, numbers in zip(rows, nine_digits(values.unsqueeze(1).flatten(1))):
            shown = [number if isfinite(number) else None for number in numbers]
            row[name] = shown[0] if name in _PROBABILITIES else shown
            if name == "covariance":
                row["uncertainty"] = sum(numbers[:: len(found.fields) + 1])
    return rows


def read_column(rows: Sequence[Row], key: str, width: int) -> Tensor:
    """Return the entries ``key`` of all rows as a float64 tensor (n, width)."""
    return torch.tensor([row[key] for row in rows], dtype=torch.float64).reshape(len(rows), width)


def _read_numbers(rows: Sequence[Row], key: str, shape: tuple[int, ...]) -> Tensor:
    """Return the entries ``key`` as a float64 tensor (n, *shape) with null as NaN or infinity."""
    missing = torch.inf if key.endswith("widths") else torch.nan
    lists = [row[key] if isinstance(row[key], list) else [row[key]] for row in rows]
    filled = [[missing if v is None else v for v in values] for values in lists]
    return torch.tensor(filled, dtype=torch.float64).reshape(len(rows), *shape)


def read_detections(
    boxes: Tensor,
    scores: Tensor,
    labels: Sequence[str],
    *,
    fields: tuple[str, ...],
    classes: Sequence[str],
    covariances: tuple[Mapping[str, Any], Sequence[Row]],
) -> Detections:
    """Return the detections of one frame of a result file.

    labels: names of classes. covariances: the file's meta and the frame's rows; the detections
    have a covariance if the meta describes one.
    """
    meta, rows = covariances
    D = len(fields)
    _check_classes("in the file", set(labels), classes)
    number = {name: label for label, name in enumerate(classes)}
    about = check_meta(meta.get("uncertainty", {}))
    numbers = {}
    if "covariance_fields" in meta:
        numbers["covariance"] = read_column(rows, "covariance", D * D).reshape(-1, D, D)
    shapes: dict[str, tuple[int, ...]] = {"predictive": (D, D)} if meta.get("predictive") else {}
    if about.get("error_model") is not None:
        L, T = (len(about["error_model"][name]) for name in ("levels", "thresholds"))
        shapes |= {"no_object": (), "iou_below": (T,), "scale": (D,)}
        shapes |= {"region_widths": (L, D), "joint_widths": (L, D)}
        shapes |= {"flipped": ()} if "yaw" in fields or "rotation_y" in fields else {}
    numbers |= {name: _read_numbers(rows, name, shape) for name, shape in shapes.items()}
    return Detections(
        boxes=boxes,
        scores=scores,
        labels=torch.tensor([number[name] for name in labels], dtype=torch.long),
        frame=torch.zeros(len(boxes), dtype=torch.long),
        fields=fields,
        classes=tuple(classes),
        **numbers,
        meta=about,
    )


def nine_digits(values: Tensor) -> list[list[float]]:
    """Return rows of numbers with float32's digits: a third of the text of float64.

    >>> nine_digits(torch.tensor([[0.1, 2.0]]))
    [[0.100000001, 2.0]]
    """
    return [[float(f"{value:.9g}") for value in row] for row in values.tolist()]
