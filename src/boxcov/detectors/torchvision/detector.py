"""Shared by torchvision's detectors: transform of images and boxes, losses per image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from boxcov._torch.process_state import at_least_float32
from boxcov.detector import Detector, Selection, flatten_configuration
from boxcov.detectors.labels import Labels
from boxcov.detectors.objects import objects_of
from boxcov.detectors.signals import RAW_NAMES, Signals, class_signals, touched_sides
from boxcov.errors import BoxcovError, check_choice

Raw = dict[str, Any]
Images = Literal["rgb", "coco"]
# of one image: the place of each detection, the model's class number, the score
Reported = tuple[Tensor, Tensor, Tensor]


class TorchvisionDetector(Detector):
    """A detector of torchvision, made by ``wrap``.

    Inputs: a list of images (3, h, w) of any sizes, or a tensor (B, 3, h, w).
    Boxes: x1 y1 x2 y2 in pixels of the images. They are clipped to the image as torchvision does:
    a clipped side has no derivative, and so no variance, see ``Detections.clipped``.
    Targets: one dict per frame with ``boxes`` (n, 4) and ``labels`` (n,), indices into ``classes``.
    """

    box_fields = ("x1", "y1", "x2", "y2")
    first_number: ClassVar[int] = 0  # 1 if number 0 is the background
    raw_names: ClassVar[tuple[str, ...]] = RAW_NAMES  # of the four regression values

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str] | None,
        classes: Sequence[str] | Mapping[str, int] | None,
        threshold: float | None,
        images: Images,
    ) -> None:
        super().__init__()
        if threshold is not None and not 0 <= threshold <= 1:
            raise BoxcovError(f"threshold must be from 0 to 1, got {threshold}")
        check_choice("images", images, Images)
        self.model: Any = model
        self.threshold, self.images = threshold, images
        count = self.count()
        if names is not None and len(names) != count:
            raise BoxcovError(
                f"{len(names)} names, but the model has {count} classes including the background"
            )
        known = enumerate(map(str, range(count)) if names is None else names)
        self.labels = Labels.of(
            {number: name for number, name in known if number >= self.first_number}, classes
        )
        self.classes = self.labels.classes
        self.training = model.training

    @abstractmethod
    def count(self) -> int:
        """Return the number of classes, including the background."""

    @abstractmethod
    def run(self, images: Any) -> Raw:
        """Return ``features`` (a dict of maps) and the outputs of the head."""

    @abstractmethod
    def report(self, raw: Raw, b: int) -> Reported:
        """Return the detections of image ``b``, in the model's order."""

    @abstractmethod
    def where(self, raw: Raw, frame: Tensor, place: Tensor) -> Any:
        """Return ``Selection.where``, given frames and the places that ``report`` returned."""

    @abstractmethod
    def regression_of(self, raw: Raw, selection: Selection) -> tuple[Tensor, Tensor]:
        """Return the regression values (m, 4) and the anchors or proposals (m, 4)."""

    @abstractmethod
    def decode_regression(self, values: Tensor, start: Tensor) -> Tensor:
        """Return boxes (m, 4) in pixels of the resized images."""

    @abstractmethod
    def image_loss(self, raw: Raw, b: int, target: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's losses of image ``b``, a batch of one; boxes in resized pixels."""

    def configuration(self) -> dict[str, str]:
        rules = {"threshold": self.threshold}
        own = {"images": self.images, "selection": rules, "numbers": self.labels.numbers}
        return {**super().configuration(), **flatten_configuration(own)}

    def forward(self, inputs: Sequence[Tensor] | Tensor) -> Raw:
        given = list(inputs)
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in given]
        if not given or any(len(shape) != 3 or shape[0] != 3 for shape in shapes):
            raise BoxcovError(
                f"images must be a list of (3, h, w), or a tensor (B, 3, h, w), got {shapes}"
            )
        if self.images == "coco":
            given = [image.flip(0) / 255 for image in given]
        resized, _ = self.model.transform(given)
        sizes = [tuple(size) for size in resized.image_sizes]
        original = [tuple(image.shape[1:]) for image in given]
        return {**self.run(resized), "sizes": sizes, "original": original}

    def maps(self, images: Any) -> dict[str, Tensor]:
        features = self.model.backbone(images.tensors)
        return {"0": features} if isinstance(features, Tensor) else dict(features)

    def select(self, raw: Raw) -> Selection:
        images = []
        for b in range(len(raw["sizes"])):
            place, number, score = self.report(raw, b)
            label = self.labels.of_model(number, self.count())
            keep = self.is_reported(label, score)
            images.append((torch.full_like(label[keep], b), place[keep], label[keep], score[keep]))
        frame, place, label, score = (torch.cat(column) for column in zip(*images))
        return Selection(frame, score, label, self.where(raw, frame, place))

    def is_reported(self, label: Tensor, score: Tensor) -> Tensor:
        """Return which boxes (m,) of the model are reported: known class, above the threshold."""
        return (label >= 0) & (score > (-1.0 if self.threshold is None else self.threshold))

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        return self.in_images(*self.regression_of(raw, selection), raw, selection.frame)

    def shared_signals(
        self, raw: Raw, selection: Selection, logits: Tensor, boxes: Tensor
    ) -> Signals:
        """Return the signals of all families; logits: (m, K), boxes: (m, 4) in resized pixels."""
        sizes = torch.tensor(raw["sizes"], device=logits.device)[selection.frame]
        number = self.labels.to_model(selection.labels)
        background = 0 if self.first_number else None
        return {
            **dict(zip(self.raw_names, self.regression_of(raw, selection)[0].unbind(1))),
            **class_signals(at_least_float32(logits), number, background),
            "touched sides": touched_sides(boxes, sizes[:, 1], sizes[:, 0]),
        }

    def in_images(self, values: Tensor, start: Tensor, raw: Raw, frame: Tensor) -> Tensor:
        """Return boxes (m, 4) in pixels of the images, clipped by torchvision's own functions.

        They run image by image, so that the rounding is torchvision's.
        """
        from torchvision.models.detection.transform import resize_boxes
        from torchvision.ops.boxes import clip_boxes_to_image

        if len(raw["sizes"]) == 1:  # shapes that do not depend on values, for static graphs
            there = clip_boxes_to_image(self.decode_regression(values, start), raw["sizes"][0])
            return resize_boxes(there, raw["sizes"][0], raw["original"][0])
        boxes = values.new_zeros(values.shape)
        for b, (size, original) in enumerate(zip(raw["sizes"], raw["original"])):
            rows = (frame == b).nonzero()[:, 0]
            if len(rows):
                there = clip_boxes_to_image(self.decode_regression(values[rows], start[rows]), size)
                boxes = boxes.index_copy(0, rows, resize_boxes(there, size, original))
        return boxes

    # the training loss

    def loss(self, raw: Raw, targets: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the sum of the model's own losses (B,), each image as a batch of one."""
        from torchvision.models.detection.transform import resize_boxes

        like = next(iter(raw["features"].values()))
        objects = objects_of(targets, self.box_fields, len(self.classes), like)
        losses = []
        for b, (boxes, labels) in enumerate(objects):
            own = {
                "boxes": resize_boxes(boxes, raw["original"][b], raw["sizes"][b]),
                "labels": self.labels.to_model(labels),
            }
            losses.append(torch.stack(list(self.image_loss(raw, b, own).values())).sum())
        return torch.stack(losses)

    def below(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        """Return neck and backbone if the model's backbone has a pyramid, else the backbone."""
        backbone = self.model.backbone
        if hasattr(backbone, "fpn") and hasattr(backbone, "body"):
            return {"neck": backbone.fpn, "backbone": backbone.body}
        return {"backbone": backbone}
