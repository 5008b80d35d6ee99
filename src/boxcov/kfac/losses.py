"""The training loss of each frame, as a function of the chosen weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from boxcov._torch.inputs import fresh, most_frames
from boxcov._torch.shadow import shadow
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, NotFiniteFrameError

Weight = Callable[[Any], Any]
"""From the targets of a batch to the weights (B,) of its frames."""


class Losses:
    """A shadow of the detector whose chosen weights, and no others, can be differentiated, and the losses of its frames.

    The chosen weights are aliases: the detector's own flags stay as they are, and no graph is built before the first chosen layer.
    """

    def __init__(
        self, detector: Detector, chosen: Mapping[str, nn.Parameter], weight: Weight | None = None
    ) -> None:
        everything = dict(detector.named_parameters())
        aliases = {
            name: nn.Parameter(p.detach(), requires_grad=name in chosen)
            for name, p in everything.items()
            if p.is_floating_point()
        }
        self.aliases = {name: aliases[name] for name in chosen}
        self.detector = shadow(
            detector, {id(p): aliases[name] for name, p in everything.items() if name in aliases}
        )
        self.weight = weight

    def raw(self, inputs: Any) -> Any:
        return self.detector(fresh(inputs))

    def of(
        self, raw: Any, inputs: Any, targets: Any, generator: torch.Generator | None, batch: int
    ) -> Tensor:
        """The loss of each frame (B,), checked, times its weight. A ``generator`` draws the targets ("mc")."""
        most = most_frames(inputs, targets)
        if generator is not None:
            targets = sampled(self.detector, raw, generator)
        losses = frame_losses(self.detector, raw, targets, batch)
        if most is not None and len(losses) > most:
            raise BoxcovError(
                f"loss() returned {len(losses)} values for batch {batch}, which has {most} frames: "
                "return the sum over each frame's locations or boxes, shape (B,)"
            )
        return (
            losses
            if self.weight is None
            else losses * _weights(self.weight, targets, losses, batch)
        )


def _weights(weight: Weight, targets: Any, losses: Tensor, batch: int) -> Tensor:
    weights = torch.as_tensor(weight(targets), dtype=losses.dtype, device=losses.device).detach()
    if weights.shape != losses.shape or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise BoxcovError(
            f"weight must give a finite number of at least 0 for each of the {len(losses)} frames of batch {batch}, got {weights.tolist()}"
        )
    return weights


def frame_losses(detector: Detector, raw: Any, targets: Any, batch: int) -> Tensor:
    """The training loss of each frame (B,), checked."""
    try:
        losses = detector.loss(raw, targets)
    except (BoxcovError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BoxcovError(
            f"the targets of batch {batch} do not fit the detector: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not len(losses):
        form = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise BoxcovError(
            f"loss() must return one value a frame, shape (B,), got {form}: a mean over the batch hides the frames' own gradients"
        )
    if not bool(losses.isfinite().all()):
        bad = [i for i, ok in enumerate(losses.isfinite().tolist()) if not ok]
        raise NotFiniteFrameError(
            f"the loss of batch {batch} is {losses[bad[0]].item()} in frame {bad[0]} of the batch: "
            "its inputs or targets hold a NaN, an infinity or a value out of range"
        )
    if not losses.requires_grad:
        raise BoxcovError(
            f"the loss of batch {batch} has no gradient for any chosen layer: "
            "does loss() detach its inputs, or forward() run under no_grad or a reentrant checkpoint?"
        )
    return losses


def seeded(generator: torch.Generator | None, seed: int, number: int) -> torch.Generator | None:
    """The generator of one item's drawn targets: each item draws for itself, wherever a run begins and whoever counts the items before.

    >>> seeded(torch.Generator(), 3, 7).initial_seed()
    3000016
    """
    return None if generator is None else generator.manual_seed(1_000_003 * seed + number)


def sampled(detector: Detector, raw: Any, generator: torch.Generator) -> Any:
    """Targets drawn by the detector, for fisher="mc"."""
    with torch.no_grad():
        targets = detector.sample_targets(raw, generator)
    if targets is None:
        raise BoxcovError(
            f'fisher="mc" draws targets from the detector, and {type(detector).__name__} does not say how: '
            'give it a method sample_targets(raw, generator), or use fisher="empirical" with labelled frames'
        )
    return targets
