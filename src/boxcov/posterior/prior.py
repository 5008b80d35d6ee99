"""The prior precision: from the marginal likelihood, held-out frames, or the weights' size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite

import torch

from boxcov._torch.modules import check_fingerprint
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, join_names
from boxcov.posterior.kronecker_block import Eigendecomposition, log_evidence
from boxcov.posterior.posterior import Posterior

DECADES = (-8.0, 8.0)


def optimize_prior_precision(
    posterior: Posterior,
    score: Callable[[Posterior], float] | None = None,
    *,
    per_layer: bool = False,
) -> Posterior:
    """Return the posterior with the best prior precision between 1e-8 and 1e8.

    score: function of a posterior to minimize, such as ``boxcov.held_out_nll``. By default the
        marginal likelihood of the training frames is maximized, which needs no frames.
    per_layer: optimize one precision per layer, by the marginal likelihood.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> posterior = boxcov.fit(TinyCenter(), shapes.frames(count=4))
    >>> optimized = optimize_prior_precision(posterior)
    >>> optimized.log_marginal_likelihood() >= posterior.log_marginal_likelihood()
    True
    """
    if score is not None:
        if per_layer:
            raise BoxcovError(
                "per_layer needs the marginal likelihood: a score optimizes one precision"
            )
        return posterior.with_prior(
            10 ** minimize(lambda x: score(posterior.with_prior(10**x)), *DECADES, steps=16)
        )
    n = posterior.n_data

    def best(names: list[str]) -> float:
        blocks = [posterior.blocks[name] for name in names]
        return float(
            10
            ** minimize(
                lambda x: -sum(log_evidence(block, n, 10**x) for block in blocks),
                *DECADES,
                steps=48,
            )
        )

    if per_layer:
        return posterior.with_prior({name: best([name]) for name in posterior.blocks})
    return posterior.with_prior(best(list(posterior.blocks)))


def weight_scaled(posterior: Posterior, detector: Detector, scale: float = 1.0) -> Posterior:
    """Return a control without data: independent weights, with a standard deviation per layer.

    It is ``scale`` times the root mean square of the layer's weights, biases not included.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> detector = TinyCenter()
    >>> posterior = boxcov.fit(detector, shapes.frames(count=1), fisher="identity")
    >>> control = weight_scaled(posterior, detector, scale=0.1)
    >>> rms = detector.head.shared[0].weight.square().mean().sqrt()
    >>> bool(torch.isclose(control.variances("head.shared.0").sqrt(), 0.1 * rms).all())
    True
    """
    if not 0 < scale < float("inf"):
        raise BoxcovError(f"scale must be above 0 and finite, got {scale}")
    check_fingerprint(posterior.fingerprint, detector, "weight_scaled")
    weights = dict(detector.named_parameters())
    squares = {
        name: float(weights[block.layer.weight].detach().double().square().mean())
        for name, block in posterior.blocks.items()
    }
    empty = [name for name, square in squares.items() if square == 0]
    if empty:
        raise BoxcovError(
            f"all weights of {join_names(empty)} are 0: leave them out with "
            f"FitOptions(exclude={empty!r})"
        )
    blocks = {
        name: replace(
            block,
            H=Eigendecomposition(block.H.vectors, torch.zeros_like(block.H.values)),
            ekfac_eigenvalues=None,
            full_fisher=None,
        )
        for name, block in posterior.blocks.items()
    }
    precisions = {name: 1 / (scale**2 * square) for name, square in squares.items()}
    return replace(
        posterior,
        blocks=blocks,
        prior_precision=precisions,
        fisher="identity",
        form="eigen",
        calibration=None,
        error=0.0,
    )


def minimize(
    function: Callable[[float], float], low: float, high: float, steps: int, tolerance: float = 1e-3
) -> float:
    """Return the minimizer: a grid search, then a golden-section search around its best point.

    >>> round(minimize(lambda x: (x - 1.25) ** 2, -8, 8, steps=16), 2)
    1.25
    """
    tried: list[tuple[float, float]] = []

    def at(x: float) -> float:
        value = function(x)
        value = value if isfinite(value) else float("inf")
        tried.append((value, x))
        return value

    width = (high - low) / steps
    for i in range(steps + 1):
        at(low + i * width)
    best, centre = min(tried)
    if best == float("inf"):
        raise BoxcovError("the score is not finite for any prior precision between 1e-8 and 1e8")
    a, b = max(low, centre - width), min(high, centre + width)
    golden = (5**0.5 - 1) / 2
    c, d = b - golden * (b - a), a + golden * (b - a)
    f_c, f_d = at(c), at(d)
    while b - a > tolerance:
        if f_c < f_d:
            b, d, f_d = d, c, f_c
            c = b - golden * (b - a)
            f_c = at(c)
        else:
            a, c, f_c = c, d, f_d
            d = a + golden * (b - a)
            f_d = at(d)
    return min(tried)[1]
