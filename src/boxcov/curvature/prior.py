"""Choosing the prior precision: by the evidence of the training frames, or by held-out boxes."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from boxcov.curvature.posterior import Posterior, log_evidence
from boxcov.errors import BoxcovError

DECADES = (-8.0, 8.0)


def tune_prior_precision(posterior: Posterior, score: Callable[[Posterior], float] | None = None, *, per_layer: bool = False) -> Posterior:
    """The posterior with the prior precision that explains the data best.

    Without ``score``, the marginal likelihood of the training frames decides, which costs nothing; ``per_layer`` gives each layer its own
    precision. With ``score``, that function of a posterior is made small: ``boxcov.held_out_nll`` makes one from held-out frames.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> posterior = boxcov.fit(TinyCenter(), shapes.frames(count=4))
    >>> tuned = tune_prior_precision(posterior)
    >>> tuned.log_marginal_likelihood() >= posterior.log_marginal_likelihood()
    True
    """
    if score is not None:
        if per_layer:
            raise BoxcovError("per_layer goes with the marginal likelihood: a score of held-out boxes tunes one precision")
        return posterior.with_prior(10 ** minimise(lambda x: score(posterior.with_prior(10**x)), *DECADES, steps=16))
    n = posterior.n_data

    def best(names: list[str]) -> float:
        blocks = [posterior.blocks[name] for name in names]
        return float(10 ** minimise(lambda x: -sum(log_evidence(block, n, 10**x) for block in blocks), *DECADES, steps=48))

    if per_layer:
        return posterior.with_prior({name: best([name]) for name in posterior.blocks})
    return posterior.with_prior(best(list(posterior.blocks)))


def minimise(function: Callable[[float], float], low: float, high: float, steps: int, tolerance: float = 1e-3) -> float:
    """Where ``function`` is smallest: a grid, so as not to fall into the wrong valley, then a golden section around its best point.

    >>> round(minimise(lambda x: (x - 1.25) ** 2, -8, 8, steps=16), 2)
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
