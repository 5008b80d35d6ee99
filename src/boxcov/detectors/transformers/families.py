"""How the models of each family run, what they report and what they were trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from boxcov.detectors.labels import Labels
from boxcov.detectors.scores import softmax_logit
from boxcov.detectors.transformers.detector import Given, QueryDetector, Raw
from boxcov.errors import BoxcovError


def wrap(
    model: nn.Module,
    classes: Sequence[str] | Mapping[str, int] | None = None,
    threshold: float = 0.3,
    processor: Any = None,
) -> QueryDetector:
    """A model of transformers as boxcov sees it: DETR, YOLOS, RT-DETR or its second version, ``...ForObjectDetection``.

    classes: those to report, by the model's names (``config.id2label``), or own names with the model's numbers; COCO's 80 where the model knows
    them, else all of the model's, unless given. threshold: on the score.
    processor: an image processor of transformers, for a detector that takes images as ``boxcov.data.coco`` gives them.

    >>> wrap(nn.Linear(1, 1))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: a Linear is no detector that boxcov knows: there are Detr, Yolos, RTDetr, RTDetrV2, each ...ForObjectDetection
    """
    kind = next((FAMILIES[c.__name__] for c in type(model).__mro__ if c.__name__ in FAMILIES), None)
    if kind is None:
        raise BoxcovError(
            f"a {type(model).__name__} is no detector that boxcov knows: there are {KNOWN}"
        )
    names: Mapping[int, str] = model.config.id2label  # type: ignore[assignment, union-attr]
    return kind(model, Labels.of(names, classes), threshold, processor)


class _Softmax(QueryDetector):
    """Logits of all classes and, last, of no object: a query reports its best class; the box is a function of its hidden state alone."""

    def box_head(self, hidden: Tensor, raw: Raw, frame: Tensor, query: Tensor) -> Tensor:
        boxes: Tensor = self.model.bbox_predictor(hidden).sigmoid()
        return boxes

    def class_head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.class_labels_classifier(hidden)
        return logits

    def found(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scores, number = logits.softmax(-1)[..., :-1].max(-1)
        frame, query = torch.ones_like(number).nonzero(as_tuple=True)
        return frame, query, number[frame, query], scores[frame, query]

    def score_logit(self, logits: Tensor, number: Tensor) -> Tensor:
        return softmax_logit(logits, number)

    def heads(self, hidden: Tensor) -> Raw:
        """As the model itself runs them, on all queries."""
        return {
            "hidden": hidden,
            "logits": self.class_head(hidden),
            "boxes": self.model.bbox_predictor(hidden).sigmoid(),
        }

    def image_loss(self, raw: Raw, target: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        layers = raw.get(
            "layers"
        )  # of each layer of the decoder, where the model is trained with losses on all of them
        others = (
            ()
            if layers is None
            else (self.class_head(layers), self.model.bbox_predictor(layers).sigmoid())
        )
        loss: Tensor = self.model.loss_function(
            raw["logits"], target, device, raw["boxes"], self.model.config, *others
        )[0]
        return loss


class Detr(_Softmax):
    """DETR. Head: the class layer and the box layers. The queries' embeddings are no matrix of a product and stay constants."""

    def run(self, given: Given) -> Raw:
        out = self.model.model(
            given["pixel_values"], pixel_mask=given.get("pixel_mask"), return_dict=True
        )
        layers = (
            {"layers": out.intermediate_hidden_states} if self.model.config.auxiliary_loss else {}
        )
        return {**self.heads(out.last_hidden_state), **layers}

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        inner = self.model.model
        return {
            "head": (self.model.class_labels_classifier, self.model.bbox_predictor),
            "neck": (inner.decoder, inner.encoder, inner.input_projection),
            "backbone": inner.backbone,
        }


class Yolos(_Softmax):
    """YOLOS: no neck. Its tokens and position embeddings stay constants. Losses on inner layers, broken in transformers, are left out."""

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

    A query's box is a step from the box of the layer before. The model detaches that one in training; the box depends on it all the same, and
    here so does its derivative. The loss is that of the model in eval mode, without the noisy queries that training adds.
    """

    def run(self, given: Given) -> Raw:
        with _Attached() as seen:
            out = self.model.model(
                given["pixel_values"], pixel_mask=given.get("pixel_mask"), return_dict=True
            )
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

    def box_head(self, hidden: Tensor, raw: Raw, frame: Tensor, query: Tensor) -> Tensor:
        p = raw["before"][frame, query].clamp(0, 1)
        step: Tensor = self.model.model.decoder.bbox_embed[-1](hidden)
        return torch.sigmoid(step + (p.clamp(min=1e-5) / (1 - p).clamp(min=1e-5)).log())

    def class_head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.model.decoder.class_embed[-1](hidden)
        return logits

    def found(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The best pairs of query and class, as many as there are queries: a query may be there twice."""
        batch, queries, classes = logits.shape
        scores, pair = logits.sigmoid().flatten(1).topk(queries, dim=1)
        frame = torch.arange(batch, device=logits.device).repeat_interleave(queries)
        return frame, (pair // classes).flatten(), (pair % classes).flatten(), scores.flatten()

    def score_logit(self, logits: Tensor, number: Tensor) -> Tensor:
        return logits.gather(1, number.unsqueeze(1))[:, 0]

    def image_loss(self, raw: Raw, target: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        loss: Tensor = self.model.loss_function(
            raw["logits"],
            target,
            device,
            raw["boxes"],
            self.model.config,
            raw["all_logits"],
            raw["all_boxes"],
            enc_topk_logits=raw["encoder_logits"],
            enc_topk_bboxes=raw["encoder_boxes"],
        )[0]
        return loss

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        inner, decoder = self.model.model, self.model.model.decoder
        earlier = (*decoder.class_embed[:-1], *decoder.bbox_embed[:-1])
        first = (inner.enc_output, inner.enc_score_head, inner.enc_bbox_head)
        return {
            "head": (decoder.class_embed[-1], decoder.bbox_embed[-1]),
            "neck": (
                decoder.layers,
                decoder.query_pos_head,
                *earlier,
                *first,
                inner.decoder_input_proj,
                inner.encoder,
            ),
            "backbone": (inner.encoder_input_proj, inner.backbone),
        }


class _Attached(TorchFunctionMode):
    """While active nothing is detached: what a model cuts off to train better is part of the function that it computes.

    It also knows the parts of what was stacked: seen through the stack, the boxes of one layer would seem to depend on the heads of all.
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
        """One layer's of what is stacked in the second dimension."""
        return next(
            (parts[layer] for stack, parts in self._stacked if stack is whole), whole[:, layer]
        )


FAMILIES: dict[str, type[QueryDetector]] = {
    "DetrForObjectDetection": Detr,
    "YolosForObjectDetection": Yolos,
    "RTDetrForObjectDetection": RTDetr,
    "RTDetrV2ForObjectDetection": RTDetr,
}
KNOWN = f"{', '.join(name.removesuffix('ForObjectDetection') for name in FAMILIES)}, each ...ForObjectDetection"
