"""The parameters that a posterior is over, and the loss of each frame as a function of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from boxcov._torch.modules import fresh, shadow
from boxcov._torch.process_state import item_seed
from boxcov.detector import Detector, part_modules
from boxcov.errors import BoxcovError, NotFiniteFrameError, counted, join_names

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)  # whose weights a posterior can hold
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
    parameters = dict(detector.named_parameters())
    modules = _modules(detector, depth)
    inside = {id(p) for module in modules for p in module.parameters() if p.is_floating_point()}
    norms = [child for module in modules for child in module.modules() if _is_norm(child)]
    inside -= {id(p) for norm in norms for p in norm.parameters(recurse=False)}
    for name in exclude:
        own = parameters.get(name, parameters.get(f"{_WRAPPED}{name}"))
        out = _module(detector, name, "exclude").parameters() if own is None else [own]
        inside -= {id(p) for p in out}
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
    last = list(parts).index(depth)
    return [module for part in list(parts.values())[: last + 1] for module in part]


def _module(detector: Detector, name: str, argument: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(detector.named_modules(remove_duplicate=False))
    found = modules.get(name, modules.get(f"{_WRAPPED}{name}"))
    if found is None:
        similar = [known for known in modules if known and (name in known or known in name)]
        hint = (
            f"did you mean {join_names(similar, 4)}?" if similar else "named_modules() lists them"
        )
        raise BoxcovError(
            f"{argument} names the module {name!r}, which the detector does not have: {hint}"
        )
    return found


def _is_norm(module: nn.Module) -> bool:
    is_named_so = "Norm" in type(module).__name__ and not isinstance(module, LAYERS)
    return is_named_so or isinstance(module, _NORMS)


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
        chosen = {id(p) for p in parameters.values()}
        aliases = {
            id(p): nn.Parameter(p.detach(), requires_grad=id(p) in chosen)
            for p in detector.parameters()
            if p.is_floating_point()
        }
        self.parameters = parameters
        self.aliases = {name: aliases[id(p)] for name, p in parameters.items()}
        self.detector = shadow(detector, aliases)
        self.device = next(iter(parameters.values())).device
        self.sample_seed = sample_seed

    def raw(self, inputs: Any) -> Any:
        """Return the raw outputs; ``inputs`` are copied, because forward may change them."""
        return self.detector(fresh(inputs))

    def compute(self, raw: Any, inputs: Any, targets: Any, number: int) -> Tensor:
        """Return the checked loss of each frame (B,); loss() gets a copy of ``targets``."""
        most = most_frames(inputs, targets)
        if self.sample_seed is not None:
            targets = self._sample_targets(raw, self.sample_seed, number)
        losses = _frame_losses(self.detector, raw, fresh(targets), number)
        are_batches = isinstance(inputs, (Tensor, list)) and isinstance(targets, (Tensor, list))
        is_fewer = are_batches and len(inputs) == len(targets) > len(losses)
        if most is not None and (len(losses) > most or is_fewer):
            raise BoxcovError(
                f"loss() returned {counted(len(losses), 'value')} for item {number}, which has "
                f"{counted(most, 'frame')}: return one value per frame, shape (B,), the sum over "
                "its locations or boxes; a mean over the batch hides the gradients of the frames"
            )
        if _is_one_for_all(raw, losses):
            raise BoxcovError(
                f"loss() returned the same value for all {len(losses)} frames of item {number}, "
                "and it depends on all of them: return each frame's own loss, shape (B,); a mean "
                "over the batch hides the gradients of the frames"
            )
        return losses

    def _sample_targets(self, raw: Any, sample_seed: int, number: int) -> Any:
        seed = item_seed(sample_seed, number)  # does not depend on the items before
        with torch.no_grad():
            generator = torch.Generator(self.device).manual_seed(seed)
            targets = self.detector.sample_targets(raw, generator)
        if targets is None:
            raise BoxcovError(
                f'fisher="mc" samples targets, but {type(self.detector).__name__} has no method '
                'sample_targets(raw, generator): add it, or use fisher="empirical" with labels'
            )
        return targets


def _frame_losses(detector: Detector, raw: Any, targets: Any, number: int) -> Tensor:
    try:
        losses = detector.loss(raw, targets)
    except (BoxcovError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BoxcovError(
            f"the targets of item {number} do not fit the detector: {type(error).__name__}: {error}"
        ) from error
    is_tensor = isinstance(losses, Tensor)
    if not is_tensor or losses.dim() != 1 or not len(losses):
        form = tuple(losses.shape) if is_tensor else type(losses).__name__
        raise BoxcovError(
            f"loss() must return one value per frame, shape (B,), got {form}: "
            "a mean over the batch hides the gradients of the frames"
        )
    is_finite = losses.isfinite().tolist()
    if not all(is_finite):
        frame = is_finite.index(False)
        raise NotFiniteFrameError(
            f"the loss of item {number} is {losses[frame].item()} in its frame {frame}: "
            "its inputs or targets hold a NaN, an infinity or a value out of range"
        )
    if not losses.requires_grad:
        raise BoxcovError(
            f"the loss of item {number} has no gradient for any chosen layer: does loss() detach "
            "its inputs, or does forward() run under no_grad or a reentrant checkpoint?"
        )
    return losses


def _is_one_for_all(raw: Any, losses: Tensor) -> bool:
    """Return whether the losses (B,) are one value, a mean of the batch, repeated.

    Then they have the same gradient. That of a frame's own loss is in this frame alone.
    """
    if len(losses) < 2 or bool((losses != losses[0]).any()):
        return False
    outputs = [t for t in tree_leaves(raw) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs:  # loss() may run layers itself
        return False
    options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
    of_first = torch.autograd.grad(losses[0], outputs, **options)
    of_last = torch.autograd.grad(losses[-1], outputs, **options)
    apart = sum(float((a - b).double().norm()) for a, b in zip(of_first, of_last))
    return apart < 0.1 * sum(float(a.double().norm()) for a in of_first)


def most_frames(inputs: Any, targets: Any) -> int | None:
    """Return an upper bound of the number of frames of a batch, or None if it is unknown.

    It is read from the first dimension of tensors and the length of lists. A list of inputs may
    hold one entry per frame or the parts of one input: it counts only with a list of targets.
    """
    known = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    known = [value for value in known if isinstance(value, (Tensor, list))]
    if isinstance(inputs, list) and not isinstance(targets, (Tensor, list)):
        known = []
    counts = [len(each) for each in (*known, targets) if has_length(each)]
    return max(counts, default=None) if known else None


def has_length(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)
