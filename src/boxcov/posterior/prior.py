"""The prior precision: from the marginal likelihood, held-out frames, or the weights' size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import isfinite
from warnings import warn

from boxcov._torch.modules import check_fingerprint
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning, join_names
from boxcov.posterior.kronecker_block import KroneckerBlock, determined_weights
from boxcov.posterior.posterior import EVIDENCE_LAYERS, Posterior

DECADES = (-8.0, 8.0)


def auto_prior_precision(posterior: Posterior, detector: Detector) -> Posterior:
    """Return the posterior with a prior precision for each layer that fits the layer's weights.

    The marginal likelihood ("evidence") of a layer with weights theta is largest where
    ``tau |theta|^2 = gamma``, the number of weights that the data determine. If they determine few,
    it explains all of |theta|^2 by those, and the prior of the others is far wider than any weight.
    So the evidence decides only if its prior variance 1 / tau is at most twice the mean square of
    the layer's weights, biases not included. Otherwise 1 / tau is that mean square.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> detector = TinyCenter()
    >>> posterior = boxcov.fit(detector, shapes.frames(count=4), prior_precision=1.0)
    >>> round(auto_prior_precision(posterior, detector).tau("head.shared.0"))
    874
    """
    check_fingerprint(posterior.fingerprint, detector, "the posterior")
    weights = dict(detector.named_parameters(remove_duplicate=False))
    squares = {
        name: float(weights[block.layer.weight].detach().double().square().mean())
        for name, block in posterior.blocks.items()
    }
    low, high = (10**x for x in DECADES)
    precisions = {name: max(1 / max(square, low), low) for name, square in squares.items()}
    by_evidence = [
        name
        for name, block in posterior.blocks.items()
        if precisions[name] < high and _is_below([block], posterior.n_data, precisions[name] / 2)
    ]
    for name in by_evidence:
        precisions[name] = _maximize_evidence([posterior.blocks[name]], posterior.n_data)
    zero = [name for name, square in squares.items() if square == 0]
    if zero:
        warn(
            f"all weights of {join_names(zero)} are 0, so that their prior has the smallest "
            "standard deviation, 1e-4: give prior_precision as a number if that is too narrow",
            BoxcovWarning,
            stacklevel=3,
        )
    chosen = posterior.with_prior(precisions)
    return replace(chosen, meta={**chosen.meta, EVIDENCE_LAYERS: ",".join(by_evidence)})


def optimize_prior_precision(
    posterior: Posterior,
    score: Callable[[Posterior], float] | None = None,
    *,
    per_layer: bool = False,
) -> Posterior:
    """Return the posterior with the best prior precision between 1e-8 and 1e8.

    score: function of a posterior to minimize, such as ``boxcov.held_out_nll``. By default the
        marginal likelihood of the training frames is maximized, which needs no frames. For a
        detector it tends to give a prior far wider than the weights: see ``auto_prior_precision``.
    per_layer: optimize one precision per layer, by the marginal likelihood.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> posterior = boxcov.fit(TinyCenter(), shapes.frames(count=4))
    >>> optimized = optimize_prior_precision(posterior, per_layer=True)
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
    n, blocks = posterior.n_data, posterior.blocks
    if per_layer:
        return posterior.with_prior(
            {name: _maximize_evidence([block], n) for name, block in blocks.items()}
        )
    return posterior.with_prior(_maximize_evidence(list(blocks.values()), n))


def _maximize_evidence(blocks: Sequence[KroneckerBlock], n_data: float) -> float:
    """Return the tau with ``tau |theta|^2 = gamma``, or an end of the interval without one."""
    low, high = DECADES
    for end, is_beyond in ((low, False), (high, True)):
        if _is_below(blocks, n_data, 10**end) == is_beyond:
            return float(10**end)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _is_below(blocks, n_data, 10**middle) else (low, middle)
    return float(10 ** ((low + high) / 2))


def _is_below(blocks: Sequence[KroneckerBlock], n_data: float, tau: float) -> bool:
    """Return whether the evidence still rises at tau; it has one maximum, as gamma falls in tau."""
    gamma = sum(determined_weights(block, n_data, tau) for block in blocks)
    return gamma > tau * sum(block.square_norm for block in blocks)


def minimize(
    function: Callable[[float], float], low: float, high: float, steps: int, tolerance: float = 1e-3
) -> float:
    """Return the minimizer: the best point of a grid, then the better neighbours at half the step.

    >>> round(minimize(lambda x: (x - 1.25) ** 2, -8, 8, steps=16), 2)
    1.25
    """

    @cache
    def value(x: float) -> float:
        found = function(x)
        return found if isfinite(found) else float("inf")

    step = (high - low) / steps
    best = min((low + i * step for i in range(steps + 1)), key=value)
    if value(best) == float("inf"):
        raise BoxcovError("the score is not finite for any prior precision between 1e-8 and 1e8")
    while step > tolerance:
        step /= 2
        best = min(best, max(low, best - step), min(high, best + step), key=value)
    return best
