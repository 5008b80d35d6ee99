"""Detections: parallel arrays, one row a box, that slice as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from boxcov.errors import BoxcovError
from boxcov.files import reading, write_safetensors
from boxcov.version import __version__

_REQUIRED = ("boxes", "scores", "labels", "frame")
_OPTIONAL = ("covariance", "factor", "predictive", "score_variance", "score_covariance")


@dataclass(frozen=True)
class Detections:
    """m boxes of D fields each, with what the detector does not know of them.

    >>> found = Detections(
    ...     boxes=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    ...     scores=torch.tensor([0.9, 0.4]),
    ...     labels=torch.tensor([0, 1]),
    ...     frame=torch.tensor([0, 0]),
    ...     fields=("x", "y"),
    ...     classes=("car", "bus"),
    ...     covariance=torch.eye(2).expand(2, 2, 2),
    ... )
    >>> sure = found[found.scores > 0.5]
    >>> len(sure), sure.field("y"), sure.uncertainty
    (1, tensor([2.]), tensor([2.]))
    """

    boxes: Tensor  # (m, D)
    scores: Tensor  # (m,)
    labels: Tensor  # (m,) index into classes
    frame: Tensor  # (m,) which frame of the batch
    fields: tuple[str, ...]  # D names
    classes: tuple[str, ...]
    covariance: Tensor | None = None  # (m, D, D)
    factor: Tensor | None = (
        None  # (m, D, k): the covariance of all boxes together is its (m D, k) matrix times its transpose
    )
    predictive: Tensor | None = (
        None  # (m, D, D) of each box's error: calibrated, with what the weights cannot explain
    )
    score_variance: Tensor | None = (
        None  # (m,) of the logit of the score; ask a predictor for it with with_logit=True
    )
    score_covariance: Tensor | None = None  # (m, D) of the box with that logit
    meta: Mapping[str, Any] = field(
        default_factory=dict
    )  # how this was made: method, samples, seed, fingerprint ...

    def __post_init__(self) -> None:
        m, D = len(self.scores), len(self.fields)
        expected = {"boxes": (m, D), "scores": (m,), "labels": (m,), "frame": (m,)}
        expected |= {
            "covariance": (m, D, D),
            "predictive": (m, D, D),
            "score_variance": (m,),
            "score_covariance": (m, D),
        }
        for name, shape in expected.items():
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != shape:
                raise BoxcovError(
                    f"{name} has shape {tuple(value.shape)}, expected {shape} for {m} boxes of {self.fields}"
                )
        if self.factor is not None and tuple(self.factor.shape[:2]) != (m, D):
            raise BoxcovError(
                f"factor has shape {tuple(self.factor.shape)}, expected ({m}, {D}, samples)"
            )

    def __len__(self) -> int:
        return int(self.scores.shape[0])

    def __getitem__(self, rows: Any) -> Detections:
        """Some of the boxes, by number, slice, mask or indices: every array is cut alike."""
        if isinstance(rows, (list, np.ndarray, np.integer)):
            rows = (
                torch.as_tensor(rows, dtype=torch.long)
                if isinstance(rows, list) and not rows
                else torch.as_tensor(rows)
            )
        if isinstance(rows, int) or (isinstance(rows, Tensor) and not rows.dim()):
            rows = [range(len(self))[int(rows)]]  # an IndexError past the end, as for a list
        return self._with({name: tensor[rows] for name, tensor in self._tensors()})

    def __iter__(self) -> Iterator[Detections]:
        return (self[i] for i in range(len(self)))

    @property
    def uncertainty(self) -> Tensor:
        """The trace of each covariance (m,): the paper's u."""
        return self._covariance().diagonal(dim1=1, dim2=2).sum(1)

    def field(self, name: str) -> Tensor:
        """One field of all boxes (m,), by name."""
        return self.boxes[:, self._column(name)]

    def std(self, name: str) -> Tensor:
        """The standard deviation of one field (m,), by name."""
        column = self._column(name)
        return self._covariance()[:, column, column].sqrt()

    def cross_covariance(self) -> Tensor:
        """The covariance of all boxes together (m D, m D), of rank k - 1 at most; ask ``MCGLM`` for it with ``cross_box=True``."""
        if self.factor is None:
            raise BoxcovError(
                "these detections carry no cross-box covariance: make them with MCGLM(..., cross_box=True)"
            )
        A = self.factor.flatten(0, 1)
        return A @ A.T

    def frames(self, count: int | None = None) -> list[Detections]:
        """The detections of each frame of the batch; give the number of frames if the last ones may be empty."""
        if count is None:
            count = int(self.frame.max()) + 1 if len(self) else 0
        return [self[self.frame == i] for i in range(count)]

    def to(self, device: torch.device | str) -> Detections:
        return self._with({name: tensor.to(device) for name, tensor in self._tensors()})

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Plain arrays by name, the uncertainty among them."""
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in self._tensors()}
        if self.covariance is not None:
            arrays["uncertainty"] = self.uncertainty.detach().cpu().numpy()
        return arrays

    def save(self, path: str | Path) -> None:
        """One safetensors file; nothing is pickled, and the file is there whole or not at all."""
        about = {
            "version": __version__,
            "fields": self.fields,
            "classes": self.classes,
            "meta": dict(self.meta),
        }
        write_safetensors(path, dict(self._tensors()), {"boxcov.detections": json.dumps(about)})

    @staticmethod
    def load(path: str | Path) -> Detections:
        """Read what ``save`` wrote; labels and numbers of frames are checked, too."""
        with reading(path, "a file of boxcov detections"):
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["boxcov.detections"])
                tensors = {
                    name: file.get_tensor(name)
                    for name in file.keys()  # noqa: SIM118
                    if name in _REQUIRED + _OPTIONAL
                }
            fields, classes, meta = tuple(about["fields"]), tuple(about["classes"]), about["meta"]
            if not all(isinstance(name, str) for name in fields + classes) or not isinstance(
                meta, dict
            ):
                raise ValueError(
                    "names of fields or classes that are no text, or a meta that is no object"
                )
            found = Detections(**tensors, fields=fields, classes=classes, meta=meta)
            found._check_numbers()
            return found

    def _check_numbers(self) -> None:
        """What a file may hold and a method never gives."""
        for name, most in (("labels", len(self.classes)), ("frame", 1 << 40)):
            numbers = getattr(self, name)
            if numbers.is_floating_point() or numbers.dtype == torch.bool:
                raise ValueError(f"{name} are {numbers.dtype}, expected whole numbers")
            if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) < most):
                raise ValueError(
                    f"{name} from {int(numbers.min())} to {int(numbers.max())}, expected 0 to {most - 1}"
                )
        for name, tensor in self._tensors():
            if name not in ("labels", "frame") and not tensor.is_floating_point():
                raise ValueError(f"{name} are {tensor.dtype}, expected floating-point numbers")

    def _tensors(self) -> list[tuple[str, Tensor]]:
        present = ((name, getattr(self, name)) for name in _REQUIRED + _OPTIONAL)
        return [(name, tensor) for name, tensor in present if tensor is not None]

    def _with(self, tensors: dict[str, Any]) -> Detections:
        return replace(self, **tensors)

    def _column(self, name: str) -> int:
        if name not in self.fields:
            raise BoxcovError(f"no field {name!r}: the boxes have {', '.join(self.fields)}")
        return self.fields.index(name)

    def _covariance(self) -> Tensor:
        if self.covariance is None:
            raise BoxcovError(
                "these are plain detections without a covariance: make them with MCGLM, ExactGLM, GLM or MCI"
            )
        return self.covariance


def concatenated(parts: Sequence[Detections]) -> Detections:
    """The boxes of all parts one after another, with the ``meta`` of the first; ``frame`` stays what each part says.

    >>> none = torch.zeros(0)
    >>> empty = Detections(none.reshape(0, 1), none, none.long(), none.long(), ("x",), ("car",))
    >>> one = Detections(torch.ones(1, 1), torch.ones(1), torch.tensor([0]), torch.tensor([4]), ("x",), ("car",))
    >>> concatenated([empty, one, one]).frame
    tensor([4, 4])
    """
    if not parts:
        raise BoxcovError(
            "there is nothing to put together: give at least one Detections, an empty one where nothing was found"
        )
    first = parts[0]
    names = [name for name, _ in first._tensors()]
    for number, part in enumerate(parts):
        if (part.fields, part.classes) != (first.fields, first.classes):
            raise BoxcovError(
                f"part {number} has boxes {part.fields} of {part.classes}, part 0 {first.fields} of {first.classes}"
            )
        if [name for name, _ in part._tensors()] != names:
            raise BoxcovError(
                f"part {number} has {', '.join(name for name, _ in part._tensors())}, part 0 {', '.join(names)}"
            )
    return first._with({name: torch.cat([getattr(part, name) for part in parts]) for name in names})
