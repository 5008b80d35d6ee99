"""The Laplace posterior: factors and a prior, to sample from and to take quadratic forms with.

With ``Q = U diag(l) U^T`` and ``H = V diag(m) V^T`` the covariance ``(n Q (x) H + tau I)^-1`` of a weight matrix is diagonal in the basis of the
matrices ``v_a u_b^T``, with variances ``1 / (n m_a l_b + tau)``. The paper's own form, ``Q^-1 (x) H^-1``, is diagonal in the same basis.
A second pass over the frames (``refine.py``) can put better numbers in the place of ``m_a l_b``, or a better basis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from boxcov._torch.precision import full_precision
from boxcov._torch.unfold import from_matrix, to_matrix
from boxcov.errors import BoxcovError, join_names
from boxcov.posterior.calibration import Calibration
from boxcov.posterior.kronecker_block import Eigendecomposition, KroneckerBlock, log_evidence

if TYPE_CHECKING:
    from boxcov.detector import Detector
    from boxcov.posterior.file import Storage

FisherKind = Literal["empirical", "mc", "identity"]
Locations = Literal["all", "gradient"]
Form = Literal["eigen", "paper"]


@dataclass(frozen=True)
class Posterior:
    """A Gaussian over the weights of some layers, around the trained ones. Made by ``boxcov.fit`` or ``Posterior.load``.

    >>> import boxcov, tempfile
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> detector = TinyCenter()
    >>> posterior = boxcov.fit(detector, shapes.frames(count=2), depth=["head.shared.0"], n_data=100)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     posterior.with_prior(2.0).save(f"{folder}/p.safetensors")
    ...     Posterior.load(f"{folder}/p.safetensors", detector).prior_precision
    2.0
    >>> posterior.paper(jitter=1e-3).form
    'paper'
    """

    blocks: Mapping[str, KroneckerBlock]  # by layer name
    n_data: float  # training frames that the curvature stands for
    prior_precision: float | Mapping[str, float]  # tau, for all layers or for each
    fisher: FisherKind
    frames: int  # frames that the factors were computed from
    loss: float  # mean training loss of those frames, with their weights
    fingerprint: str  # of the detector's weights
    depth: str = "head"
    form: Form = "eigen"
    jitter: float = 1e-6  # of the paper's form, relative to a factor's mean eigenvalue
    meta: Mapping[str, str] = field(default_factory=dict)
    locations: Locations = "all"  # that Q was taken over
    calibration: Calibration | None = (
        None  # from its covariances to those of the errors; other variances of the weights lose it
    )
    skipped: int = 0  # items that were left out because of a NaN or an infinity
    error: float = 0.0  # a share: no variance is further off than this, because of truncated()

    def __post_init__(self) -> None:
        if isinstance(self.prior_precision, Mapping):
            lacking = [name for name in self.blocks if name not in self.prior_precision]
            if lacking:
                raise BoxcovError(
                    f"prior_precision has no value for {join_names(lacking)}: give one for each layer, or one number for all"
                )
        for name in self.blocks:
            if not 0 <= self.tau(name) < float("inf"):
                raise BoxcovError(
                    f"prior_precision must be at least 0 and finite, got {self.tau(name)} for {name}"
                )
        if not 0 < self.n_data < float("inf"):
            raise BoxcovError(f"n_data must be above 0 and finite, got {self.n_data}")
        refined = [name for name, block in self.blocks.items() if block.refined]
        if refined and self.form == "paper":
            raise BoxcovError(
                f"the paper's form is Q^-1 (x) H^-1, and the Fisher of {join_names(refined)} is eigenvalue-corrected or known whole, "
                "no product of two factors: use the form 'eigen', or fit without corrected and full"
            )
        poor = [name for name in self.blocks if not self._invertible(name)]
        if poor:
            raise BoxcovError(self._rank_message(poor))

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that it is about, weights first."""
        layers = [block.layer for block in self.blocks.values()]
        return [layer.weight for layer in layers] + [
            layer.bias for layer in layers if layer.bias is not None
        ]

    def restricted(self, names: Iterable[str]) -> Posterior:
        """The same posterior over some of its layers, without its calibration."""
        return replace(self, blocks={name: self.blocks[name] for name in names}, calibration=None)

    # the covariance

    def tau(self, name: str) -> float:
        """The prior precision of one layer."""
        tau = self.prior_precision
        return float(tau[name] if isinstance(tau, Mapping) else tau)

    def variances(self, name: str) -> Tensor:
        """Variances in the eigenbasis of one layer (G, n_out, n_in)."""
        block = self.blocks[name]
        if self.form == "paper":
            h, q = block.H.jittered(self.jitter), block.Q.jittered(self.jitter)
            return 1 / (h.unsqueeze(2) * q.unsqueeze(1))
        return 1 / (self.n_data * block.curvature + self.tau(name))

    def condition(self, name: str) -> float:
        """The condition number of one layer's covariance: its greatest variance over its least.

        What depends on it are the paper's Cholesky factors; the exact form divides by each eigenvalue and holds for any condition number.

        >>> import boxcov
        >>> from boxcov.data import shapes
        >>> from boxcov.detectors.tiny import TinyCenter
        >>> posterior = boxcov.fit(TinyCenter(), shapes.frames(count=2), depth=["head.shared.0"])
        >>> posterior.condition("head.shared.0") < posterior.with_prior(1e-6).condition("head.shared.0")
        True
        """
        variances = self.variances(name).double()
        return float(variances.max() / variances.min())

    @full_precision
    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """``count`` draws of eta ~ N(0, Sigma), (count, *shape) by parameter name, on the posterior's device.

        Normal numbers come from ``generator``, on its device; the same generator gives the same draws wherever the posterior lives. They are
        a sequence: more draws begin with the same ones, and a layer has the same ones whichever others the posterior has.

        >>> import boxcov
        >>> from boxcov.data import shapes
        >>> from boxcov.detectors.tiny import TinyCenter
        >>> posterior = boxcov.fit(TinyCenter(), shapes.frames(count=2), depth=["head.shared.0"])
        >>> {name: tuple(eta.shape) for name, eta in posterior.sample(10, torch.Generator().manual_seed(0)).items()}
        {'head.shared.0.weight': (10, 16, 32, 3, 3)}
        """
        if count < 1:
            raise BoxcovError(f"a posterior gives at least 1 sample, got a count of {count}")
        source = self.device if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=source))
        etas = {}
        for name, block in self.blocks.items():
            layer, like = block.layer, block.H.values
            own = torch.Generator(source).manual_seed(_seed_of(seed, name))
            shape = (layer.geometry.groups, layer.n_out, layer.n_in)
            # one by one: torch fills the end of a larger tensor with other numbers
            each = [
                torch.randn(shape, generator=own, dtype=like.dtype, device=source)
                for _ in range(count)
            ]
            xi = torch.stack(each).to(like.device)
            if self.form == "paper":
                L_Q, L_H = self._cholesky[name]
                half = torch.linalg.solve_triangular(L_Q, xi, upper=False, left=False)
                eta = torch.linalg.solve_triangular(L_H.transpose(1, 2), half, upper=True)
            else:
                eta = block.unrotate(xi * self.variances(name).sqrt())
            weight, bias = from_matrix(eta, layer.shape, layer.bias is not None, layer.geometry)
            etas[layer.weight] = weight
            if layer.bias is not None and bias is not None:
                etas[layer.bias] = bias
        return etas

    @full_precision
    def quadratic(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """``J Sigma J^T`` (..., D, D) of gradients (..., D, *shape) by parameter name; a parameter without one counts as 0.

        >>> import boxcov
        >>> from boxcov.data import shapes
        >>> from boxcov.detectors.tiny import TinyCenter
        >>> posterior = boxcov.fit(TinyCenter(), shapes.frames(count=2), depth=["head.shared.0"])
        >>> posterior.quadratic({"head.shared.0.weight": torch.randn(7, 5, 16, 32, 3, 3)}).shape
        torch.Size([7, 5, 5])
        """
        total: Tensor | None = None
        for name, block in self.blocks.items():
            layer = block.layer
            weight = gradients.get(layer.weight)
            bias = None if layer.bias is None else gradients.get(layer.bias)
            given = bias if weight is None else weight
            if given is None:
                continue
            lead = (
                given.shape[:-1]
                if weight is None
                else given.shape[: given.dim() - len(layer.shape)]
            )
            if weight is None:
                weight = given.new_zeros(*lead, *layer.shape)
            if bias is None and layer.bias is not None:
                bias = given.new_zeros(*lead, layer.geometry.groups * layer.n_out)
            matrix = to_matrix(weight, bias, layer.geometry).to(block.H.values.dtype)
            G = (block.rotate(matrix) * self.variances(name).sqrt()).flatten(-3)  # (..., D, w)
            C = G @ G.transpose(-1, -2)
            total = C if total is None else total + C
        if total is None:
            raise BoxcovError(
                f"none of the gradients {join_names(gradients)} belongs to this posterior"
            )
        return total

    def covariance(self, name: str) -> Tensor:
        """The covariance of one layer's weight matrix, dense (w, w) over (group, output, input): for small layers and for tests."""
        block = self.blocks[name]
        groups = [
            (block.basis(g) * v.flatten()) @ block.basis(g).T
            for g, v in enumerate(self.variances(name))
        ]
        dense: Tensor = torch.block_diag(*groups)
        return dense

    # other posteriors of the same factors

    def with_prior(self, prior_precision: float | Mapping[str, float]) -> Posterior:
        """The same factors under another prior precision, in the exact form, without a calibration.

        The bound of a truncated posterior grows as the prior precision falls.
        """
        other = replace(self, prior_precision=prior_precision, form="eigen", calibration=None)
        if not self.error:
            return other
        from boxcov.posterior.compress import under_prior

        ratios = [
            self.tau(name) / tau if (tau := other.tau(name)) else float("inf")
            for name in self.blocks
        ]
        return replace(other, error=under_prior(self.error, max(ratios)))

    def truncated(self, error: float = 0.01) -> Posterior:
        """The same posterior in less room, no variance further off than the share ``error``: see ``boxcov.posterior.compress``."""
        from boxcov.posterior.compress import truncated

        return truncated(self, error)

    def paper(self, jitter: float = 1e-6) -> Posterior:
        """The paper's own posterior ``Q^-1 (x) H^-1`` (n = 1, no prior), each factor with ``jitter`` times its mean eigenvalue added."""
        if self.error:
            raise BoxcovError(
                "a truncated posterior has lost the small eigenvalues that the paper's form divides by: take the whole one"
            )
        return replace(self, form="paper", jitter=jitter, calibration=None)

    def weight_scaled(self, detector: Detector, scale: float = 1.0) -> Posterior:
        """A control without any data: see ``boxcov.posterior.prior.weight_scaled``."""
        from boxcov.posterior.prior import weight_scaled

        return weight_scaled(self, detector, scale)

    def with_calibration(self, calibration: Calibration | None) -> Posterior:
        """The same posterior with a calibration to carry, see ``boxcov.error_model.fit`` and ``boxcov calibrate``."""
        return replace(self, calibration=calibration)

    def to(self, device: torch.device | str) -> Posterior:
        moved: dict[int, Eigendecomposition] = {}  # shared factors stay shared
        return replace(
            self, blocks={name: block.to(device, moved) for name, block in self.blocks.items()}
        )

    @property
    def device(self) -> torch.device:
        return next(iter(self.blocks.values())).H.values.device

    # evidence

    def log_marginal_likelihood(self) -> float:
        """Laplace's estimate of log p(D), up to a constant that does not depend on the prior.

        The log-likelihood at the trained weights, the prior there, and half the log-determinants of prior and posterior precision.
        """
        if self.form == "paper":
            raise BoxcovError(
                "the paper's form has no prior, so no marginal likelihood: use posterior.with_prior(1.0)"
            )
        return -self.n_data * self.loss + sum(
            log_evidence(block, self.n_data, self.tau(name)) for name, block in self.blocks.items()
        )

    def tune_prior_precision(
        self, score: Callable[[Posterior], float] | None = None, *, per_layer: bool = False
    ) -> Posterior:
        """See ``boxcov.posterior.prior.tune_prior_precision``."""
        from boxcov.posterior.prior import tune_prior_precision

        return tune_prior_precision(self, score, per_layer=per_layer)

    # files

    def storage(self) -> Storage:
        """See ``boxcov.posterior.file.storage``."""
        from boxcov.posterior.file import storage

        return storage(self)

    def save(self, path: str | Path) -> None:
        """One safetensors file, there whole or not at all."""
        from boxcov.posterior.file import save

        save(self, path)

    @staticmethod
    def load(path: str | Path, detector: Detector) -> Posterior:
        """Read a posterior onto the device of ``detector``; one that was made for other weights is refused."""
        from boxcov.posterior.file import load

        return load(path, detector)

    @cached_property
    def _cholesky(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: block.cholesky(self.jitter) for name, block in self.blocks.items()}

    # checks

    def _invertible(self, name: str) -> bool:
        block = self.blocks[name]
        if self.form == "eigen" and self.tau(name) > 0:
            return True
        if self.form == "eigen" or block.has_full_rank:
            return block.has_full_rank
        return self.jitter > 0 and bool(
            (block.Q.values.sum(1) > 0).all() and (block.H.values.sum(1) > 0).all()
        )

    def _rank_message(self, poor: list[str]) -> str:
        way = "use a prior_precision above 0"
        if self.form == "paper":
            way = f"a jitter of {self.jitter} does not mend that: raise it, leave the layer out, or use the form 'eigen'"
        return f"the factors of {join_names(poor)} are rank-deficient ({poor[0]}: {self.blocks[poor[0]].ranks}) and have no inverse: {way}"


def _seed_of(seed: int, name: str) -> int:
    """Of the draws of one layer: its own, whatever other layers there are."""
    return int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:7], "big")
