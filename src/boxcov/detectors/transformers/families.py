"""DETR, YOLOS and RT-DETR: forward pass, detections and training loss of each family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from boxcov.detectors.labels import Labels
from boxcov.detectors.signals import softmax_logit
from boxcov.detectors.transformers.detector import Given, QueryDetector, Raw
from boxcov.errors import BoxcovError


def wrap(
    model: nn.Module,
    classes: Sequence[str] | Mapping[str, int] | None = None,
    threshold: float = 0.3,
    processor: Any = None,
) -> QueryDetector:
    """Make a Detector from a transformers model (``...ForObjectDetection``).

    classes: the classes to report, by name (``config.id2label``), or a dict from new names to the
    model's numbers; by default COCO's 80 if the model knows them, else all.
    threshold: score threshold.
    processor: an image processor of transformers; the detector then takes images.

    >>> wrap(nn.Linear(1, 1))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: a Linear is not supported: use Detr, Yolos, RTDetr, RTDetrV2
    """
    kind = next((FAMILIES[c.__name__] for c in type(model).__mro__ if c.__name__ in FAMILIES), None)
    if kind is None:
        raise BoxcovError(f"a {type(model).__name__} is not supported: use {KNOWN}")
    names: Mapping[int, str] = model.config.id2label  # type: ignore[assignment, union-attr]
    return kind(model, Labels.of(names, classes), threshold, processor)


class _Softmax(QueryDetector):
    """Softmax over all classes and, last, "no object": each query reports its best class."""

    background = -1

    def box_head(self, hidden: Tensor, *_: Any) -> Tensor:
        return self.model.bbox_predictor(hidden).sigmoid()

    def class_head(self, hidden: Tensor) -> Tensor:
        return self.model.class_labels_classifier(hidden)

    def report(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scores, number = logits.softmax(-1)[..., :-1].max(-1)
        place = torch.arange(number.numel(), device=logits.device)
        frame, query = place // number.shape[1], place % number.shape[1]
        return frame, query, number.flatten(), scores.flatten()

    def score_logit(self, logits: Tensor, number: Tensor) -> Tensor:
        return softmax_logit(logits, number)

    def heads(self, hidden: Tensor) -> Raw:
        """Return the outputs of the class and box heads for all queries."""
        logits, boxes = self.class_head(hidden), self.box_head(hidden)
        return {"hidden": hidden, "logits": logits, "boxes": boxes}

    def image_loss(self, raw: Raw, target: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        arguments = [raw["logits"], target, device, raw["boxes"], self.model.config]
        if (layers := raw.get("layers")) is not None:  # of each decoder layer: auxiliary losses
            arguments += [self.class_head(layers), self.box_head(layers)]
        return self.model.loss_function(*arguments)[0]


class Detr(_Softmax):
    """DETR. The query embeddings are not weights of a matrix product and stay constant."""

    def layer_boxes(self, raw: Raw, frame: Tensor, query: Tensor) -> Tensor | None:
        if "layers" not in raw:
            return None
        return self.box_head(raw["layers"][:, frame, query]).transpose(0, 1)

    def run(self, given: Given) -> Raw:
        mask = given.get("pixel_mask")
        out = self.model.model(given["pixel_values"], pixel_mask=mask, return_dict=True)
        raw = self.heads(out.last_hidden_state)
        if self.model.config.auxiliary_loss:
            raw["layers"] = out.intermediate_hidden_states
        return raw

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        inner = self.model.model
        return {
            "head": (self.model.class_labels_classifier, self.model.bbox_predictor),
            "neck": (inner.decoder, inner.encoder, inner.input_projection),
            "backbone": inner.backbone,
        }


class Yolos(_Softmax):
    """YOLOS, without a neck. Tokens and position embeddings stay constant.

    Auxiliary losses, which fail in transformers itself, are not used.
    """

    def run(self, given: Given) -> Raw:
        hidden = self.model.vit(given["pixel_values"], return_dict=True).last_hidden_state
        return self.heads(hidden[:, -self.model.config.num_detection_tokens :])

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        return {
            "head": (self.model.class_labels_classifier, self.model.bbox_predictor),
            "backbone": (self.model.vit.encoder.layer, self.model.vit.embeddings.patch_embeddings),
        }


class RTDetr(QueryDetector):
    """RT-DETR, both versions. Head: the class and box layers of the last decoder layer.

    A query's box is an update of the previous layer's box. The model detaches that box in training,
    but the result depends on it, and so does the derivative here. The loss is that of eval mode,
    without the denoising queries of training.
    """

    def run(self, given: Given) -> Raw:
        mask = given.get("pixel_mask")
        with _IgnoreDetach() as seen:
            out = self.model.model(given["pixel_values"], pixel_mask=mask, return_dict=True)
        boxes, logits = out.intermediate_reference_points, out.intermediate_logits
        before = seen.part(boxes, -2) if boxes.shape[1] > 1 else out.init_reference_points.sigmoid()
        return {
            "hidden": out.last_hidden_state,
            "before": before,
            "logits": logits[:, -1],
            "boxes": boxes[:, -1],
            "all_logits": logits,
            "all_boxes": boxes,
            "encoder_logits": out.enc_topk_logits,
            "encoder_boxes": out.enc_topk_bboxes,
        }

    def layer_boxes(self, raw: Raw, frame: Tensor, query: Tensor) -> Tensor:
        return raw["all_boxes"][frame, :, query]

    def box_head(self, hidden: Tensor, raw: Raw, frame: Tensor, query: Tensor) -> Tensor:
        p = raw["before"][frame, query].clamp(0, 1)
        step: Tensor = self.model.model.decoder.bbox_embed[-1](hidden)
        return torch.sigmoid(step + (p.clamp(min=1e-5) / (1 - p).clamp(min=1e-5)).log())

    def class_head(self, hidden: Tensor) -> Tensor:
        return self.model.model.decoder.class_embed[-1](hidden)

    def report(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the Q best pairs of query and class; a query may occur twice."""
        batch, queries, classes = logits.shape
        scores, pair = logits.sigmoid().flatten(1).topk(queries, dim=1)
        frame = torch.arange(batch, device=logits.device).repeat_interleave(queries)
        return frame, (pair // classes).flatten(), (pair % classes).flatten(), scores.flatten()

    def score_logit(self, logits: Tensor, number: Tensor) -> Tensor:
        return logits.gather(1, number.unsqueeze(1))[:, 0]

    def image_loss(self, raw: Raw, target: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        last = (raw["logits"], target, device, raw["boxes"], self.model.config)
        first = {"enc_topk_logits": raw["encoder_logits"], "enc_topk_bboxes": raw["encoder_boxes"]}
        return self.model.loss_function(*last, raw["all_logits"], raw["all_boxes"], **first)[0]

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        inner, decoder = self.model.model, self.model.model.decoder
        later = (decoder.layers, decoder.query_pos_head)
        later += (*decoder.class_embed[:-1], *decoder.bbox_embed[:-1])
        first = (inner.enc_output, inner.enc_score_head, inner.enc_bbox_head)
        return {
            "head": (decoder.class_embed[-1], decoder.bbox_embed[-1]),
            "neck": (*later, *first, inner.decoder_input_proj, inner.encoder),
            "backbone": (inner.encoder_input_proj, inner.backbone),
        }


class _IgnoreDetach(TorchFunctionMode):
    """Ignore detach() while active: the model's output depends on what it detaches in training.

    The mode also remembers the parts of stacked tensors. Through the stack, the boxes of one layer
    would seem to depend on the heads of all layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stacked: list[tuple[Tensor, list[Tensor]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func is torch.stack and args:
            self._stacked.append((out, list(args[0])))
        return out

    def part(self, whole: Tensor, layer: int) -> Tensor:
        """Return the part of one layer in a tensor stacked along the second dimension."""
        parts = (parts[layer] for stack, parts in self._stacked if stack is whole)
        return next(parts, whole[:, layer])


FAMILIES: dict[str, type[QueryDetector]] = {
    "DetrForObjectDetection": Detr,
    "YolosForObjectDetection": Yolos,
    "RTDetrForObjectDetection": RTDetr,
    "RTDetrV2ForObjectDetection": RTDetr,
}
KNOWN = ", ".join(name.removesuffix("ForObjectDetection") for name in FAMILIES)
