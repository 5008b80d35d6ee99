"""What result files of all data sets share: boxcov's own keys, and checks before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from boxcov.detections import Detections
from boxcov.errors import BoxcovError


def one_a_frame(
    names: Sequence[str], detections: Iterable[Detections], classes: Sequence[str]
) -> Iterator[tuple[str, Detections]]:
    """Each frame's name with its detections, in step; they must be one frame's each, all made the same way, and of known classes.

    >>> from torch import ones, zeros
    >>> one = Detections(ones(1, 1), ones(1), zeros(1), zeros(1), ("x",), ("car",))
    >>> [name for name, _ in one_a_frame(["a", "b"], [one, one], ["car"])]
    ['a', 'b']
    >>> list(one_a_frame(["a", "b"], [one], ["car"]))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: detections of 1 frames for 2 frames: give one Detections a frame, an empty one where nothing was found
    """
    count, first = 0, None
    for found in detections:
        count += 1
        if count > len(names):
            break
        name = names[count - 1]
        if len(found.frame.unique()) > 1:
            raise BoxcovError(
                f"frame {name}: detections of several frames of a batch: give detections.frames(count) one by one"
            )
        unknown = sorted(
            {found.classes[int(label)] for label in found.labels.unique()} - set(classes)
        )
        if unknown:
            raise BoxcovError(
                f"frame {name}: no class {', '.join(unknown)}: the data set has {', '.join(classes)}"
            )
        made = about(found, found.fields, "")
        first = made if first is None else first
        if made != first:
            raise BoxcovError(
                f"frame {name} was made otherwise than frame {names[0]} ({made} and {first}): write them to separate files"
            )
        yield name, found
    if count != len(names):
        raise BoxcovError(
            f"detections of {'more' if count > len(names) else count} frames for {len(names)} frames: "
            "give one Detections a frame, an empty one where nothing was found"
        )


def about(detections: Detections, fields: Sequence[str], frame: str) -> dict[str, Any]:
    """What a reader must know of the covariances of a file, under boxcov's keys; nothing where there are none.

    >>> from torch import ones, zeros
    >>> about(Detections(ones(1, 1), ones(1), zeros(1), zeros(1), ("x",), ("car",)), ("x",), "global")
    {}
    """
    if detections.covariance is None:
        return {}
    made = {
        "covariance_fields": list(fields),
        "covariance_frame": frame,
        "uncertainty": dict(detections.meta),
    }
    return made if detections.predictive is None else {**made, "predictive": True}


def covariances(name: str, found: Detections) -> list[dict[str, Any]]:
    """What a file says of the uncertainty of each box, under boxcov's keys; nothing where it has none.

    >>> from torch import ones, zeros
    >>> covariances("000007", Detections(ones(1, 1), ones(1), zeros(1), zeros(1), ("x",), ("car",), 2 * ones(1, 1, 1)))
    [{'covariance': [2.0], 'uncertainty': 2.0}]
    """
    rows: list[dict[str, Any]] = [{} for _ in range(len(found))]
    if found.covariance is not None:
        check_finite(name, "covariance", found.covariance)
        for row, numbers in zip(rows, nine_digits(found.covariance.flatten(1))):
            row |= {"covariance": numbers, "uncertainty": sum(numbers[:: len(found.fields) + 1])}
    if found.predictive is not None:
        check_finite(name, "predictive covariance", found.predictive)
        for row, numbers in zip(rows, nine_digits(found.predictive.flatten(1))):
            row["predictive"] = numbers
    return rows


def check_finite(name: str, what: str, values: Tensor) -> None:
    """Files of results have no place for NaN.

    >>> import torch
    >>> check_finite("000007", "score", torch.tensor([[0.5], [torch.nan]]))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: frame 000007: the score of 1 boxes is not finite (box 1: [nan])
    """
    bad = (~values.isfinite()).flatten(1).any(1).nonzero()[:, 0].tolist()
    if bad:
        raise BoxcovError(
            f"frame {name}: the {what} of {len(bad)} boxes is not finite (box {bad[0]}: {values[bad[0]].tolist()})"
        )


def nine_digits(values: Tensor) -> list[list[float]]:
    """Rows of numbers with as many digits as float32 has, a third of the text that float64 would take.

    >>> import torch
    >>> nine_digits(torch.tensor([[0.1, 2.0]]))
    [[0.100000001, 2.0]]
    """
    return [[float(f"{value:.9g}") for value in row] for row in values.tolist()]
