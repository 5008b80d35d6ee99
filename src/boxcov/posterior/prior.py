"""The prior precision: from the marginal likelihood, or from the size of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from warnings import warn

from boxcov._torch.modules import check_fingerprint
from boxcov.detector import Detector
from boxcov.errors import BoxcovWarning, join_names
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
        if precisions[name] < high and _still_rises([block], posterior.n_data, precisions[name] / 2)
    ]
    for name in by_evidence:
        precisions[name] = _maximize_evidence([posterior.blocks[name]], posterior.n_data)
    if zero := [name for name, square in squares.items() if square == 0]:
        message = (
            f"all weights of {join_names(zero)} are 0, so that their prior has the smallest "
            "standard deviation, 1e-4: give prior_precision as a number if that is too narrow"
        )
        warn(message, BoxcovWarning, stacklevel=4)
    chosen = posterior.with_prior(precisions)
    return replace(chosen, meta={**chosen.meta, EVIDENCE_LAYERS: ",".join(by_evidence)})


def optimize_prior_precision(posterior: Posterior, *, per_layer: bool = False) -> Posterior:
    """Return the posterior with the prior precision of the largest marginal likelihood.

    It lies between 1e-8 and 1e8. For a detector the prior tends to be far wider than the weights:
    see ``auto_prior_precision``.

    per_layer: optimize one precision per layer.
    """
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
        if _still_rises(blocks, n_data, 10**end) == is_beyond:
            return float(10**end)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _still_rises(blocks, n_data, 10**middle) else (low, middle)
    return float(10 ** ((low + high) / 2))


def _still_rises(blocks: Sequence[KroneckerBlock], n_data: float, tau: float) -> bool:
    """Return whether the evidence still rises at tau; it has one maximum, as gamma falls in tau."""
    gamma = sum(determined_weights(block, n_data, tau) for block in blocks)
    return gamma > tau * sum(block.square_norm for block in blocks)
