"""Shared by query-based detectors: normalized boxes, queries as instances, loss per image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from boxcov._torch.process_state import at_least_float32
from boxcov.detector import Detector, InstanceGroup, Selection, flatten_configuration
from boxcov.detectors.boxes import centres, corners
from boxcov.detectors.labels import Labels
from boxcov.detectors.objects import objects_of
from boxcov.detectors.signals import (
    FIELDS,
    RAW_NAMES,
    TINY,
    class_signals,
    deviation,
    finite,
    named,
    neighbour_signals,
    touched_sides,
    with_log_size,
)
from boxcov.errors import BoxcovError
from boxcov.static_selection import StaticLimits, StaticSelection, check_one_frame, first_rows

Raw = dict[str, Any]
Given = dict[str, Tensor]
_INPUTS = ("pixel_values", "pixel_mask", "sizes")


class Images(nn.Module):
    """Run the processor on images (B, 3, h, w), BGR, 0 to 255.

    Return ``pixel_values`` and, if the processor makes one, ``pixel_mask``. It is a module so that
    its output is cached with the rest of the trunk.
    """

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor = processor

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        rgb = images.flip(1).round().clamp(0, 255).to("cpu", torch.uint8).permute(0, 2, 3, 1)
        own = list(rgb.numpy())
        given = self.processor(images=own, return_tensors="pt", input_data_format="channels_last")
        prepared = {"pixel_values": given["pixel_values"].to(images)}
        if "pixel_mask" in given:
            prepared["pixel_mask"] = given["pixel_mask"].to(images.device)
        return prepared


class QueryDetector(Detector):
    """A detector of transformers, made by ``wrap`` or ``load``. Boxes are x1 y1 x2 y2 in pixels.

    Inputs without an image processor: ``pixel_values`` (B, 3, h, w), or a dict with it and
    ``pixel_mask`` (B, h, w) and ``sizes`` (B, 2), the heights and widths that define the boxes'
    pixels; by default those of ``pixel_values``.
    Inputs with an image processor: images (B, 3, h, w), BGR, 0 to 255 (``boxcov.data.coco``).
    Targets: one dict per frame with ``boxes`` (n, 4) and ``labels`` (n,), indices into ``classes``.
    """

    box_fields = ("x1", "y1", "x2", "y2")
    background: ClassVar[int | None] = None  # column of "no object" in the class logits

    def __init__(
        self, model: nn.Module, labels: Labels, threshold: float, processor: Any = None
    ) -> None:
        super().__init__()
        if not 0 <= threshold <= 1:
            raise BoxcovError(f"threshold must be from 0 to 1, got {threshold}")
        self.model: Any = model
        self.images = None if processor is None else Images(processor)
        self.labels, self.classes, self.threshold = labels, labels.classes, threshold
        self.training = model.training

    @abstractmethod
    def run(self, given: Given) -> Raw:
        """Return ``hidden`` (B, Q, d), ``logits`` (B, Q, n), ``boxes`` (B, Q, 4) and more."""

    @abstractmethod
    def box_head(self, hidden: Tensor, raw: Raw, frame: Tensor, query: Tensor) -> Tensor:
        """Return normalized boxes (m, 4), centre and size, from hidden states (m, d)."""

    @abstractmethod
    def class_head(self, hidden: Tensor) -> Tensor:
        """Return logits (m, n) from hidden states (m, d)."""

    @abstractmethod
    def report(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return frame, query, class number and score of every candidate, at threshold 0."""

    @abstractmethod
    def score_logit(self, logits: Tensor, number: Tensor) -> Tensor:
        """Return the logit (m,) of the score of class ``number`` (m,), from the logits (m, n)."""

    @abstractmethod
    def image_loss(self, raw: Raw, target: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        """Return the model's own loss of a batch of one image."""

    def layer_boxes(self, raw: Raw, frame: Tensor, query: Tensor) -> Tensor | None:
        """Return normalized boxes (m, L, 4) after each decoder layer, if the raw outputs do."""
        return None

    def configuration(self) -> dict[str, str]:
        images = "as given" if self.images is None else "by the image processor"
        rules = {"threshold": self.threshold}
        own = {"images": images, "selection": rules, "numbers": self.labels.numbers}
        return {**super().configuration(), **flatten_configuration(own)}

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Raw:
        given = self.prepare(inputs)
        sizes = given.pop("sizes", None)
        pixels = given["pixel_values"]
        return {**self.run(given), "sizes": (_sizes(pixels) if sizes is None else sizes).to(pixels)}

    def static_part(self) -> QueryDetector:
        """Return the network after the image processor; its inputs are those of ``prepare``."""
        return type(self)(self.model, self.labels, self.threshold)

    def prepare(self, inputs: Any) -> Given:
        """Return what the network reads: ``pixel_values``, ``pixel_mask`` and ``sizes``."""
        if isinstance(inputs, Tensor):
            if inputs.dim() != 4 or inputs.shape[1] != 3:
                raise BoxcovError(f"images must be (B, 3, h, w), got {tuple(inputs.shape)}")
            if self.images is None:
                return {"pixel_values": inputs}
            return {**self.images(inputs), "sizes": _sizes(inputs)}
        if self.images is not None:
            raise BoxcovError(
                "this detector has an image processor: give it a tensor (B, 3, h, w), BGR, 0 to 255"
            )
        if isinstance(inputs, dict) and {"pixel_values"} <= set(inputs) <= set(_INPUTS):
            return dict(inputs)
        got = f"a {type(inputs).__name__}: dict(...) makes a dict of it"
        if isinstance(inputs, dict):
            got = f"a dict of {', '.join(map(str, inputs))}"
        raise BoxcovError(
            f"inputs must be pixel_values (B, 3, h, w), or a dict with pixel_values and "
            f"optionally {' and '.join(_INPUTS[1:])}, got {got}"
        )

    def select(self, raw: Raw) -> Selection:
        return _at(*self._candidates(raw))

    def _candidates(self, raw: Raw) -> tuple[Selection, Tensor]:
        """Return all candidates, and which of them are reported."""
        frame, query, number, scores = self.report(raw["logits"])
        labels = self.labels.of_model(number, len(self.model.config.id2label))
        found = Selection(frame, scores, labels.clamp(min=0), (frame, query))
        return found, (scores > self.threshold) & (labels >= 0)

    def select_static(self, raw: Raw, limits: StaticLimits) -> StaticSelection:
        check_one_frame(len(raw["logits"]))
        found, keep = self._candidates(raw)
        index, count, excess = first_rows(found.scores, keep, limits.boxes)
        return StaticSelection(_at(found, index), count, excess)

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        frame, query = selection.where
        return in_pixels(raw["boxes"][frame, query], raw["sizes"][frame])

    def logits(self, raw: Raw, selection: Selection) -> Tensor:
        frame, query = selection.where
        return self.score_logit(raw["logits"][frame, query], self.labels.to_model(selection.labels))

    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        """Return named numbers (m,): also how far queries and decoder layers disagree."""
        frame, query = selection.where
        number, logits = self.labels.to_model(selection.labels), raw["logits"]
        every = number.repeat_interleave(logits.shape[1])
        scores = at_least_float32(self.score_logit(logits[frame].flatten(0, 1), every))
        scores = scores.unflatten(0, (-1, logits.shape[1]))  # (m, Q)
        boxes = at_least_float32(raw["boxes"][frame])  # (m, Q, 4) normalized centre and size
        own = boxes.gather(1, query[:, None, None].expand(-1, 1, 4))[:, 0]
        reported, everywhere = corners(own), torch.ones_like(scores, dtype=torch.bool)
        found = {
            "logit": scores.gather(1, query[:, None])[:, 0],
            **class_signals(at_least_float32(logits[frame, query]), number, self.background),
            **dict(zip(RAW_NAMES, torch.logit(own, eps=TINY).unbind(1))),
            **neighbour_signals(reported, corners(boxes), scores, own=query, inside=everywhere),
            "touched sides": touched_sides(reported),
        }
        layers = self.layer_boxes(raw, frame, query)
        if layers is not None:
            layers = with_log_size(at_least_float32(layers))
            apart = deviation(layers, with_log_size(own), layers.new_ones(layers.shape[:2]))
            found |= named("layers", FIELDS, apart)
        return finite(found)

    def instances(
        self, raw: Raw, selection: Selection, with_logit: bool = False
    ) -> list[InstanceGroup]:
        """Return one group: after the last attention, queries are independent."""
        frame, query = selection.where

        def run() -> Tensor:
            hidden = raw["hidden"][frame, query]  # (m, d)
            boxes = in_pixels(self.box_head(hidden, raw, frame, query), raw["sizes"][frame])
            if not with_logit:
                return boxes
            number = self.labels.to_model(selection.labels)
            logits = self.score_logit(self.class_head(hidden), number)
            return torch.cat([boxes, logits.unsqueeze(1)], 1)

        return [(torch.arange(len(selection), device=frame.device), run)]

    def loss(self, raw: Raw, targets: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the model's own loss (B,), each image as a batch of one."""
        sizes, losses = raw["sizes"], []
        objects = objects_of(targets, self.box_fields, len(self.classes), sizes)
        for b, (boxes, labels) in enumerate(objects):
            relative = boxes / sizes[b].flip(0).repeat(2)
            own = {"class_labels": self.labels.to_model(labels), "boxes": centres(relative)}
            rows = slice(b, b + 1)  # in ``layers`` the batch is the second dimension
            image = {
                key: part[:, rows] if key == "layers" else part[rows] for key, part in raw.items()
            }
            try:
                losses.append(self.image_loss(image, [own], sizes.device))
            except ImportError as error:
                raise BoxcovError(
                    "the losses of transformers need more packages: pip install scipy pillow "
                    f"({error})"
                ) from None
        return torch.stack(losses)


def _at(candidates: Selection, index: Tensor) -> Selection:
    """Return some of the candidates, by their numbers or a mask."""
    frame, query = (t[index] for t in candidates.where)
    return Selection(frame, candidates.scores[index], candidates.labels[index], (frame, query))


def _sizes(images: Tensor) -> Tensor:
    """Return height and width (B, 2) of images (B, 3, h, w)."""
    return torch.tensor(images.shape[2:], device=images.device).expand(len(images), 2)


def in_pixels(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Convert normalized centres and sizes (m, 4) to x1 y1 x2 y2 in pixels.

    sizes: height and width (m, 2) of each image.
    """
    x, y, width, height = boxes.unbind(1)
    # The order of operations is that of transformers, so that boxes are equal bit for bit.
    corners = torch.stack([x - 0.5 * width, y - 0.5 * height, x + 0.5 * width, y + 0.5 * height], 1)
    return corners * sizes.flip(1).repeat(1, 2)
