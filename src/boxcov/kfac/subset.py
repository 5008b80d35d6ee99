"""The subset of the detector's parameters that a posterior is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from boxcov.detector import Detector, part_modules
from boxcov.errors import BoxcovError, join_names

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
_WRAPPED = "model."  # the names of a model inside boxcov.wrap begin with it


def select_parameters(
    detector: Detector, depth: str | Sequence[str], exclude: Sequence[str] = ()
) -> dict[str, nn.Parameter]:
    """Return the parameters of ``depth`` by name, without those of norm layers.

    depth: a part of ``detector.parts()``, which means this part and all parts between it and the
        output, or a list of module names.
    exclude: names of modules or parameters to leave out. The leading ``model.`` of a wrapped
        model's names may be left out, here and in ``depth``.
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
    parts = part_modules(detector)
    if depth not in parts:
        raise BoxcovError(
            f"depth {depth!r} is not a part of this detector: it has {', '.join(parts)}; "
            "a list of module names is accepted too"
        )
    modules: list[nn.Module] = []
    for name, part in parts.items():
        modules.extend(part)
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
    """Yield scales and shifts of norm layers: KFAC covers linear layers and convolutions."""
    for child in module.modules():
        by_name = "Norm" in type(child).__name__ and not isinstance(
            child, (nn.Linear, nn.modules.conv._ConvNd)
        )
        if isinstance(child, _NORMS) or by_name:
            yield from child.parameters(recurse=False)
