"""Detections: parallel arrays, one row per box, that are sliced together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module  # packages above this one, without an import cycle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boxcov._files.input_file import MAX_FRAMES, open_tensors
from boxcov._files.output_file import to_json, write_safetensors
from boxcov.box_layout import clipped_sides
from boxcov.detection_meta import check_meta, check_names, check_summary, meta_to_write
from boxcov.errors import BoxcovError, counted, join_names
from boxcov.result_check import check_result
from boxcov.version import __version__

_KEY = "boxcov.detections"
PART_BELOW = "variance below instances"  # signals of an estimator; the others are the detector's
# m boxes, D fields, S signals, T thresholds, L levels
_NAMES = {
    "mD": ("boxes", "score_covariance", "scale"),
    "m": ("scores", "labels", "frame", "score_variance", "no_object", "flipped"),
    "mDD": ("covariance", "predictive"),
    "mLD": ("region_widths", "joint_widths"),
    "mS": ("signals",),
    "mT": ("iou_below",),
}
_SHAPES = {name: letters for letters, names in _NAMES.items() for name in names}
# Nobody can read these without meta["error_model"].
_DESCRIBED = ("no_object", "iou_below", "scale", "region_widths", "joint_widths")
_UNCALIBRATED = (
    "these detections are uncalibrated: fit an error model with boxcov.calibrate or "
    "`boxcov calibrate`, and predict with it"
)


def to_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as a numpy array; numpy has no bfloat16."""
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return tensor.detach().cpu().numpy()


@dataclass(frozen=True, repr=False)
class Detections:
    """m boxes with D fields each, and their covariances.

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
    >>> sure
    Detections: 1 box in 1 frame, method unknown, with covariance, uncalibrated
      fields: x y
      classes: 1 car
      car 0.90: x=1 y=2, u=2
    """

    boxes: Tensor  # (m, D)
    scores: Tensor  # (m,)
    labels: Tensor  # (m,) index into classes
    frame: Tensor  # (m,) which frame of the batch
    fields: tuple[str, ...]  # D names
    classes: tuple[str, ...]
    covariance: Tensor | None = None  # (m, D, D)
    score_variance: Tensor | None = None  # (m,) of the score logit, if with_logit=True
    score_covariance: Tensor | None = None  # (m, D) of the box with the score logit
    signals: Tensor | None = None  # (m, S) inputs of the error model, named in meta["signals"]
    # by the error model, see boxcov.calibrate
    no_object: Tensor | None = None  # (m,) P(there is no object)
    iou_below: Tensor | None = None  # (m, T) P(IoU below each threshold | there is an object)
    flipped: Tensor | None = None  # (m,) P(the heading is off by half a turn)
    scale: Tensor | None = None  # (m, D) Student-t scale of each field's error; yaw as an axis
    predictive: Tensor | None = None  # (m, D, D) covariance of the error
    region_widths: Tensor | None = None  # (m, L, D) half widths at each level
    joint_widths: Tensor | None = None  # (m, L, D) half widths that hold all fields at once
    meta: Mapping[str, Any] = field(default_factory=dict)  # method, samples, seed, fingerprint ...

    def __post_init__(self) -> None:
        m, D = len(self.scores), len(self.fields)
        sizes = {"m": m, "D": D, "S": len(self.meta.get("signals", ()))}
        described = [name for name in _DESCRIBED if getattr(self, name) is not None]
        if described:
            about = self.meta.get("error_model")
            check_summary(about, described[0], D)
            sizes |= {"T": len(about["thresholds"]), "L": len(about["levels"])}  # type: ignore[index]
        for name, value in self._tensors():
            shape = tuple(sizes[letter] for letter in _SHAPES[name])
            if tuple(value.shape) != shape:
                raise BoxcovError(
                    f"{name} has shape {tuple(value.shape)}, expected {shape} "
                    f"for {m} boxes of {self.fields}"
                )
        if (self.no_object is None) != (self.iou_below is None):
            raise BoxcovError("no_object and iou_below belong together: give both or neither")

    def __len__(self) -> int:
        return int(self.scores.shape[0])

    def __repr__(self) -> str:
        frames = len(self.frame.unique())
        counts = self.labels.bincount(minlength=len(self.classes)).tolist()
        classes = [f"{n} {name}" for n, name in zip(counts, self.classes) if n]
        lines = [
            f"Detections: {counted(len(self), 'box')} in {counted(frames, 'frame')}, "
            f"method {self.meta.get('method', 'unknown')}, "
            f"with {'no ' if self.covariance is None else ''}covariance, "
            f"{'uncalibrated' if self.no_object is None else 'calibrated'}",
            f"fields: {' '.join(self.fields)}",
            f"classes: {join_names(classes) or 'none'}",
        ]
        clipped = int(self.clipped.any(1).sum())
        if clipped and self.predictive is None:
            lines.append(
                f"{counted(clipped, 'box')} clipped at the image border: no variance of those sides"
            )
        for i in range(min(3, len(self))):
            pairs = zip(self.fields, self.boxes[i].tolist())
            values = " ".join(f"{name}={round(value, 3) + 0.0:.4g}" for name, value in pairs)
            u = "" if self.covariance is None else f", u={float(self.uncertainty[i]):.3g}"
            if self.no_object is not None:
                u = f", risk {100 * float(self.risk[i]):.0f} %"
            name = self.classes[int(self.labels[i])]
            lines.append(f"{name} {float(self.scores[i]):.2f}: {values}{u}")
        if len(self) > 3:
            lines.append(f"... {len(self) - 3} more")
        return "\n  ".join(lines)

    def __getitem__(self, rows: Any) -> Detections:
        """Return some of the boxes, by number, slice, mask or indices."""
        if isinstance(rows, (list, np.ndarray, np.integer)):
            is_empty = isinstance(rows, list) and not rows  # torch would take it for floats
            rows = torch.as_tensor(rows, dtype=torch.long if is_empty else None)
        if isinstance(rows, int) or (isinstance(rows, Tensor) and not rows.dim()):
            rows = [range(len(self))[int(rows)]]  # an IndexError past the end, as for a list
        tensors: dict[str, Any] = {name: tensor[rows] for name, tensor in self._tensors()}
        return replace(self, **tensors)

    def __iter__(self) -> Iterator[Detections]:
        return (self[i] for i in range(len(self)))

    @property
    def uncertainty(self) -> Tensor:
        """The trace of each covariance (m,), the paper's u."""
        return self._needed("covariance").diagonal(dim1=1, dim2=2).sum(1)

    @property
    def clipped(self) -> Tensor:
        """Which numbers (m, D) are sides that the detector clipped at the image border.

        Their covariance is 0 and says nothing about their errors; that of the error model does.
        """
        if self.covariance is None:
            return torch.zeros_like(self.boxes, dtype=torch.bool)
        variances = self.covariance.diagonal(dim1=1, dim2=2)
        return clipped_sides(self.fields, self.boxes, variances)

    @property
    def misplaced(self) -> Tensor:
        """P(IoU below the error model's threshold | there is an object) (m,)."""
        return self.misplaced_at(self._error_model("threshold"))

    @property
    def risk(self) -> Tensor:
        """P(the box is bad) (m,): there is no object, or the box is misplaced."""
        return self.risk_at(self._error_model("threshold"))

    @property
    def dof(self) -> Tensor:
        """Degrees of freedom of the Student-t distribution of each field's error (D,).

        NaN, as ``scale``, for a field that a change of the coordinate frame mixed from several.
        """
        numbers = [float("nan") if n is None else n for n in self._error_model("dof")]
        return self._needed("scale").new_tensor(numbers)

    def misplaced_at(self, iou: float) -> Tensor:
        """Return P(IoU below ``iou`` | there is an object) (m,), linear between the thresholds."""
        thresholds = self._error_model("thresholds")
        if not thresholds[0] <= iou <= thresholds[-1]:
            raise BoxcovError(
                f"iou must lie between {thresholds[0]} and {thresholds[-1]}, the thresholds of the "
                f"error model, got {iou}"
            )
        below = self._needed("iou_below")
        after = max(1, sum(t < iou for t in thresholds))
        low, high = thresholds[after - 1], thresholds[after]
        return torch.lerp(below[:, after - 1], below[:, after], (iou - low) / (high - low))

    def risk_at(self, iou: float) -> Tensor:
        """Return P(there is no object, or the IoU is below ``iou``) (m,)."""
        no_object = self._needed("no_object")
        return no_object + (1 - no_object) * self.misplaced_at(iou)

    def region(self, level: float, joint: bool = False) -> Tensor:
        """Return half widths (m, D) that hold a share ``level`` of the errors.

        Each field by itself; with ``joint=True`` all fields at once. The regions are conformal at
        the levels of the error model; for another level the next higher one is taken, and the
        width is infinite where there were too few calibration boxes for the level. The yaw is
        that of the axis; ``flipped`` says how likely front and back are swapped.
        """
        levels = self._error_model("levels")
        higher = [i for i, one in enumerate(levels) if one >= level - 1e-9]
        if not 0 < level < 1 or not higher:
            raise BoxcovError(f"level must lie above 0 and be at most {levels[-1]}, got {level}")
        return self._needed("joint_widths" if joint else "region_widths")[:, higher[0]]

    def field(self, name: str) -> Tensor:
        """Return one field of all boxes (m,), by name."""
        return self.boxes[:, self._column(name)]

    def std(self, name: str) -> Tensor:
        """Return the standard deviation of one field (m,), by name."""
        column = self._column(name)
        return self._needed("covariance")[:, column, column].sqrt()

    def frames(self, count: int | None = None) -> list[Detections]:
        """Return the detections of each frame of the batch.

        Give the number of frames if the last ones may be empty.
        """
        known = self._count()
        count = known if count is None else count
        if known > count:
            raise BoxcovError(
                f"there are boxes in frame {known - 1}, but only {counted(count, 'frame')}"
            )
        rows = self[self.frame.argsort(stable=True)]
        numbers = torch.arange(count + 1, device=self.frame.device, dtype=self.frame.dtype)
        ends = torch.searchsorted(rows.frame, numbers).tolist()
        empty = rows[:0]
        return [rows[start:stop] if start < stop else empty for start, stop in pairwise(ends)]

    def _count(self) -> int:
        """The number of frames, if the last one has a box."""
        return int(self.frame.max()) + 1 if len(self) else 0

    def to(self, device: torch.device | str) -> Detections:
        tensors: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors()}
        return replace(self, **tensors)

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return numpy arrays by name, including the uncertainty."""
        tensors = dict(self._tensors())
        if self.covariance is not None:
            tensors["uncertainty"] = self.uncertainty
        if self.no_object is not None:
            tensors |= {"misplaced": self.misplaced, "risk": self.risk}
        return {name: to_array(tensor) for name, tensor in tensors.items()}

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, which replaces ``path`` as a whole; numbers are checked."""
        check_result(self, str(path))
        about = {"version": __version__, "meta": meta_to_write(self.meta)}
        about |= {"fields": self.fields, "classes": self.classes}
        write_safetensors(path, dict(self._tensors()), {_KEY: to_json(about)})

    @staticmethod
    def load(path: str | Path) -> Detections:
        """Load detections; raise if the file is damaged or its numbers are out of range."""
        with open_tensors(path, "a file of boxcov detections", _KEY) as (about, file):
            tensors = {name: file.get_tensor(name) for name in _SHAPES.keys() & file.keys()}
            fields, classes = check_names(about["fields"], about["classes"])
            meta = check_meta(about["meta"])
            found = Detections(**tensors, fields=fields, classes=classes, meta=meta)
            found._check_types()
            check_result(found, "it holds numbers out of range")
            check_meta(meta, found._count())
            return found

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with one row per box, see ``boxcov.export.tables``."""
        return import_module("boxcov.export.tables").to_pandas(self)

    def plot(
        self, inputs: Any = None, targets: Any = None, axes: Any = None, level: float = 0.9
    ) -> Any:
        """Draw the boxes of one frame by matplotlib and return the axes.

        Boxes of LiDAR are drawn from above, boxes of images on the image. Calibrated ones have the
        colour of their risk, and up to 50 % their region of ``level`` as a dashed outline.

        inputs, targets: a frame; its points or its image, and its objects in green, are drawn, too.
        axes: of matplotlib; a new figure unless given.
        """
        return import_module("boxcov.report.frame_plot").plot(self, inputs, targets, axes, level)

    def to_supervision(self) -> Any:
        """Return boxes of images as ``supervision.Detections``."""
        return import_module("boxcov.export.supervision").to_supervision(self)

    @staticmethod
    def from_supervision(found: Any) -> Detections:
        """Return ``supervision.Detections``, with all that ``to_supervision`` put into them."""
        return import_module("boxcov.export.supervision").from_supervision(found)

    def to_fiftyone(self, size: tuple[float, float] | None = None) -> Any:
        """Return one frame as ``fiftyone.Detections``; ``size`` is (width, height) of an image."""
        return import_module("boxcov.export.fiftyone").to_fiftyone(self, size)

    def _check_types(self) -> None:
        """Raise if numbers from a file have another type, or a frame is out of range."""
        for name, tensor in self._tensors():
            is_whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
            if is_whole != (name in ("labels", "frame")):
                raise ValueError(f"{name} are {tensor.dtype}, which they cannot be")
        if len(self) and not 0 <= int(self.frame.min()) <= int(self.frame.max()) < MAX_FRAMES:
            raise ValueError(f"frames from {int(self.frame.min())} to {int(self.frame.max())}")

    def _tensors(self) -> list[tuple[str, Tensor]]:
        present = ((name, getattr(self, name)) for name in _SHAPES)
        return [(name, tensor) for name, tensor in present if tensor is not None]

    def _needed(self, name: str) -> Tensor:
        """Return one of the tensors by name; raise if these detections lack it."""
        value: Tensor | None = getattr(self, name)
        if value is None and name != "covariance" and self.no_object is None:
            raise BoxcovError(_UNCALIBRATED)
        if value is None:
            advice = ": use MCGLM, ExactGLM, GLM or MCI" if name == "covariance" else ""
            raise BoxcovError(f"these detections have no {name}{advice}")
        return value

    def _error_model(self, key: str) -> Any:
        """What ``ErrorModel.summary`` says about the error model that filled these detections."""
        if self.no_object is None:
            raise BoxcovError(_UNCALIBRATED)
        return self.meta["error_model"][key]

    def _column(self, name: str) -> int:
        if name not in self.fields:
            raise BoxcovError(f"no field {name!r}: the boxes have {', '.join(self.fields)}")
        return self.fields.index(name)
