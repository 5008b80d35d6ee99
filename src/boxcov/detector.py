"""The contract: what boxcov needs to know about a detector.

A detector is a network (``forward``), the choice of the reported instances (``select``) and a
differentiable map from raw outputs to boxes (``decode``). ``fit`` also needs the training loss of
each frame (``loss``) and the parts of the network (``parts``). Everything else is optional: a
detector that implements it is faster, or can do more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import pi
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from boxcov._torch.modules import shadow
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, join_names
from boxcov.head_stages import HeadStages, stage_instances
from boxcov.static_selection import FusedNetwork, StaticLimits, StaticSelection

SIGNAL_INPUTS = "signal inputs"
_SELECTION = "selection."  # start of names that decide only which boxes are reported
_SHOWN = 4  # differences in a message
_LONGEST = 1000  # characters of a value


@dataclass(frozen=True)
class Selection:
    """The m reported instances of a batch, chosen once, with the trained weights, and then fixed.

    >>> empty = torch.zeros(0, dtype=torch.long)
    >>> len(Selection(frame=empty, scores=torch.zeros(0), labels=empty, where=empty))
    0
    """

    frame: Tensor  # (m,) frame of the batch
    scores: Tensor  # (m,)
    labels: Tensor  # (m,) index into classes
    where: Any  # the detector's own index tensors (cell, task, level, query ...)

    def __len__(self) -> int:
        return int(self.scores.shape[0])

    def __repr__(self) -> str:
        where = type(self.where).__name__
        return f"{type(self).__name__}({len(self)} instances, where: {where})"


def check_selection(found: Any) -> None:
    """Raise unless ``select()`` returned m rows, with whole numbers as frames and labels.

    >>> check_selection((torch.zeros(2), torch.zeros(2)))
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: select() returns a tuple: return Selection(frame, scores, ...
    """
    problem = ""
    if not isinstance(found, Selection):
        problem = f"a {type(found).__name__}"
    else:
        shapes = {tuple(t.shape) for t in (found.frame, found.scores, found.labels)}
        if len(shapes) > 1 or len(found.scores.shape) != 1:
            problem = f"frames, scores and labels of the shapes {sorted(shapes)}"
        elif found.frame.is_floating_point() or found.labels.is_floating_point():
            problem = f"frames of {found.frame.dtype} and labels of {found.labels.dtype}"
    if problem:
        raise BoxcovError(
            f"select() returns {problem}: return Selection(frame, scores, labels, where), each of "
            "shape (m,), frames and labels as whole numbers"
        )


@dataclass(frozen=True, repr=False)
class Candidates(Selection):
    """All c instances above the score threshold, before NMS, as a selection.

    >>> two = torch.zeros(2, dtype=torch.long)
    >>> scores = torch.tensor([0.9, 0.8])
    >>> len(Candidates(two, scores, two, where=two, removed_by=torch.tensor([-1, 0])))
    2
    """

    removed_by: Tensor  # (c,) row in select(raw) of the best instance that suppresses it; -1: none


# (index, run): run() returns the boxes (g, D) of the instances ``index`` (g,). Every layer that it
# runs sees a batch of g items, one per instance.
InstanceGroup = tuple[Tensor, Callable[[], Tensor]]


class Detector(nn.Module, ABC):
    """A detector: subclass it, or wrap a model with ``boxcov.wrap``.

    ``boxcov.detectors.tiny`` is a complete example, and ``boxcov.check`` tests whether a detector
    keeps the contract. Inputs, raw outputs and targets are the detector's own: any pytree of
    tensors.
    """

    box_fields: tuple[str, ...]  # names of the D numbers of a box, e.g. x y z w l h yaw vx vy
    classes: tuple[str, ...]
    # Fields that wrap around, and their periods: differences are taken modulo the period.
    periods: ClassVar[Mapping[str, float]] = {"yaw": 2 * pi}

    # required

    @abstractmethod
    def forward(self, inputs: Any) -> Any:
        """Return the raw outputs. They depend on nothing but the inputs and the weights."""

    @abstractmethod
    def select(self, raw: Any) -> Selection:
        """Return the instances that are reported: score threshold, top-k, NMS."""

    @abstractmethod
    def decode(self, raw: Any, selection: Selection) -> Tensor:
        """Return the boxes (m, D) of the selected instances, differentiable in ``raw``."""

    @abstractmethod
    def loss(self, raw: Any, targets: Any) -> Tensor:
        """Return the training loss of each frame (B,), not their mean."""

    @abstractmethod
    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        """Return the parts of the network from output to input: "head", "neck", "backbone"."""

    # optional: what files are bound to

    def configuration(self) -> dict[str, str]:
        """Return what decides the boxes besides the weights, by name: a grid, an image size, NMS.

        A posterior, its error model and every result hold it; a posterior is refused where the
        detector's differs. Names that start with ``selection.`` decide only which boxes are
        reported: they bind the error model, but not the posterior.
        """
        fields, classes = " ".join(self.box_fields), _bounded(", ".join(self.classes))
        return {"box fields": fields, "classes": classes}

    # optional: faster, with the same result

    def instances(
        self, raw: Any, selection: Selection, with_logit: bool = False
    ) -> Iterable[InstanceGroup] | None:
        """Return the head run with one batch item per instance, or None if that is impossible.

        The groups ``(index, run)`` together contain every instance once. In ``run`` every layer
        sees g batch items, item i belonging to instance ``index[i]`` alone: the crop that a
        convolutional head sees, a RoI, a query. What the head reads must be part of ``raw``.
        Used by ``ExactGLM`` and ``MCI``. Its gradients are compared with those of ``decode`` on the
        first boxes, its boxes in every frame.

        with_logit: append the score logit to the D numbers of each box (g, D + 1). If the result
        is None then, ``ExactGLM(with_logit=True)`` runs one backward pass per box.

        By default the head's own modules run on crops, as ``stages`` describes them.
        """
        stages = type(self).stages(self, raw, selection)  # also if a check hides this object's
        return None if stages is None else stage_instances(stages, with_logit)

    def stages(self, raw: Any, selection: Selection) -> HeadStages | None:
        """Return a convolutional head as stages: ``ExactGLM`` evaluates all boxes at once.

        The covariances of the first boxes are compared with those that ``instances`` gives.
        """
        return None

    def static_part(self) -> Detector:
        """Return the part with fixed shapes, as a detector with the same weights and names.

        ``static_inputs`` computes what comes before it: the voxels of a point cloud, for example.
        Used by CUDA graphs and by ``boxcov.export.onnx``.
        """
        return self

    def static_inputs(self, inputs: Any) -> Tensor | None:
        """Return what ``static_part()`` reads: one tensor, and nothing else.

        ``static_part()(static_inputs(inputs))`` must equal ``self(inputs)``, bit for bit. On a GPU
        the static part then runs as a CUDA graph.
        """
        return None

    def fused_network(self, example: Any) -> FusedNetwork | None:
        """Return a faster form of the network, for ``boxcov.compile(fused=True)``.

        It has fixed shapes, larger than those that ``example`` needs.
        """
        return None

    # optional: more results

    def logits(self, raw: Any, selection: Selection) -> Tensor | None:
        """Return the score logit (m,) of each instance, differentiable in ``raw``.

        Used by ``with_logit=True``: the variance of the logit and its covariance with the box.
        """
        return None

    def signals(self, raw: Any, selection: Selection) -> dict[str, Tensor]:
        """Return named numbers (m,) per box that the network has already computed.

        For example raw outputs, the margin to the next class, the spread of a predicted
        distribution, the number of points in the box. The error model learns from them how far off
        a box may be. Every number is a finite float32 or float64 that depends on the box's own
        frame alone, and the names are the same for every input, also without boxes. Logarithms of
        positive numbers work best. ``boxcov.detectors.signals`` holds functions for common ones.
        """
        return {}

    def signal_inputs(self, inputs: Any) -> Tensor | None:
        """Return what ``signals`` needs of the inputs beyond the outputs of ``static_part()``.

        One tensor of fixed shape, such as a map of the points; ``signals`` finds it in ``raw``, a
        dict, under the key ``SIGNAL_INPUTS``. Only detectors with a static part need it.
        """
        return None

    def augment(self, inputs: Any, targets: Any, generator: torch.Generator) -> tuple[Any, Any]:
        """Return a copy of the inputs and targets, changed at random as in training.

        For example mirrored or turned; inputs and targets themselves stay as they are. The network
        should be as good on the copy as on the original. ``boxcov.calibrate`` learns from such
        copies, so that it needs fewer labelled frames. Without this method there are none.
        """
        return inputs, targets

    def candidates(self, raw: Any) -> Candidates | None:
        """Return all candidates of the NMS, and what removed each. Used by ``NMSSpread``."""
        return None

    def sample_targets(self, raw: Any, generator: torch.Generator) -> Any:
        """Return targets drawn from the predictive distribution. Used by ``fit(fisher="mc")``."""
        return None

    def select_static(self, raw: Any, limits: StaticLimits) -> StaticSelection | None:
        """Return what ``select`` reports of one frame, in a fixed number of rows.

        Used by ``boxcov.export.onnx``. No shape and no branch may depend on the values of ``raw``.
        """
        return None

    # provided

    def detect(self, inputs: Any) -> Detections:
        """Return boxes, scores and labels of the plain detector, without covariances.

        The detector runs in eval mode; its own mode stays as it is.

        >>> from boxcov.data import shapes
        >>> from boxcov.detectors.tiny import TinyCenter
        >>> inputs, _ = shapes.frames(count=1)[0]
        >>> TinyCenter().detect(inputs).boxes.shape[1]
        5
        """
        # the mode belongs to all threads: a shadow has its own
        detector = shadow(self) if any(each.training for each in self.modules()) else self
        with torch.no_grad():
            raw = detector(inputs)
            selection = detector.select(raw)
            return detector.detections(selection, detector.decode(raw, selection))

    def detections(self, selection: Selection, boxes: Tensor) -> Detections:
        """Return a selection and its boxes (m, D) as ``Detections``."""
        own = selection.scores, selection.labels, selection.frame
        return Detections(boxes, *own, tuple(self.box_fields), tuple(self.classes))


def check_type(value: Any) -> None:
    """Raise unless ``value`` is a ``Detector``."""
    if not isinstance(value, Detector):
        raise BoxcovError(
            f"expected a boxcov.Detector, got a {type(value).__name__}: boxcov.wrap makes one of a "
            "model, see docs/guide/your-detector.md"
        )


def part_modules(detector: Detector) -> dict[str, tuple[nn.Module, ...]]:
    """Return the modules of each part of ``detector.parts()``; raise if one is no module."""
    found = {}
    for part, value in detector.parts().items():
        entries = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        for entry in entries:
            if not isinstance(entry, nn.Module):
                raise no_module_error(detector, part, entry)
        found[part] = entries
    return found


def no_module_error(model: nn.Module, part: str, entry: Any) -> BoxcovError:
    """Return the error about an entry of a part that is no module of ``model``."""
    start, is_text = f"the part {part!r} names", isinstance(entry, str)
    for name, p in model.named_parameters():
        if entry is p or (is_text and entry == name):
            owner = name.rpartition(".")[0]
            holder = f"name {owner}, which holds it; FitOptions(exclude=[...]) excludes one weight"
            todo = holder if owner else "leave it out, it stays constant"
            return BoxcovError(f"{start} the parameter {name}, not a module: {todo}")
    children = join_names([name for name, _ in model.named_children()])
    what = repr(entry) if is_text else f"a {type(entry).__name__}"
    return BoxcovError(
        f"{start} {what}, which is not a module of the model: its children are {children}"
    )


# the configuration: a grid or an image size cannot be seen in the weights, so files name it


def flatten_configuration(values: Mapping[str, Any]) -> dict[str, str]:
    """Return nested values as texts, under names with dots.

    >>> flatten_configuration({"nms": "circle", "grid": {"range": (-54, 54.0)}})
    {'nms': 'circle', 'grid.range': '-54 54'}
    """
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            texts |= {f"{name}.{key}": text for key, text in flatten_configuration(value).items()}
        else:
            texts[name] = _text(value)
    return texts


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        is_nested = any(isinstance(item, (tuple, list)) for item in value)
        return _bounded((" | " if is_nested else " ").join(map(_text, value)))
    return _bounded(f"{value:.9g}" if type(value) in (int, float) else str(value))


def _bounded(text: str) -> str:
    """Return a text, or its hash if a file could not hold it: the names of a thousand classes."""
    digest = sha256(text.encode()).hexdigest()
    return text if len(text) <= _LONGEST else f"{text[:40]}... (SHA-256 {digest})"


def own_configuration(detector: Detector) -> dict[str, str]:
    """Return what a posterior depends on, without what boxcov 0.1 did not store."""
    common, network = Detector.configuration(detector), _of_network(detector.configuration())
    return {name: text for name, text in network.items() if name not in common}


def _of_network(configuration: Mapping[str, str]) -> dict[str, str]:
    """Everything but the selection."""
    return {name: text for name, text in configuration.items() if not name.startswith(_SELECTION)}


def check_configuration(saved: Mapping[str, str], current: Mapping[str, str], context: str) -> None:
    """Raise if a posterior was fitted under another configuration of the network."""
    if differences := configuration_differences(_of_network(saved), _of_network(current)):
        raise BoxcovError(
            f"{context}: this posterior was fitted under another configuration ({differences}): "
            "load the detector with that configuration, or fit a new posterior"
        )


def configuration_differences(saved: Mapping[str, str], current: Mapping[str, str]) -> str:
    """Return in words where two configurations differ; nothing if they are equal.

    >>> configuration_differences({"voxel_size": "0.1"}, {"voxel_size": "0.075"})
    'voxel_size was 0.1, is 0.075'
    """
    words = [
        f"{name} was {saved.get(name, 'not known')}, is {current.get(name, 'not known')}"
        for name in {**saved, **current}
        if saved.get(name) != current.get(name)
    ]
    more = [f"and {len(words) - _SHOWN} more"] if len(words) > _SHOWN else []
    return "; ".join(words[:_SHOWN] + more)
