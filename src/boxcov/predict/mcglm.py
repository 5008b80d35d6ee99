"""MC-GLM (algorithm 1 of the paper): directional derivatives of the boxes along samples of the posterior, and their sample covariance."""

from __future__ import annotations

from dataclasses import replace
from math import log10
from typing import Any, Literal, get_args
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.precision import at_least_float32
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.posterior.posterior import Posterior
from boxcov.predict.budget import Budget, Choice, clock
from boxcov.predict.cuda.graphs import Precision
from boxcov.predict.forward_mode.directions import (
    Directions,
    ForwardModeError,
    directional_derivatives,
)
from boxcov.predict.forward_mode.tangents import Tangents
from boxcov.predict.linearize import Point, Weights
from boxcov.predict.predictor import (
    PosteriorPredictor,
    check_precision,
    check_samples,
    sample_covariance,
    score_parts,
)

Derivative = Literal["jvp", "fd"]
_STEP_TOLERANCE = 0.05


class MCGLM(PosteriorPredictor):
    """The paper's method.

    samples: k, the number of directions; the error of the covariance falls as 1 / sqrt(k), see ``ExactGLM`` for none.
    derivative: "jvp" is forward-mode differentiation, exact; "fd" is the paper's finite difference with the step ``epsilon``.
    fresh: draw new directions for every frame; otherwise those of ``seed`` serve all frames, and equal frames get equal numbers.
    cross_box: also return the low-rank covariance of all boxes together, see ``Detections.cross_covariance``.
    chunk: how many directions to differentiate at once, to bound memory; all of them unless given.
    calibrated: also fill ``Detections.predictive``, by the posterior's calibration.
    score: also the variance of each score's logit, and its covariance with the box, from the same directions.
    precision: of the derivatives ("jvp"): "float32", or "tf32" (on a GPU) or "half", faster and less exact; see docs/performance.md.
    budget_ms: milliseconds for a frame, from the call on. Where they do not suffice the first few directions are taken, then those of the
    head alone; ``meta`` of the result says how many ("samples"), how deep ("depth"), and how long it took. A result of k' samples is that of
    ``MCGLM(samples=k')``. The detector's own pass is never cut: a budget below it is missed, and the result says so.
    graphs: on a GPU, keep the dense part of the detector, with the derivatives beside it, and the head's stages as CUDA graphs; they hold memory.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = MCGLM(detector, boxcov.fit(detector, frames), samples=10)
    >>> found = model(frames[0][0])
    >>> found.covariance.shape[1:]
    torch.Size([5, 5])
    """

    method = "mcglm"

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior,
        samples: int = 10,
        derivative: Derivative = "jvp",
        epsilon: float = 1e-7,
        seed: int = 0,
        *,
        fresh: bool = False,
        cross_box: bool = False,
        chunk: int | None = None,
        calibrated: bool = False,
        score: bool = False,
        precision: Precision = "float32",
        budget_ms: float | None = None,
        graphs: bool = True,
    ) -> None:
        check_samples(samples)
        check_precision(precision)
        if derivative not in get_args(Derivative):
            raise BoxcovError(
                f"derivative must be one of {', '.join(get_args(Derivative))}, got {derivative!r}"
            )
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise BoxcovError(
                f"chunk must be a whole number of directions of at least 1, got {chunk!r}"
            )
        if not epsilon > 0:
            raise BoxcovError(f"epsilon must be above 0, got {epsilon}")
        super().__init__(detector, posterior, calibrated, score, graphs)
        self.samples, self.derivative, self.epsilon, self.seed = samples, derivative, epsilon, seed
        self.fresh, self.cross_box, self.chunk, self.precision = fresh, cross_box, chunk, precision
        self._generator = torch.Generator().manual_seed(seed)
        self._along: dict[Choice, Directions] = {}
        self._all = Choice(samples)
        self._budget = (
            None if budget_ms is None else Budget(budget_ms, samples, bool(self._below()))
        )
        self._chosen: tuple[Choice, float] | None = None  # of this frame, and when
        if budget_ms is not None and derivative == "fd":
            raise BoxcovError(
                "budget_ms is for derivative='jvp': finite differences take a pass of the network for each direction"
            )
        self._step_checked = derivative == "jvp"

    def settings(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "samples": self.samples,
            "derivative": self.derivative,
            "seed": self.seed,
            "fresh": self.fresh,
        }
        if self.derivative == "fd":
            own["epsilon"] = self.epsilon
        return {**super().settings(), **own}

    def predict(self, point: Point) -> Detections:
        choice = self._choice()
        along = self._directions(choice)
        if self.derivative == "jvp":
            boxes, A = along.derivatives(point)
        else:
            A = finite_differences(point, along.etas, self.epsilon)
            boxes = A[
                :, : point.boxes.shape[1]
            ].contiguous()  # in one layout, with logits or without: sums come out the same
            if not self._step_checked:
                self._check_step(point, along.etas, A)
        factor = (
            (boxes - boxes.mean(2, keepdim=True)) / (choice.samples - 1) ** 0.5
            if self.cross_box
            else None
        )
        score = score_parts(sample_covariance(A)[:, -1] if self.score else None)
        return point.detections(
            covariance=sample_covariance(boxes), factor=factor, meta=self.settings(), **score
        )

    def asks(self) -> bool:
        if self.derivative == "fd" or self._all not in self._along:
            return True
        below = self._budget is not None and bool(
            self._below()
        )  # then the frame goes another way once it is known which there is time for
        return below or not all(along.suffice for along in self._along.values())

    def along(self) -> Tangents | None:
        whole = self._directions(self._all, draw=self.fresh)
        # with a budget, what there is time for is known behind the plain pass
        return (
            None
            if self.derivative == "fd" or self._budget is not None
            else whole.tangents(self.linearised)
        )

    def _directions(self, choice: Choice, draw: bool = False) -> Directions:
        """Those of the seed, or new ones if asked to draw; some of them for a choice that is not all."""
        whole = self._along.get(self._all)
        if whole is None:
            whole = self._along[self._all] = self._made(
                self.posterior, self.posterior.sample(self.samples, self._generator)
            )
        elif draw:
            whole.draw(self.posterior.sample(self.samples, self._generator))
        if choice == self._all:
            return whole
        if choice.head and choice not in self._along:
            below = set(self._below())
            head = self.posterior.restricted(
                [name for name in self.posterior.blocks if name not in below]
            )
            etas = {name: whole.etas[name] for name in head.parameters}
            self._along[choice] = self._made(head, etas).first(choice.samples)
        elif choice not in self._along:
            self._along[choice] = whole.first(choice.samples)
        elif self.fresh:
            own = self._along[choice]
            own.draw({name: whole.etas[name][: choice.samples] for name in own.etas})
        return self._along[choice]

    def _made(self, posterior: Posterior, etas: dict[str, Tensor]) -> Directions:
        return Directions(
            self._detector,
            posterior,
            etas,
            self.precision,
            self.chunk,
            self.score,
            self.linearised.graphs,
        )

    # the budget

    def _below(self) -> list[str]:
        """Layers of the posterior that are not the head's; none if it has no layer of the head at all."""
        head = self._detector.parts().get("head", ())
        own = {
            id(p)
            for module in (head if isinstance(head, tuple) else (head,))
            for p in module.parameters()
        }
        names = {name for name, p in self._detector.named_parameters() if id(p) in own}
        below = [
            name for name, block in self.posterior.blocks.items() if block.layer.weight not in names
        ]
        return below if len(below) < len(self.posterior.blocks) else []

    def _choice(self) -> Choice:
        """What this frame has time for, after the detector's own pass."""
        if self._budget is None:
            return self._all
        self._wait()
        now = clock()
        choice = self._budget.choose(self._budget.milliseconds - 1e3 * (now - self._began))
        self._chosen = choice, now
        return choice

    def _finished(self, result: Detections) -> Detections:
        if self._budget is None:
            return result
        self._wait()
        now = clock()
        spent = 1e3 * (now - self._began)
        choice, at = self._chosen or (self._all, now)
        if at < self._began:  # of a frame before, which ended in an error; this one has no boxes
            choice = self._all
        elif self._chosen is not None:
            self._budget.took(choice, 1e3 * (now - at))
        self._chosen = None
        said = {
            "samples": choice.samples,
            "budget_ms": self._budget.milliseconds,
            "milliseconds": round(spent, 3),
        }
        depth = {"depth": "head"} if choice.head else {}
        return replace(
            result, meta={**result.meta, **said, **depth, "note": self._budget.note(choice, spent)}
        )

    def _wait(self) -> None:
        if self.device.type == "cuda":  # what is under way is not done
            torch.cuda.synchronize(self.device)

    def _check_step(self, point: Point, etas: dict[str, Tensor], A: Tensor) -> None:
        """On the first boxes: is the finite difference the derivative? If not, say so once and name a step that is better."""
        self._step_checked = True
        try:
            exact = directional_derivatives(point, etas, self.chunk)
        except ForwardModeError as why_not:
            warn(
                f"MCGLM(derivative='fd', epsilon={self.epsilon:g}): the step could not be checked, as {why_not}",
                BoxcovWarning,
                stacklevel=4,
            )
            return
        off = _relative(A, exact)
        if off <= _STEP_TOLERANCE:
            return
        two = {name: eta[:2] for name, eta in etas.items()}
        steps = [10.0**power for power in range(-9, 1)]
        errors = [
            _relative(finite_differences(point, two, step), exact[:, :, :2]) for step in steps
        ]
        error, better = min(zip(errors, steps))
        why = (
            "lost in rounding"
            if better > self.epsilon
            else "too long: the boxes are not linear over it"
        )
        warn(
            f"MCGLM(derivative='fd', epsilon={self.epsilon:g}): the step is {why}. The finite differences are {_percent(off)} off the exact "
            f"derivatives; epsilon=1e{round(log10(better))} is {_percent(error)} off, derivative='jvp' needs no epsilon",
            BoxcovWarning,
            stacklevel=4,
        )


def finite_differences(point: Point, etas: Weights, epsilon: float) -> Tensor:
    """The paper's estimate of J eta (m, D, k): (z(theta + epsilon eta) - z(theta)) / epsilon, one pass for each direction.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3)
    >>> model = boxcov.MCGLM(detector, boxcov.fit(detector, frames))
    >>> point = model.linearised.at(frames[0][0])
    >>> finite_differences(point, model.posterior.sample(7), epsilon=1e-5).shape
    torch.Size([3, 5, 7])
    """
    theta = point.linearised.theta()
    count = len(next(iter(etas.values())))
    shifted = []
    for i in range(count):
        weights = {
            name: theta[name] + (epsilon * eta[i]).to(theta[name].dtype)
            for name, eta in etas.items()
        }
        shifted.append(at_least_float32(point.difference(point.z_at(weights))) / epsilon)
    return torch.stack(shifted, 2)


def _relative(A: Tensor, exact: Tensor) -> float:
    off = float((A - exact).norm() / exact.norm().clamp(min=1e-30))
    return off if off == off else float("inf")  # NaN: the step left the numbers


def _percent(ratio: float) -> str:
    return (
        f"{100 * ratio:.2g} %"
        if ratio < 10
        else f"a factor of {ratio:.2g}"
        if ratio < float("inf")
        else "infinitely far"
    )
