"""Ultralytics' YOLO, version 8 and later: anchor-free with distributions of side distances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from boxcov._torch.process_state import at_least_float32
from boxcov.detector import Detector, InstanceGroup, Selection, flatten_configuration
from boxcov.detectors.boxes import centres, corners
from boxcov.detectors.labels import Labels
from boxcov.detectors.objects import check_images, objects_of
from boxcov.detectors.pyramid import (
    CellIndex,
    ScoredBoxes,
    cell_counts,
    level_of,
    static_selection,
)
from boxcov.detectors.signals import (
    SIDES,
    TINY,
    Signals,
    class_signals,
    finite,
    named,
    of_class,
    pyramid_window,
    touched_sides,
    window_signals,
    with_log_size,
)
from boxcov.errors import BoxcovError
from boxcov.head_stages import crop, run_on_crops
from boxcov.static_selection import StaticLimits, StaticSelection, check_one_frame

Raw = dict[str, Any]
_REACH = 2  # cells that a box sees to each side: two 3x3 convolutions


class Yolo(Detector):
    """Ultralytics' YOLO, made by ``wrap``.

    Inputs: images (B, 3, h, w) with sides divisible by 32. Boxes: x1 y1 x2 y2 in their pixels.
    Targets: one dict per frame with ``boxes`` (n, 4) and ``labels`` (n,), indices into ``classes``.
    """

    box_fields = ("x1", "y1", "x2", "y2")

    def __init__(
        self,
        model: nn.Module,
        labels: Labels,
        threshold: float,
        overlap: float,
        max_boxes: int,
        coco: bool,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.labels, self.classes = labels, labels.classes
        self.threshold, self.overlap = threshold, overlap
        self.max_boxes, self.coco = max_boxes, coco
        self.training = model.training
        self.stride = int(self.head.stride.max())  # read once: a graph cannot hold the read

    def configuration(self) -> dict[str, str]:
        rules = {"threshold": self.threshold, "overlap": self.overlap, "max_boxes": self.max_boxes}
        own = {"images": "coco" if self.coco else "rgb", "numbers": self.labels.numbers}
        return {**super().configuration(), **flatten_configuration({**own, "selection": rules})}

    @property
    def head(self) -> Any:
        return self.model.model[-1]

    @property
    def trained_size(self) -> int | None:
        """The side in pixels of the images of its training, None if the model does not hold it."""
        size = _settings(self.model).get("imgsz")
        return size if isinstance(size, int) and size > 0 else None

    def forward(self, inputs: Tensor) -> Raw:
        check_images(inputs, self.stride)
        found, maps = self.model(inputs.flip(1) / 255 if self.coco else inputs)
        maps = maps.get("one2many", maps)
        return {
            "found": found,
            "distances": maps["boxes"],
            "logits": maps["scores"],
            "features": list(maps["feats"]),
        }

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        layers = list(self.model.model)[:-1]
        first = len(self.model.yaml["backbone"])
        return {
            "head": (self.head.cv2, self.head.cv3),
            "neck": tuple(layers[first:]),
            "backbone": tuple(layers[:first]),
        }

    def select(self, raw: Raw) -> Selection:
        """Return what Ultralytics' own NMS keeps, without its time limit."""
        from ultralytics.utils.nms import non_max_suppression

        boxes, cells = non_max_suppression(
            raw["found"].detach(),
            self.threshold,
            self.overlap,
            max_det=self.max_boxes,
            nc=self.head.nc,
            max_time_img=1e9,
            return_idxs=True,
        )
        counts = torch.tensor([len(image) for image in boxes])
        device = raw["found"].device
        frame = torch.arange(len(boxes)).repeat_interleave(counts).to(device)
        every, cell = torch.cat(boxes), torch.cat([rows.flatten() for rows in cells]).long()
        labels = self.labels.of_model(every[:, 5].long(), self.head.nc)
        keep = labels >= 0
        level = level_of(cell[keep], cell_counts(raw["features"]))
        where = CellIndex(frame[keep], cell[keep], level)
        return Selection(where.frame, every[keep, 4], labels[keep], where)

    def select_static(self, raw: Raw, limits: StaticLimits) -> StaticSelection:
        check_one_frame(len(raw["found"]))
        scores, number = raw["found"][0, 4 : 4 + self.head.nc].max(0)  # (N,)
        labels = self.labels.of_model(number, self.head.nc)
        boxes, above = corners(raw["found"][0, :4].T), scores > self.threshold
        cells = torch.arange(len(scores), device=scores.device)
        return static_selection(
            ScoredBoxes(scores, boxes, cells, number, labels, above, labels >= 0),
            limits,
            counts=cell_counts(raw["features"]),
            overlap=self.overlap,
            max_boxes=self.max_boxes,
        )

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        return corners(raw["found"][selection.where.frame, :4, selection.where.cell])

    def logits(self, raw: Raw, selection: Selection) -> Tensor:
        return raw["logits"][
            selection.where.frame, self.labels.to_model(selection.labels), selection.where.cell
        ]

    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        """Return named numbers (m,): also the spread of the distribution of each side."""
        frame, number = selection.where.frame, self.labels.to_model(selection.labels)
        shapes = [x.shape[2:] for x in raw["features"]]
        around = pyramid_window(selection.where.cell, shapes)
        logits = at_least_float32(raw["logits"][frame[:, None], :, around.index])  # (m, 9, nc)
        boxes = at_least_float32(raw["found"][frame[:, None], :4, around.index])
        scores = of_class(logits, number)
        sides = raw["distances"][frame, :, selection.where.cell].unflatten(1, (4, -1))
        height, width = (n * self.head.stride[0] for n in shapes[0])
        return finite(
            {
                **window_signals(scores, with_log_size(boxes), around.inside),
                **class_signals(logits[:, 4], number),
                **side_signals(at_least_float32(sides)),
                "level": around.level,
                "touched sides": touched_sides(corners(boxes[:, 4]), width, height),
            }
        )

    def instances(
        self, raw: Raw, selection: Selection, with_logit: bool = False
    ) -> list[InstanceGroup]:
        """Return one group per level, each box on the 5x5 crop that it sees."""
        groups = selection.where.level_groups(len(raw["features"]))
        return [self._group(raw, selection, index, n, with_logit) for n, index in enumerate(groups)]

    def _group(
        self, raw: Raw, selection: Selection, index: Tensor, level: int, with_logit: bool
    ) -> InstanceGroup:
        x = raw["features"][level]
        cell = selection.where.cell[index] - sum(cell_counts(raw["features"])[:level])
        row, column = cell // x.shape[3], cell % x.shape[3]
        number = self.labels.to_model(selection.labels[index])

        def run() -> Tensor:
            crops, inside = crop(x, selection.where.frame[index], row, column, _REACH)
            maps, _ = run_on_crops(self.head.cv2[level], crops, inside)
            values = maps[:, :, :, 0]  # (g, 4 bins, 1)
            low, high = self.head.dfl(values)[:, :, 0].split(2, 1)
            centre = torch.stack([column, row], 1) + 0.5
            boxes: Tensor = torch.cat([centre - low, centre + high], 1) * self.head.stride[level]
            if not with_logit:
                return boxes
            logits = run_on_crops(self.head.cv3[level], crops, inside)[0][:, :, 0, 0]
            return torch.cat([boxes, logits.gather(1, number.unsqueeze(1))], 1)

        return index, run

    def loss(self, raw: Raw, targets: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return Ultralytics' own loss (B,), each image as a batch of one."""
        from ultralytics.utils.loss import v8DetectionLoss

        objects = objects_of(targets, self.box_fields, len(self.classes), raw["found"])
        criterion = v8DetectionLoss(_LossModel(self.model))
        height, width = (n * float(self.head.stride[0]) for n in raw["features"][0].shape[2:])
        size = torch.tensor([width, height, width, height], device=raw["found"].device)
        losses = []
        for b, (boxes, labels) in enumerate(objects):
            own = {
                "batch_idx": torch.zeros_like(labels),
                "cls": self.labels.to_model(labels),
                "bboxes": centres(boxes / size),
            }
            image = {"boxes": raw["distances"][b : b + 1], "scores": raw["logits"][b : b + 1]}
            losses.append(
                criterion({**image, "feats": [x[b : b + 1] for x in raw["features"]]}, own)[0].sum()
            )
        return torch.stack(losses)


def side_signals(values: Tensor) -> Signals:
    """Return mean, log standard deviation and entropy of the distance of each side, in cells.

    values: (m, 4, bins), the logits of the distributions, or one bin with the distance itself.
    """
    if values.shape[2] == 1:
        return named("side", SIDES, values[:, :, 0])
    p, bins = values.softmax(2), torch.arange(values.shape[2], device=values.device)
    mean = (p * bins).sum(2)
    variance = (p * (bins - mean[:, :, None]).square()).sum(2)
    return {
        **named("side", SIDES, mean),
        **named("deviation", SIDES, 0.5 * (variance + TINY).log()),
        **named("entropy", SIDES, -(p * values.log_softmax(2)).sum(2)),
    }


def _settings(model: Any) -> dict[str, Any]:
    """Return the settings of the training that a model holds."""
    own = getattr(model, "args", None)
    return own if isinstance(own, dict) else vars(own) if own is not None else {}


class _LossModel:
    """The attributes of a model that the loss reads; missing settings are the defaults."""

    def __init__(self, model: Any) -> None:
        from ultralytics.utils import DEFAULT_CFG

        self.args = SimpleNamespace(**{**vars(DEFAULT_CFG), **_settings(model)})
        self.model, self.parameters = model.model, model.parameters
        self.class_weights = getattr(model, "class_weights", None)


def wrap(
    model: nn.Module,
    classes: Sequence[str] | Mapping[str, int] | None = None,
    threshold: float = 0.25,
    overlap: float = 0.7,
    max_boxes: int = 300,
    coco: bool = False,
) -> Yolo:
    """Make a Detector from ``YOLO(...)`` of Ultralytics, or from the ``DetectionModel`` inside.

    classes: the classes to report, by name, or a dict from new names to the model's numbers; by
    default COCO's 80 if the model knows them, else all.
    threshold, overlap, max_boxes: score threshold, IoU threshold of NMS, boxes per image; the
    defaults are Ultralytics'.
    coco: images are BGR, 0 to 255 (``boxcov.data.coco``); otherwise RGB, 0 to 1.

    >>> wrap(nn.Linear(1, 1))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: a Linear is not a detection model of Ultralytics: give YOLO(...)
    """
    network: Any = model
    if _is_of_ultralytics(model, "Model"):  # YOLO(...); its network is loaded already
        network = model.model
    if not _is_of_ultralytics(network, "DetectionModel"):
        kind = type(model).__name__
        task = f" for {model.task}" if network is not model else ""
        raise BoxcovError(f"a {kind}{task} is not a detection model of Ultralytics: give YOLO(...)")
    head = network.model[-1]
    if type(head).__name__ != "Detect":
        raise BoxcovError(
            f"the model ends in a {type(head).__name__}; only Detect is supported "
            "(no masks, keypoints or rotated boxes)"
        )
    if getattr(head, "end2end", False):
        raise BoxcovError(
            "the model reports its one-to-one head, without NMS: "
            "set model.end2end = False to use the one-to-many head"
        )
    if not 0 <= threshold <= 1 or not 0 < overlap <= 1 or max_boxes < 1:
        raise BoxcovError(
            "threshold must lie in [0, 1], overlap in (0, 1] and max_boxes be at least 1, "
            f"got {threshold}, {overlap} and {max_boxes}"
        )
    return Yolo(network, Labels.of(network.names, classes), threshold, overlap, max_boxes, coco)


def _is_of_ultralytics(model: Any, name: str) -> bool:
    """Whether the model is of a class of that name in Ultralytics, which need not be installed."""
    return any(
        c.__name__ == name and c.__module__.startswith("ultralytics.") for c in type(model).__mro__
    )
