"""What detectors with queries share: normalised boxes, a query as an instance, the model's own loss image by image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from boxcov.detector import Detector, InstanceGroup, Selection
from boxcov.detectors.labels import Labels
from boxcov.detectors.objects import check_one_a_frame, objects_of
from boxcov.detectors.transformers.images import Images
from boxcov.errors import BoxcovError

Raw = dict[str, Any]
Given = dict[str, Tensor]
_INPUTS = ("pixel_values", "pixel_mask", "sizes")


class QueryDetector(Detector):
    """Boxes x1 y1 x2 y2 of a model of transformers; made by ``wrap`` or ``load``.

    Inputs are ``pixel_values`` (B, 3, h, w) as the model takes them, alone or in a dict with ``pixel_mask`` (B, h, w) and ``sizes`` (B, 2),
    height and width of the images in whose pixels boxes are given; unless told, these are the pixels of ``pixel_values``. With an image
    processor inputs are images (B, 3, h, w) as ``boxcov.data.coco`` gives them, blue first, 0 to 255, and boxes are in their pixels.
    Targets are a list of one dict a frame: ``boxes`` (n, 4) as x1 y1 x2 y2 in the same pixels, ``labels`` (n,) into ``classes``.
    """

    box_fields = ("x1", "y1", "x2", "y2")

    def __init__(
        self, model: nn.Module, labels: Labels, threshold: float, processor: Any = None
    ) -> None:
        super().__init__()
        if not 0 <= threshold <= 1:
            raise BoxcovError(f"threshold must be from 0 to 1, got {threshold}")
        self.model: Any = model
        self.images = None if processor is None else Images(processor)
        self.labels, self.classes, self.threshold = labels, labels.classes, threshold
        self.training = (
            model.training
        )  # and no more: the modes of its modules are the model's business

    @abstractmethod
    def run(self, given: Given) -> Raw:
        """``hidden`` (B, Q, d) of the queries, their ``logits`` (B, Q, n) and ``boxes`` (B, Q, 4), and what the loss reads besides."""

    @abstractmethod
    def box_head(self, hidden: Tensor, raw: Raw, frame: Tensor, query: Tensor) -> Tensor:
        """Normalised boxes (m, 4), centre and size, of the hidden states (m, d) of some queries."""

    @abstractmethod
    def class_head(self, hidden: Tensor) -> Tensor:
        """Logits (m, n) of the hidden states (m, d) of some queries."""

    @abstractmethod
    def found(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Frame, query, the model's number of the class, and score of all that the model would report at a threshold of 0."""

    @abstractmethod
    def score_logit(self, logits: Tensor, number: Tensor) -> Tensor:
        """The logit (m,) of the score of a class, by its number (m,), from the logits (m, n)."""

    @abstractmethod
    def image_loss(self, raw: Raw, target: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        """The model's own loss of a batch of one image."""

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Raw:
        given = self._given(inputs)
        sizes = given.pop("sizes", None)
        pixels = given["pixel_values"]
        if sizes is None:
            sizes = torch.tensor(pixels.shape[2:], device=pixels.device).expand(len(pixels), 2)
        return {**self.run(given), "sizes": sizes.to(pixels)}

    def _given(self, inputs: Any) -> Given:
        if isinstance(inputs, Tensor):
            if inputs.dim() != 4 or inputs.shape[1] != 3:
                raise BoxcovError(f"images must be (B, 3, h, w), got {tuple(inputs.shape)}")
            if self.images is None:
                return {"pixel_values": inputs}
            return {
                **self.images(inputs),
                "sizes": torch.tensor(inputs.shape[2:], device=inputs.device).expand(
                    len(inputs), 2
                ),
            }
        if self.images is not None:
            raise BoxcovError(
                "this detector prepares its images itself: give it a tensor (B, 3, h, w), blue first, 0 to 255"
            )
        if (
            not isinstance(inputs, dict)
            or "pixel_values" not in inputs
            or not set(inputs) <= set(_INPUTS)
        ):
            got = listed_keys(inputs)
            raise BoxcovError(
                f"inputs must be pixel_values (B, 3, h, w), or a dict of them with {' and '.join(_INPUTS[1:])} at most, got {got}"
            )
        return dict(inputs)

    # from raw outputs to boxes

    def select(self, raw: Raw) -> Selection:
        frame, query, number, scores = self.found(raw["logits"])
        labels = self.labels.of_model(number, len(self.model.config.id2label))
        keep = (scores > self.threshold) & (labels >= 0)
        where = (frame[keep], query[keep])
        return Selection(where[0], scores[keep], labels[keep], where)

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        frame, query = selection.where
        return in_pixels(raw["boxes"][frame, query], raw["sizes"][frame])

    def logits(self, raw: Raw, selection: Selection) -> Tensor:
        frame, query = selection.where
        return self.score_logit(raw["logits"][frame, query], self.labels.to_model(selection.labels))

    def instances(
        self, raw: Raw, selection: Selection, with_logit: bool = False
    ) -> list[InstanceGroup]:
        """Queries meet in the attention below the head only: behind it each runs by itself."""
        frame, query = selection.where

        def run() -> Tensor:
            hidden = raw["hidden"][frame, query]  # (m, d)
            boxes = in_pixels(self.box_head(hidden, raw, frame, query), raw["sizes"][frame])
            if not with_logit:
                return boxes
            logits = self.score_logit(
                self.class_head(hidden), self.labels.to_model(selection.labels)
            )
            return torch.cat([boxes, logits.unsqueeze(1)], 1)

        return [(torch.arange(len(selection), device=frame.device), run)]

    # the training loss

    def loss(self, raw: Raw, targets: Sequence[Mapping[str, Any]]) -> Tensor:
        """The model's own loss (B,) of each image by itself, as of a batch of one: divided by the number of its own objects."""
        sizes = raw["sizes"]
        check_one_a_frame(targets, len(sizes))
        losses = []
        for b, target in enumerate(targets):
            boxes, labels = objects_of(target, b, len(self.classes), sizes)
            own = {
                "class_labels": self.labels.to_model(labels),
                "boxes": normalised(boxes, sizes[b]),
            }
            try:
                losses.append(self.image_loss(of_image(raw, b), [own], sizes.device))
            except ImportError as error:
                raise BoxcovError(
                    f"the losses of transformers need more packages: pip install 'boxcov[transformers]' ({error})"
                ) from None
        return torch.stack(losses)


def of_image(raw: Raw, b: int) -> Raw:
    """The raw outputs of one image, as a batch of one; what is stacked by layer has the batch second.

    >>> of_image({"logits": torch.zeros(2, 5, 3), "layers": torch.zeros(6, 2, 5, 8)}, 1)["layers"].shape
    torch.Size([6, 1, 5, 8])
    """
    return {
        name: part[:, b : b + 1] if name == "layers" else part[b : b + 1]
        for name, part in raw.items()
    }


def in_pixels(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Centres and sizes (m, 4) in parts of images as x1 y1 x2 y2 in pixels of those images (m, 2), height and width.

    >>> in_pixels(torch.tensor([[0.5, 0.5, 0.5, 1.0]]), torch.tensor([[100.0, 40.0]]))
    tensor([[ 10.,   0.,  30., 100.]])
    """
    x, y, width, height = boxes.unbind(1)
    # in this order of operations, so that rounding is that of transformers
    corners = torch.stack([x - 0.5 * width, y - 0.5 * height, x + 0.5 * width, y + 0.5 * height], 1)
    return corners * sizes.flip(1).repeat(1, 2)


def normalised(boxes: Tensor, size: Tensor) -> Tensor:
    """The inverse: x1 y1 x2 y2 (n, 4) in pixels of an image (2,), height and width, as centres and sizes in parts of it.

    >>> normalised(torch.tensor([[10.0, 0.0, 30.0, 100.0]]), torch.tensor([100.0, 40.0]))
    tensor([[0.5000, 0.5000, 0.5000, 1.0000]])
    """
    low, high = (boxes / size.flip(0).repeat(2)).split(2, 1)
    return torch.cat([(low + high) / 2, high - low], 1)


def listed_keys(inputs: Any) -> str:
    """What was given in place of inputs, for an error."""
    return (
        f"a dict of {', '.join(map(str, inputs))}"
        if isinstance(inputs, dict)
        else f"a {type(inputs).__name__}: dict(...) makes a dict of it"
    )
