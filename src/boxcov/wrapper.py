"""``wrap``: make a Detector from a model and a few functions, or from a model of a library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from boxcov._torch.process_state import at_least_float32
from boxcov.detector import (
    Candidates,
    Detector,
    InstanceGroup,
    Selection,
    flatten_configuration,
    no_module_error,
)
from boxcov.errors import BoxcovError, join_names
from boxcov.head_stages import HeadStages
from boxcov.static_selection import StaticLimits, StaticSelection

Part = nn.Module | str | Sequence[nn.Module | str]
"""A part of the model: a module, a module's name, or a sequence of these."""


def wrap(
    model: nn.Module,
    *,
    select: Callable[[Any, Any], Selection] | None = None,
    decode: Callable[[Any, Any, Selection], Tensor] | None = None,
    loss: Callable[[Any, Any, Any], Tensor] | None = None,
    parts: Mapping[str, Part] | None = None,
    box_fields: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    periods: Mapping[str, float] | None = None,
    instances: Callable[..., Iterable[InstanceGroup] | None] | None = None,
    stages: Callable[[Any, Any, Selection], HeadStages | None] | None = None,
    logits: Callable[[Any, Any, Selection], Tensor | None] | None = None,
    signals: Callable[[Any, Any, Selection], dict[str, Tensor]] | None = None,
    augment: Callable[[Any, Any, Any, torch.Generator], tuple[Any, Any]] | None = None,
    candidates: Callable[[Any, Any], Candidates | None] | None = None,
    sample_targets: Callable[[Any, Any, torch.Generator], Any] | None = None,
    select_static: Callable[[Any, Any, StaticLimits], StaticSelection | None] | None = None,
    configuration: Mapping[str, Any] | None = None,
) -> Detector:
    """Make a ``Detector`` from ``model`` and functions.

    A model of torchvision, transformers or Ultralytics needs no functions: ``wrap(YOLO(...))``
    is ``boxcov.detectors.ultralytics.wrap``, which has more options. Every other model needs
    ``select``, ``decode``, ``loss``, ``parts``, ``box_fields`` and ``classes``.

    Each function is a method of the contract with the model in place of ``self``:
    ``decode(model, raw, selection)``, ``loss(model, raw, targets)`` and so on. Methods of the
    model's class work, too: ``loss=MyModel.loss``. Use the model that is passed in, not one from
    an enclosing scope: boxcov works on a shadow of it.

    forward: ``forward(model, inputs)``; by default ``model(inputs)``.
    parts: from the output ("head") to the input; modules, their names, or sequences of these.
    periods: the period of each field that wraps around; by default 2 pi for yaw.
    configuration: values by name that decide the boxes besides the weights, for example
    ``{"image size": 416, "selection": {"threshold": 0.3}}``; a posterior of other values is
    refused, see ``Detector.configuration``.
    instances: ``instances(model, raw, selection)`` or, to offer the score logit as well,
    ``instances(model, raw, selection, with_logit)``.
    The other functions are optional and documented in ``boxcov.Detector``. Run ``boxcov.check``
    on the result.

    >>> def select(model, raw):
    ...     score, cell = raw[:, 0].sigmoid().max(1)  # the best cell of each frame
    ...     frame = torch.arange(len(raw))
    ...     return Selection(frame, score, torch.zeros_like(frame), (frame, cell))
    >>> detector = wrap(
    ...     nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 2, 1)),
    ...     select=select,
    ...     decode=lambda model, raw, sel: raw[sel.where[0], 1, sel.where[1]].exp()[:, None],
    ...     loss=lambda model, raw, targets: (raw[:, 1] - targets).square().sum(1),
    ...     parts={"head": "2", "backbone": "0"},
    ...     box_fields=("length",),
    ...     classes=("thing",),
    ... ).eval()
    >>> detector.detect(torch.zeros(3, 2, 8)).boxes.shape
    torch.Size([3, 1])
    """
    if not isinstance(model, nn.Module):
        raise BoxcovError(
            f"wrap takes a torch.nn.Module, got a {type(model).__name__}: wrap the network in one"
        )
    given = {
        "forward": forward,
        "select": select,
        "decode": decode,
        "loss": loss,
        "instances": instances,
        "stages": stages,
        "logits": logits,
        "signals": signals,
        "augment": augment,
        "candidates": candidates,
        "sample_targets": sample_targets,
        "select_static": select_static,
    }
    values = {"box_fields": box_fields, "periods": periods, "configuration": configuration}
    needed: dict[str, Any] = {"select": select, "decode": decode, "loss": loss, "parts": parts}
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    library = packages & {"torchvision", "transformers", "ultralytics"}
    if library and not any(value is not None for value in needed.values()):
        name = library.pop()
        if extra := [f"{key}=" for key, v in {**given, **values}.items() if v is not None]:
            raise BoxcovError(
                f"wrap takes no {join_names(extra)} for a model of {name} alone: leave it out, or "
                "give select=, decode=, loss= and parts= as well"
            )
        return import_module(f"boxcov.detectors.{name}").wrap(model, classes=classes)
    needed |= {"box_fields": box_fields, "classes": classes}
    missing = [f"{name}=" for name, value in needed.items() if value is None]
    if parts is None or box_fields is None or classes is None or missing:
        raise BoxcovError(
            f"to wrap a {type(model).__name__}, give {join_names(missing)}: see "
            "docs/guide/your-detector.md. Only models of torchvision, transformers and Ultralytics "
            "need none of them"
        )
    own: dict[str, Any] = {
        name: _method(name, _check_function(name, f, model))
        for name, f in given.items()
        if f is not None
    }
    fields = _names("box_fields", box_fields)
    own |= {"box_fields": fields, "classes": _names("classes", classes)}
    if periods is not None:
        if unknown := sorted(set(periods) - set(fields)):
            known = ", ".join(fields)
            raise BoxcovError(f"periods of {join_names(unknown)}, but the box fields are {known}")
        own["periods"] = dict(periods)
    own["_own_configuration"] = flatten_configuration(configuration or {})
    # A class of its own: boxcov asks the class which optional methods a detector has.
    kind = type(f"Wrapped{type(model).__name__}", (Wrapped,), own)
    return kind(model, _part_names(model, parts))


class Wrapped(Detector):
    """A detector made by ``wrap``, without the methods that call a function of the user's."""

    _own_configuration: Mapping[str, str]

    def __init__(self, model: nn.Module, parts: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._part_names = dict(parts)

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs)

    def signals(self, raw: Any, selection: Selection) -> dict[str, Tensor]:
        """Return the score logit if it is known."""
        logit = self.logits(raw, selection)
        return {} if logit is None else {"logit": at_least_float32(logit)}

    def configuration(self) -> dict[str, str]:
        return {**super().configuration(), **self._own_configuration}

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        return {
            part: tuple(self.model.get_submodule(name) for name in names)
            for part, names in self._part_names.items()
        }

    def extra_repr(self) -> str:
        return f"boxes {' '.join(self.box_fields)} of {join_names(self.classes)}"


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls the user's function with the model in place of ``self``."""

    def method(self: Wrapped, *args: Any, **options: Any) -> Any:
        return function(self.model, *args, **options)

    def instances(self: Wrapped, raw: Any, selection: Selection, with_logit: bool = False) -> Any:
        return None if with_logit else function(self.model, raw, selection)

    if name != "instances":
        return method
    try:
        return method if "with_logit" in inspect.signature(function).parameters else instances
    except ValueError:  # a builtin does not list its arguments
        return instances


def _check_function(name: str, function: Any, model: nn.Module) -> Callable[..., Any]:
    """Check a function and return it in the form in which it will be called."""
    signature = inspect.signature(getattr(Detector, name))  # of the contract
    arguments = [word for word in signature.parameters if word not in ("self", "with_logit")]
    expected = f"{name}({', '.join(['model', *arguments])})"
    if not callable(function):
        raise BoxcovError(f"{name} must be a function {expected}, got a {type(function).__name__}")
    if isinstance(function, MethodType) and function.__self__ is model:
        function = function.__func__  # the model is passed explicitly
    owner = function.__self__ if isinstance(function, MethodType) else function
    if isinstance(owner, nn.Module):
        raise BoxcovError(
            f"{name} is bound to another module, but boxcov works on a shadow of the model: "
            f"write a function {expected} that reaches the module through the model"
        )
    try:
        inspect.signature(function).bind(model, *arguments)
    except TypeError as error:
        raise BoxcovError(f"{name} must be a function {expected}: {error}") from None
    except ValueError:
        pass  # a builtin without a signature
    if inspect.isfunction(function):
        inside = {id(module) for module in model.modules()}
        read = inspect.getclosurevars(function)
        around = {**read.globals, **read.nonlocals}
        if names := sorted(key for key, value in around.items() if id(value) in inside):
            raise BoxcovError(
                f"{name} reads {join_names(names)} from an enclosing scope, but boxcov works on a "
                f"shadow of the model: use the model that is passed in, {expected}"
            )
    return function


def _names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise BoxcovError(
            f"{argument} must be a sequence of names, got the string {names!r}: "
            f"write {argument}={tuple(names.split())!r}"
        )
    names = tuple(names)
    are_texts = all(isinstance(name, str) for name in names)
    if not names or not are_texts or len(set(names)) < len(names):
        raise BoxcovError(f"{argument} must be distinct names, at least one, got {names!r}")
    return names


def _part_names(model: nn.Module, parts: Mapping[str, Part]) -> dict[str, tuple[str, ...]]:
    """Each part as module names, so that a shadow of the model has the same parts."""
    if not isinstance(parts, Mapping) or not parts:
        raise BoxcovError(
            f"parts must name the modules of the head, the neck, the backbone: "
            f"parts={{'head': ...}}, got {parts!r}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for part, value in parts.items():
        is_one = isinstance(value, (str, nn.Module)) or not isinstance(value, Sequence)
        own, entries = [], cast(Any, [value] if is_one else value)
        for entry in entries:
            name = names.get(id(entry), entry)
            if isinstance(name, str) and name not in modules:
                name = name.removeprefix("model.")  # as the detector names it
            if not isinstance(name, str) or name not in modules:
                raise no_module_error(model, part, name)
            own.append(name)
        found[part] = tuple(own)
    return found
