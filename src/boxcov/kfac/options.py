"""What a fit covers: its options, and the parameters and layers that its arguments name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from boxcov.detector import Detector
from boxcov.errors import BoxcovError, check_choice, join_names
from boxcov.posterior.posterior import Form, Locations

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
_WRAPPED = "model."  # the names of a model inside boxcov.wrap begin with it
NonFinite = Literal["error", "skip"]
FrameWeight = Callable[[Any], Any]  # from the targets of a batch to the weights (B,) of its frames


@dataclass(frozen=True)
class FitOptions:
    """Options of ``boxcov.fit``.

    exclude: names of modules or parameters to keep constant.
    fraction: share of the items to use, drawn with ``seed``.
    seed: random seed of the drawn items and, for ``fisher="mc"``, of the drawn targets.
    ekfac: correct the eigenvalues by a second pass over the frames, see ``boxcov.kfac.ekfac``.
    locations: "all" weights all locations equally in the input factor Q; "gradient" weights each
        by its squared gradient, because the box loss has a gradient at few cells only.
    form: "eigen" is ``(n F + tau I)^-1``; "paper" is ``Q^-1 (x) H^-1`` with ``jitter``.
    jitter: added to each factor of the form "paper", relative to its mean eigenvalue.
    nonfinite: "error" stops at an item with NaN or infinite inputs, loss or gradients; "skip"
        leaves it out and counts it.
    frame_weight: function from the targets of an item to a weight for the loss of each frame, for
        example the number of objects that the loss was divided by.

    >>> FitOptions(fraction=0.1, ekfac=True).locations
    'all'
    """

    exclude: Sequence[str] = ()
    fraction: float = 1.0
    seed: int = 0
    ekfac: bool = False
    locations: Locations = "all"
    form: Form = "eigen"
    jitter: float = 1e-6
    nonfinite: NonFinite = "error"
    frame_weight: FrameWeight | None = None

    def __post_init__(self) -> None:
        check_choice("form", self.form, Form)
        check_choice("locations", self.locations, Locations)
        check_choice("nonfinite", self.nonfinite, NonFinite)
        if not 0 < self.fraction <= 1:
            raise BoxcovError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        if self.ekfac and self.form == "paper":
            raise BoxcovError("ekfac needs form='eigen': the paper's form is Q^-1 (x) H^-1")


def select_parameters(
    detector: Detector, depth: str | Sequence[str], exclude: Sequence[str] = ()
) -> dict[str, nn.Parameter]:
    """Return the parameters of ``depth`` by name, without those of norm layers.

    depth: a part of ``detector.parts()``, which means this part and all parts between it and the
        output, or a list of module names.
    exclude: names of modules or parameters to leave out. The leading ``model.`` of a wrapped
        model's names may be left out, here and in ``depth``.

    >>> from boxcov.detectors.tiny import TinyCenter
    >>> list(select_parameters(TinyCenter(), ["head.shared.0"]))
    ['head.shared.0.weight']
    """
    if isinstance(exclude, str):
        raise BoxcovError(
            f"exclude must be a list of module names, got the string {exclude!r}: "
            f"write exclude=[{exclude!r}]"
        )
    modules = _modules(detector, depth)
    parameters = dict(detector.named_parameters())
    constant = {id(p) for module in modules for p in _norm_parameters(module)}
    for name in exclude:
        own = parameters.get(name, parameters.get(f"{_WRAPPED}{name}"))
        if own is not None:
            constant.add(id(own))
        else:
            constant |= {id(p) for p in _module(detector, name, "exclude").parameters()}
    inside = {id(p) for module in modules for p in module.parameters()} - constant
    selected = {name: p for name, p in parameters.items() if id(p) in inside}
    if not selected:
        raise BoxcovError(f"depth {depth!r} has no weights for a posterior")
    return selected


def _modules(detector: Detector, depth: str | Sequence[str]) -> list[nn.Module]:
    if not isinstance(depth, str):
        return [_module(detector, name, "depth") for name in depth]
    parts = detector.parts()
    if depth not in parts:
        raise BoxcovError(
            f"depth {depth!r} is not a part of this detector: it has {', '.join(parts)}; "
            "a list of module names is accepted too"
        )
    modules: list[nn.Module] = []
    for name, part in parts.items():
        modules.extend([part] if isinstance(part, nn.Module) else part)
        if name == depth:
            break
    return modules


def _module(detector: Detector, name: str, argument: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(detector.named_modules(remove_duplicate=False))
    found = modules.get(name, modules.get(f"{_WRAPPED}{name}"))
    if found is None:
        similar = [known for known in modules if known and (name in known or known in name)]
        hint = "detector.named_modules() lists them"
        if similar:
            hint = f"did you mean {join_names(similar, 4)}?"
        raise BoxcovError(
            f"{argument} names the module {name!r}, which the detector does not have: {hint}"
        )
    return found


def _norm_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of norm layers, which are constants in eval mode."""
    for child in module.modules():
        by_name = "Norm" in type(child).__name__ and not isinstance(
            child, (nn.Linear, nn.modules.conv._ConvNd)
        )
        if isinstance(child, _NORMS) or by_name:
            yield from child.parameters(recurse=False)
