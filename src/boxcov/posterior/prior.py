"""The prior precision: from the marginal likelihood, or from the size of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from warnings import warn

from boxcov.detector import Detector
from boxcov.errors import BoxcovWarning, join_names
from boxcov.posterior.kronecker_block import KroneckerBlock

if TYPE_CHECKING:
    from boxcov.posterior.posterior import Posterior

DECADES = (-8.0, 8.0)  # of a prior precision that is optimized
EVIDENCE_LAYERS = "evidence_layers"  # in the meta data of an automatic prior


def auto_prior_precision(posterior: Posterior, detector: Detector) -> Posterior:
    """Return the posterior with a prior precision for each layer that fits the layer's weights.

    The marginal likelihood ("evidence") of a layer with weights theta is largest where
    ``tau |theta|^2 = gamma``, the number of weights that the data determine. If they determine few,
    it explains all of |theta|^2 by those, and the prior of the others is far wider than any weight.
    So the evidence decides only if its prior variance 1 / tau is at most twice the mean square of
    the layer's weights, biases not included. Otherwise 1 / tau is that mean square.
    """
    posterior.check_detector(detector)
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
        if precisions[name] < high
        and evidence_rises([block], posterior.n_data, precisions[name] / 2)
    ]
    for name in by_evidence:
        precisions[name] = maximize_evidence([posterior.blocks[name]], posterior.n_data)
    if zero := [name for name, square in squares.items() if square == 0]:
        message = (
            f"all weights of {join_names(zero)} are 0, so that their prior has the smallest "
            "standard deviation, 1e-4: give prior_precision as a number if that is too narrow"
        )
        warn(message, BoxcovWarning, stacklevel=4)
    chosen = posterior.with_prior(precisions)
    return replace(chosen, meta={**chosen.meta, EVIDENCE_LAYERS: ",".join(by_evidence)})


def determined_weights(block: KroneckerBlock, n_data: float, tau: float) -> float:
    """Return how many weights the data determine: ``gamma = sum_i n f_i / (n f_i + tau)``."""
    precision = n_data * block.curvature.double()
    return float((precision / (precision + tau)).sum())


def maximize_evidence(blocks: Sequence[KroneckerBlock], n_data: float) -> float:
    """Return the tau with ``tau |theta|^2 = gamma``, or an end of the interval without one."""
    low, high = DECADES
    for end, is_beyond in ((low, False), (high, True)):
        if evidence_rises(blocks, n_data, 10**end) == is_beyond:
            return float(10**end)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if evidence_rises(blocks, n_data, 10**middle) else (low, middle)
    return float(10 ** ((low + high) / 2))


def evidence_rises(blocks: Sequence[KroneckerBlock], n_data: float, tau: float) -> bool:
    """Return whether the evidence still rises at tau; it has one maximum, as gamma falls in tau."""
    gamma = sum(determined_weights(block, n_data, tau) for block in blocks)
    return gamma > tau * sum(block.square_norm for block in blocks)
