"""What torchvision's detectors share: their own transform of images and boxes, and their own losses image by image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from boxcov.detector import Detector, Selection
from boxcov.detectors.labels import Labels
from boxcov.detectors.objects import check_one_a_frame, objects_of
from boxcov.errors import BoxcovError

Raw = dict[str, Any]
Images = Literal["rgb", "coco"]
Found = tuple[
    Tensor, Tensor, Tensor
]  # of one image: where, the model's numbers of the classes, scores


class TorchvisionDetector(Detector):
    """Boxes x1 y1 x2 y2 in pixels of the images given: a list of (3, h, w) of any sizes, or a tensor (B, 3, h, w). Made by ``wrap``.

    Targets are a list of one dict a frame: ``boxes`` (n, 4) in those pixels and ``labels`` (n,) into ``classes``. Boxes are cut to the image, as
    torchvision does it: a coordinate at the border has no derivative there, and so no variance.
    """

    box_fields = ("x1", "y1", "x2", "y2")
    first_number: ClassVar[int] = 0  # 1 where the number 0 is the background

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
        if images not in get_args(Images):
            raise BoxcovError(
                f"images must be one of {', '.join(get_args(Images))}, got {images!r}"
            )
        self.model: Any = model
        self.threshold, self.images = threshold, images
        count = self.count()
        if names is not None and len(names) != count:
            raise BoxcovError(
                f"{len(names)} names, but the model has {count} classes, the background too"
            )
        known = enumerate(map(str, range(count)) if names is None else names)
        self.labels = Labels.of(
            {number: name for number, name in known if number >= self.first_number}, classes
        )
        self.classes = self.labels.classes
        self.training = (
            model.training
        )  # and no more: the modes of its modules are the model's business

    @abstractmethod
    def count(self) -> int:
        """How many numbers of classes the model has, the background too."""

    @abstractmethod
    def run(self, images: Any) -> Raw:
        """The network on torchvision's list of images: ``features``, a dict of maps, and what the head makes of them."""

    @abstractmethod
    def found(self, raw: Raw, b: int) -> Found:
        """What the model reports of an image, in its order."""

    @abstractmethod
    def where(self, raw: Raw, frame: Tensor, found: Tensor) -> Any:
        """``Selection.where`` of instances: the frame and the place in it that ``found`` gave."""

    @abstractmethod
    def coded(self, raw: Raw, selection: Selection) -> tuple[Tensor, Tensor]:
        """The regression values (m, 4) of instances, and the boxes (m, 4) that they start from."""

    @abstractmethod
    def from_code(self, values: Tensor, start: Tensor) -> Tensor:
        """Boxes (m, 4) in pixels of the resized images."""

    @abstractmethod
    def image_loss(self, raw: Raw, b: int, target: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model's own losses of one image, as of a batch of one; boxes in pixels of the resized image."""

    def forward(self, inputs: Sequence[Tensor] | Tensor) -> Raw:
        given = list(inputs)
        if not given or any(
            not isinstance(image, Tensor) or image.dim() != 3 or image.shape[0] != 3
            for image in given
        ):
            shapes = [
                tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
                for image in given
            ]
            raise BoxcovError(
                f"images must be a list of (3, h, w), or a tensor (B, 3, h, w), got {shapes}"
            )
        if self.images == "coco":
            given = [image.flip(0) / 255 for image in given]
        resized, _ = self.model.transform(given)
        sizes = [tuple(size) for size in resized.image_sizes]
        return {
            **self.run(resized),
            "sizes": sizes,
            "original": [tuple(image.shape[1:]) for image in given],
        }

    def maps(self, images: Any) -> dict[str, Tensor]:
        features = self.model.backbone(images.tensors)
        return {"0": features} if isinstance(features, Tensor) else dict(features)

    # from raw outputs to boxes

    def select(self, raw: Raw) -> Selection:
        frames, places, labels, scores = [], [], [], []
        for b in range(len(raw["sizes"])):
            place, number, score = self.found(raw, b)
            label = self.labels.of_model(number, self.count())
            keep = (
                (label >= 0) if self.threshold is None else (label >= 0) & (score > self.threshold)
            )
            frames.append(torch.full_like(label[keep], b))
            places.append(place[keep])
            labels.append(label[keep])
            scores.append(score[keep])
        frame = torch.cat(frames)
        return Selection(
            frame, torch.cat(scores), torch.cat(labels), self.where(raw, frame, torch.cat(places))
        )

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        return self.in_images(*self.coded(raw, selection), raw, selection.frame)

    def in_images(self, values: Tensor, start: Tensor, raw: Raw, frame: Tensor) -> Tensor:
        """Boxes (m, 4) in pixels of the images, cut to them: by torchvision's own functions, image by image, so that rounding is the same."""
        from torchvision.models.detection.transform import resize_boxes
        from torchvision.ops.boxes import clip_boxes_to_image

        boxes = values.new_zeros(values.shape)
        for b, (size, original) in enumerate(zip(raw["sizes"], raw["original"])):
            rows = (frame == b).nonzero()[:, 0]
            if len(rows):
                there = clip_boxes_to_image(self.from_code(values[rows], start[rows]), size)
                boxes = boxes.index_copy(0, rows, resize_boxes(there, size, original))
        return boxes

    # the training loss

    def loss(self, raw: Raw, targets: Sequence[Mapping[str, Any]]) -> Tensor:
        """The sum of the model's own losses (B,) of each image by itself, as of a batch of one."""
        from torchvision.models.detection.transform import resize_boxes

        like = next(iter(raw["features"].values()))
        check_one_a_frame(targets, len(raw["sizes"]))
        losses = []
        for b, target in enumerate(targets):
            boxes, labels = objects_of(target, b, len(self.classes), like)
            own = {
                "boxes": resize_boxes(boxes, raw["original"][b], raw["sizes"][b]),
                "labels": self.labels.to_model(labels),
            }
            losses.append(torch.stack(list(self.image_loss(raw, b, own).values())).sum())
        return torch.stack(losses)

    def below(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        """Neck and backbone, where the model's backbone has a pyramid; else a backbone alone."""
        backbone = self.model.backbone
        if hasattr(backbone, "fpn") and hasattr(backbone, "body"):
            return {"neck": backbone.fpn, "backbone": backbone.body}
        return {"backbone": backbone}
