"""Which weights are in the posterior."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from boxcov.detector import Detector
from boxcov.errors import BoxcovError, join_names

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def chosen_parameters(
    detector: Detector, depth: str | Sequence[str], fixed: Sequence[str] = ()
) -> dict[str, nn.Parameter]:
    """The parameters that ``depth`` means, by name: not those of norm layers (constants in eval mode), nor of the modules in ``fixed``.

    ``fixed`` may name single parameters, too, as one that the detector holds beside its modules.
    ``depth`` is a part of ``detector.parts()``, which means that part and all between it and the output, or a list of module names.

    >>> from boxcov.detectors.tiny import TinyCenter
    >>> list(chosen_parameters(TinyCenter(), ["head.shared.0"]))
    ['head.shared.0.weight']
    """
    if isinstance(fixed, str):
        raise BoxcovError(
            f"fixed must be a list of module names, got the string {fixed!r}: write fixed=[{fixed!r}]"
        )
    modules = _modules(detector, depth)
    constant = {id(p) for module in modules for p in _constants(module)}
    single = dict(detector.named_parameters())
    constant |= {id(single[name]) for name in fixed if name in single}
    constant |= {
        id(p)
        for name in fixed
        if name not in single
        for p in _module(detector, name, "fixed").parameters()
    }
    inside = {id(p) for module in modules for p in module.parameters()} - constant
    chosen = {name: p for name, p in detector.named_parameters() if id(p) in inside}
    if not chosen:
        raise BoxcovError(f"depth {depth!r} holds no weights that a posterior can be made of")
    return chosen


def _modules(detector: Detector, depth: str | Sequence[str]) -> list[nn.Module]:
    if not isinstance(depth, str):
        return [_module(detector, name, "depth") for name in depth]
    parts = detector.parts()
    if depth not in parts:
        raise BoxcovError(
            f"depth {depth!r} is not a part of this detector: it has {', '.join(parts)}; a list of module names is taken too"
        )
    modules: list[nn.Module] = []
    for name, part in parts.items():
        modules.extend([part] if isinstance(part, nn.Module) else part)
        if name == depth:
            break
    return modules


def _module(detector: Detector, name: str, argument: str) -> nn.Module:
    try:
        return detector.get_submodule(name)
    except AttributeError:
        near = [
            known
            for known, _ in detector.named_modules()
            if known and (name in known or known in name)
        ]
        hint = (
            f"did you mean {join_names(near, 4)}?"
            if near
            else "detector.named_modules() lists them"
        )
        raise BoxcovError(
            f"{argument} names the module {name!r}, which the detector does not have: {hint}"
        ) from None


def _constants(module: nn.Module) -> Iterable[nn.Parameter]:
    for child in module.modules():
        named = "Norm" in type(child).__name__ and not isinstance(
            child, (nn.Linear, nn.modules.conv._ConvNd)
        )
        if isinstance(child, _NORMS) or named:
            yield from child.parameters(recurse=False)
