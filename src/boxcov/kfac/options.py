"""Options of a fit that most users leave at their defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from boxcov.errors import BoxcovError
from boxcov.posterior.posterior import Form, Locations

NonFinite = Literal["error", "skip"]
FrameWeight = Callable[[Any], Any]  # from the targets of a batch to the weights (B,) of its frames


@dataclass(frozen=True)
class FitOptions:
    """Options of ``boxcov.fit``.

    exclude: names of modules or parameters to keep constant.
    fraction: share of the items to use, drawn with ``seed``.
    seed: random seed of the drawn items and, for ``fisher="mc"``, of the drawn targets.
    ekfac: correct the eigenvalues by a second pass over the frames, see ``boxcov.kfac.ekfac``.
    full_layers: names of small layers, or "last", that keep their full Fisher matrix (also by a
        second pass).
    locations: "all" weights all locations equally in the input factor Q; "gradient" weights each
        by its squared gradient, because the box loss has a gradient at few cells only.
    form: "eigen" is ``(n F + tau I)^-1``; "paper" is ``Q^-1 (x) H^-1`` with ``jitter``.
    jitter: added to each factor of the form "paper", relative to its mean eigenvalue.
    nonfinite: "error" stops at an item with NaN or infinite inputs, loss or gradients; "skip"
        leaves it out and counts it.
    frame_weight: function from the targets of an item to a weight for the loss of each frame, for
        example the number of objects that the loss was divided by.

    >>> FitOptions(fraction=0.1, ekfac=True).needs_second_pass
    True
    """

    exclude: Sequence[str] = ()
    fraction: float = 1.0
    seed: int = 0
    ekfac: bool = False
    full_layers: str | Sequence[str] = ()
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
        if self.needs_second_pass and self.form == "paper":
            raise BoxcovError(
                "ekfac and full_layers need form='eigen': the paper's form is Q^-1 (x) H^-1"
            )

    @property
    def needs_second_pass(self) -> bool:
        return self.ekfac or len(self.full_layers) > 0


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise if ``value`` is not one of the Literal ``choices``."""
    if value not in get_args(choices):
        raise BoxcovError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")
