"""The parameters that a posterior is over, and the loss of each frame as a function of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from boxcov._torch.modules import fresh, shadow
from boxcov.detector import Detector, part_modules
from boxcov.errors import BoxcovError, NotFiniteFrameError, counted, join_names

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


class FrameLosses:
    """Runs a shadow of the detector in which only the posterior's parameters require gradients.

    The parameters of the shadow are aliases: the detector's own ``requires_grad`` flags stay as
    they are, and no autograd graph is built before the first layer of the posterior.

    sample_seed: if given, targets are sampled from the detector's predictive distribution.
    """

    def __init__(
        self,
        detector: Detector,
        parameters: Mapping[str, nn.Parameter],
        sample_seed: int | None = None,
    ) -> None:
        everything = dict(detector.named_parameters())
        aliases = {
            name: nn.Parameter(p.detach(), requires_grad=name in parameters)
            for name, p in everything.items()
            if p.is_floating_point()
        }
        self.parameters = parameters
        self.aliases = {name: aliases[name] for name in parameters}
        self.detector = shadow(
            detector, {id(p): aliases[name] for name, p in everything.items() if name in aliases}
        )
        self.device = next(iter(parameters.values())).device
        self.sample_seed = sample_seed

    def raw(self, inputs: Any) -> Any:
        """Return the raw outputs; ``inputs`` are copied, because forward may change them."""
        return self.detector(fresh(inputs))

    def compute(self, raw: Any, inputs: Any, targets: Any, number: int) -> Tensor:
        """Return the checked loss of each frame (B,) of item ``number``.

        ``targets`` are copied, because loss() may change them.
        """
        most = most_frames(inputs, targets)
        if self.sample_seed is not None:
            seed = 1_000_003 * self.sample_seed + number  # does not depend on the items before
            generator = torch.Generator(self.device).manual_seed(seed)
            targets = _sample_targets(self.detector, raw, generator)
        losses = _frame_losses(self.detector, raw, fresh(targets), number)
        if most is not None and len(losses) > most:
            raise BoxcovError(
                f"loss() returned {len(losses)} values for item {number}, which has {most} frames: "
                "return the sum over each frame's locations or boxes, shape (B,)"
            )
        are_batches = isinstance(inputs, (Tensor, list)) and isinstance(targets, (Tensor, list))
        if are_batches and len(inputs) == len(targets) > len(losses):
            raise BoxcovError(
                f"loss() returned {counted(len(losses), 'value')} for item {number}, which has "
                f"{len(targets)} frames: return one value per frame, shape (B,); a mean over "
                "the batch hides the gradients of the frames"
            )
        return losses


def _frame_losses(detector: Detector, raw: Any, targets: Any, number: int) -> Tensor:
    try:
        losses = detector.loss(raw, targets)
    except (BoxcovError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BoxcovError(
            f"the targets of item {number} do not fit the detector: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not len(losses):
        form = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise BoxcovError(
            f"loss() must return one value per frame, shape (B,), got {form}: "
            "a mean over the batch hides the gradients of the frames"
        )
    if not bool(losses.isfinite().all()):
        bad = [i for i, ok in enumerate(losses.isfinite().tolist()) if not ok]
        raise NotFiniteFrameError(
            f"the loss of item {number} is {losses[bad[0]].item()} in its frame {bad[0]}: "
            "its inputs or targets hold a NaN, an infinity or a value out of range"
        )
    if not losses.requires_grad:
        raise BoxcovError(
            f"the loss of item {number} has no gradient for any chosen layer: does loss() detach "
            "its inputs, or does forward() run under no_grad or a reentrant checkpoint?"
        )
    return losses


def _sample_targets(detector: Detector, raw: Any, generator: torch.Generator) -> Any:
    with torch.no_grad():
        targets = detector.sample_targets(raw, generator)
    if targets is None:
        raise BoxcovError(
            f'fisher="mc" samples targets, but {type(detector).__name__} has no method '
            'sample_targets(raw, generator): add it, or use fisher="empirical" with labelled frames'
        )
    return targets


def most_frames(inputs: Any, targets: Any) -> int | None:
    """Return an upper bound of the number of frames of a batch, or None if it is unknown.

    It is read from the first dimension of tensors and the length of lists. A list of inputs may
    hold one entry per frame or the parts of one input: it counts only with a list of targets.
    """
    if isinstance(inputs, Mapping):
        known = [value for value in inputs.values() if isinstance(value, (Tensor, list))]
    elif isinstance(inputs, Tensor) or (
        isinstance(inputs, list) and isinstance(targets, (Tensor, list))
    ):
        known = [inputs]
    else:
        return None
    counts = [
        len(each)
        for each in (*known, targets)
        if isinstance(each, list) or (isinstance(each, Tensor) and each.dim())
    ]
    return max(counts, default=None) if known else None
