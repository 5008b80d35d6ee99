"""A posterior in less room, with a bound on what that changes.

Of an input factor ``Q = U diag(l) U^T`` the eigenvalues that lie close together *beside the prior* are replaced by one number, and their
eigenvectors by any basis of the same space: low rank plus a multiple of the identity. The other eigenvectors are stored as rounded reflections
(``packed.py``). Together this is another factor Q'. A layer's precision is ``n m_p Q + tau I`` for each eigenvalue m_p of its output factor, so with
``a = tau / (n m)``, m the largest of them, and

    delta = || (Q + a I)^-1/2 (Q' - Q) (Q + a I)^-1/2 ||,    the largest absolute eigenvalue,

the new precision lies between 1 - delta and 1 + delta times the old one in every direction, for this m and for all smaller ones, which make a
larger. So every variance, of any linear function of the weights, lies within 1 / (1 +- delta) of what it was: the trace and every diagonal entry
of every box's covariance, by any of the predictors, on any frame. delta is computed from what will be read back, not estimated.

How many eigenvectors that leaves depends on tau / n: eigenvalues far below ``tau / (n m)`` all have the variance 1 / tau, and are one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from boxcov._torch.precision import full_precision
from boxcov.errors import BoxcovError, join_names
from boxcov.posterior.householder import pack
from boxcov.posterior.kronecker_block import Eigendecomposition
from boxcov.posterior.posterior import Posterior

_ROUNDING = 6e-5  # of a reflection in 16 bits, relative, about
_MERGING = 0.9  # the share of delta for eigenvalues that become one; what is left is for the rounding, which needs little


def compress(posterior: Posterior, error: float = 0.01) -> Posterior:
    """The posterior in less room: no variance of any linear function of the weights changes by more than the share ``error``.

    What it came to is ``Posterior.error``. The output factors, which are small, stay as they are.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> posterior = boxcov.fit(TinyCenter(), shapes.frames(count=4), n_data=1000)
    >>> smaller = compress(posterior, error=0.01)
    >>> smaller.storage().stored < 0.3 * posterior.storage().stored, 0 < smaller.error <= 0.01
    (True, True)
    """
    _check(posterior, error)
    most = error / (1 + error)
    floors: dict[int, Tensor] = {}
    for name, block in posterior.blocks.items():
        floor = posterior.tau(name) / (posterior.n_data * block.H.values.double().amax(1)).clamp(
            min=1e-300
        )
        floors[id(block.Q)] = torch.minimum(floors.get(id(block.Q), floor), floor)
    made: dict[int, tuple[Eigendecomposition, float]] = {}
    for block in posterior.blocks.values():
        if id(block.Q) not in made:
            made[id(block.Q)] = _smaller(block.Q, floors[id(block.Q)], most)
    blocks = {
        name: replace(block, Q=made[id(block.Q)][0]) for name, block in posterior.blocks.items()
    }
    return replace(
        posterior, blocks=blocks, error=_change(max(delta for _, delta in made.values()))
    )


def error_under_prior(error: float, ratio: float) -> float:
    """The bound under a prior precision that is smaller by ``ratio``; infinite where there is none.

    >>> error_under_prior(0.01, 0.5), round(error_under_prior(0.01, 10.0), 3), error_under_prior(0.01, 1000.0)
    (0.01, 0.11, inf)
    """
    return error if ratio <= 1 else _change(error / (1 + error) * ratio)


def _change(delta: float) -> float:
    """Of variances, where precisions change by ``delta``."""
    return delta / (1 - delta) if delta < 1 else float("inf")


def _check(posterior: Posterior, error: float) -> None:
    if not 0 < error < 1:
        raise BoxcovError(f"error is a share of the variances, above 0 and below 1, got {error}")
    if posterior.error:
        raise BoxcovError(
            f"this posterior is already compressed, to {posterior.error:.2g}: compress the original"
        )
    if posterior.form == "paper":
        raise BoxcovError(
            "compressing needs form='eigen': the paper's form has no prior beside which small eigenvalues are one"
        )
    refined = [name for name, block in posterior.blocks.items() if not block.is_kronecker]
    if refined:
        raise BoxcovError(
            f"the Fisher of {join_names(refined)} is eigenvalue-corrected or known whole, so it cannot be compressed: "
            "fit without ekfac and full_layers"
        )
    flat = [name for name in posterior.blocks if posterior.tau(name) == 0]
    if flat:
        raise BoxcovError(
            f"compressing needs a prior_precision above 0, and {join_names(flat)} has 0"
        )


@full_precision
def _smaller(
    factor: Eigendecomposition, floor: Tensor, most: float
) -> tuple[Eigendecomposition, float]:
    """The factor in less room, and its delta, at most ``most``."""
    order, rest = _order(factor.values.double(), floor, _MERGING * most)
    G, n = factor.values.shape
    rank = order.shape[1]
    vectors = factor.vectors.gather(2, order.unsqueeze(1).expand(G, n, rank)).cpu()
    values = factor.values.gather(1, order).cpu()
    weight = (values.double() / floor.cpu().unsqueeze(1)).amax(0)
    exact = int(
        (weight > ((1 - _MERGING) * most / 2 / _ROUNDING) ** 2).sum()
    )  # a guess, to be checked
    while True:
        packed = pack(vectors, values, rest.to(values), exact)
        vectors_read, values_read = (
            packed.opened()
        )  # on a CPU, as from a file: the same wherever it goes
        eigen = Eigendecomposition(
            vectors_read.to(factor.vectors.device), values_read.to(factor.vectors.device), packed
        )
        delta = difference(factor, eigen, floor)
        if delta <= most:
            return eigen, delta
        if exact == rank:
            return factor, 0.0  # nothing so small that it may be lost
        exact = min(rank, max(2 * exact, exact + n // 32 + 1))


def _order(values: Tensor, floor: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Which eigenvectors to keep (G, r), by falling eigenvalue, and the eigenvalue (G,) of the rest.

    The rest is the longest run of eigenvalues that one number can stand for: with s = l + a between b and c, that is ``2 b c / (b + c)``, at
    most ``(c - b) / (c + b)`` off.
    """
    G, n = values.shape
    s = values + floor.unsqueeze(1)
    stop = torch.searchsorted(
        s, s * (1 + most) / (1 - most), right=True
    )  # where a run from here must end
    run = int((stop - torch.arange(n, device=s.device)).amax(1).min())  # all groups have the same
    spread = s[:, run - 1 :] / s[:, : n - run + 1]
    start = spread.argmin(1, keepdim=True)
    low, high = s.gather(1, start), s.gather(1, start + run - 1)
    rest = (2 * low * high / (low + high) - floor.unsqueeze(1)).clamp(
        values.gather(1, start), values.gather(1, start + run - 1)
    )
    at = torch.arange(n, device=s.device).expand(G, n)
    kept = at[(at < start) | (at >= start + run)].view(G, n - run)
    return kept.flip(1), rest.squeeze(1)


def difference(factor: Eigendecomposition, other: Eigendecomposition, floor: Tensor) -> float:
    """delta of two factors: the largest absolute eigenvalue of ``(Q + a I)^-1/2 (Q' - Q) (Q + a I)^-1/2``, for a = ``floor`` (G,)."""
    s, other_s = (eigen.values.double() + floor.unsqueeze(1) for eigen in (factor, other))
    turn = factor.vectors.double().transpose(1, 2) @ other.vectors.double()
    half = turn * (other_s.unsqueeze(1) / s.unsqueeze(2)).sqrt()
    ratios = torch.linalg.eigvalsh(half @ half.transpose(1, 2))
    return float((ratios - 1).abs().max())
