"""The Laplace posterior: a Gaussian over the weights of some layers.

    Sigma = (n F + tau I)^-1,    F = Q (x) H per layer

With ``Q = U diag(l) U^T`` and ``H = V diag(m) V^T``, Sigma is diagonal in the basis of the matrices
``v_a u_b^T`` with variances ``1 / (n m_a l_b + tau)``. A sample is ``eta = V (xi * sd) U^T`` with
xi standard normal. The paper's own form, ``Sigma = Q^-1 (x) H^-1``, is diagonal in the same basis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from boxcov._torch.modules import check_fingerprint
from boxcov._torch.process_state import full_precision
from boxcov.detector import Detector, check_configuration
from boxcov.error_model.model import ErrorModel, describe_error_model
from boxcov.errors import BoxcovError, check_whole, counted, join_names
from boxcov.posterior.kronecker_block import KroneckerBlock, check_precisions
from boxcov.posterior.prior import EVIDENCE_LAYERS, maximize_evidence

if TYPE_CHECKING:
    from boxcov.posterior.file import Storage

FisherKind = Literal["empirical", "mc", "identity"]
Form = Literal["eigen", "paper"]


@dataclass(frozen=True, repr=False)
class Posterior:
    """A Gaussian over the weights of some layers, centred at the trained weights.

    Made by ``boxcov.fit`` or ``Posterior.load``.

    >>> import boxcov, tempfile
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> detector = TinyCenter()
    >>> frames = shapes.frames(count=2)
    >>> posterior = boxcov.fit(detector, frames, depth=["head.shared.0"], n_data=100)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     posterior.with_prior(2.0).save(f"{folder}/p.safetensors")
    ...     Posterior.load(f"{folder}/p.safetensors", detector).prior_precision
    2.0
    >>> posterior
    Posterior(depth='head.shared.0', form='eigen')
      layers: 1 (head.shared.0), 4,608 weights
      prior precision: auto, 874 to 874 (0 layers set by the frames, 1 by the size of the weights)
      Fisher: empirical, 2 frames for n_data=100
      stored: 0.32 MiB
      error model: none, uncalibrated
    """

    blocks: Mapping[str, KroneckerBlock]  # by layer name
    n_data: float  # number of training frames n
    prior_precision: float | Mapping[str, float]  # tau, for all layers or per layer
    fisher: FisherKind
    frames: int  # number of frames that the factors were computed from
    loss: float  # mean training loss of these frames
    fingerprint: str  # of the detector's weights
    depth: str = "head"
    form: Form = "eigen"
    jitter: float = 1e-6  # of the form "paper", relative to a factor's mean eigenvalue
    meta: Mapping[str, str] = field(default_factory=dict)
    error_model: ErrorModel | None = None  # dropped whenever the variances change
    skipped: int = 0  # items left out because of NaN or infinite values
    configuration: Mapping[str, str] = field(default_factory=dict)  # empty: of boxcov 0.1
    error: float = 0.0  # bound of the relative change of every variance by compress()

    def __post_init__(self) -> None:
        taus = self.prior_precision
        if not isinstance(taus, Mapping):
            taus = dict.fromkeys(self.blocks, taus)
        if missing := [name for name in self.blocks if name not in taus]:
            raise BoxcovError(
                f"prior_precision has no value for {join_names(missing)}: "
                "give one per layer, or one number for all"
            )
        for name in self.blocks:
            check_precisions(self.n_data, taus[name], name)
        if self.form == "paper":
            self._check_paper()

    def _check_paper(self) -> None:
        """Raise if the paper's form is not defined: its Fisher is ``Q (x) H``, and has an inverse.

        A jitter is relative to the mean eigenvalue, so that it does not help where that is 0.
        """
        if not self.jitter > 0:
            raise BoxcovError(f"jitter must be above 0, got {self.jitter}")
        if self.ekfac_layers:
            raise BoxcovError(
                f"the paper's form needs Q (x) H, but the Fisher of {join_names(self.ekfac_layers)}"
                " comes from a second pass: use form='eigen', or fit without ekfac"
            )
        zero = [
            name
            for name, block in self.blocks.items()
            if any(bool((f.values.sum(1) == 0).any()) for f in (block.Q, block.H))
        ]
        if zero:
            raise BoxcovError(
                f"a factor of {join_names(zero)} is zero and has no inverse: exclude the layer, or "
                "use form='eigen'"
            )

    def __repr__(self) -> str:
        weights = sum(block.size for block in self.blocks.values())
        bound = f", variances within {100 * self.error:.2f} %" if self.error else ""
        skipped = f" ({counted(self.skipped, 'item')} skipped)" if self.skipped else ""
        lines = [
            f"Posterior(depth={self.depth!r}, form={self.form!r})",
            f"layers: {len(self.blocks)} ({join_names(self.blocks, 3)}), {weights:,} weights",
            f"prior precision: {self.prior_summary}",
            f"Fisher: {self.fisher}, {counted(self.frames, 'frame')}{skipped} for "
            f"n_data={self.n_data:g}",
            f"stored: {self.storage().stored / 2**20:.2f} MiB{bound}",
            f"error model: {describe_error_model(self.error_model)}",
        ]
        if self.ekfac_layers:
            lines.insert(4, f"EKFAC: {counted(len(self.ekfac_layers), 'layer')}")
        return "\n  ".join(lines)

    @cached_property  # every frame's meta data hold it
    def prior_summary(self) -> float | str:
        """The prior precision: a number, or a few words if each layer has its own."""
        if self.form == "paper":
            return "none"
        if not isinstance(self.prior_precision, Mapping):
            return self.prior_precision
        taus = [self.tau(name) for name in self.blocks]
        span = f"{min(taus):.3g} to {max(taus):.3g}"
        if EVIDENCE_LAYERS not in self.meta:
            return f"{span}, one per layer"
        by_evidence = len(set(self.meta[EVIDENCE_LAYERS].split(",")) & set(self.blocks))
        others = len(self.blocks) - by_evidence
        by_frames = f"{counted(by_evidence, 'layer')} set by the frames"
        return f"auto, {span} ({by_frames}, {others} by the size of the weights)"

    @property
    def ekfac_layers(self) -> list[str]:
        """Names of the layers whose eigenvalues come from a second pass."""
        return [name for name, block in self.blocks.items() if not block.is_kronecker]

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters, weights first."""
        layers = [block.layer for block in self.blocks.values()]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return [layer.weight for layer in layers] + biases

    @property
    def device(self) -> torch.device:
        return next(iter(self.blocks.values())).H.values.device

    # the covariance

    def tau(self, name: str) -> float:
        """Return the prior precision of one layer."""
        tau = self.prior_precision
        return float(tau[name] if isinstance(tau, Mapping) else tau)

    def variances(self, name: str) -> Tensor:
        """Return the variances of one layer in its eigenbasis (G, n_out, n_in)."""
        block = self.blocks[name]
        if self.form == "paper":
            h, q = block.H.jittered(self.jitter), block.Q.jittered(self.jitter)
            return 1 / (h.unsqueeze(2) * q.unsqueeze(1))
        return 1 / (self.n_data * block.curvature + self.tau(name))

    @full_precision()
    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return ``count`` samples eta ~ N(0, Sigma), (count, *shape) by parameter name.

        Random numbers are drawn on the generator's device, so the same generator gives the same
        samples on every device. The first samples are the same for any ``count``, and the samples
        of a layer do not depend on the other layers.

        >>> import boxcov
        >>> from boxcov.data import shapes
        >>> from boxcov.detectors.tiny import TinyCenter
        >>> posterior = boxcov.fit(TinyCenter(), shapes.frames(count=2), depth=["head.shared.0"])
        >>> etas = posterior.sample(10, torch.Generator().manual_seed(0))
        >>> {name: tuple(eta.shape) for name, eta in etas.items()}
        {'head.shared.0.weight': (10, 16, 32, 3, 3)}
        """
        check_whole("count", count)
        source = self.device if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=source))
        etas: dict[str, Tensor] = {}
        for name, block in self.blocks.items():
            layer, like = block.layer, block.H.values
            layer_generator = torch.Generator(source).manual_seed(_layer_seed(seed, name))
            shape = (layer.geometry.groups, layer.n_out, layer.n_in)
            # one by one, because torch fills the end of a larger tensor with other numbers
            normal = [
                torch.randn(shape, generator=layer_generator, dtype=like.dtype, device=source)
                for _ in range(count)
            ]
            etas |= layer.tensors(self._scale(name, torch.stack(normal).to(like.device)))
        return etas

    def _scale(self, name: str, xi: Tensor) -> Tensor:
        """Return ``Sigma^1/2 xi`` for standard normal xi (count, G, n_out, n_in)."""
        block = self.blocks[name]
        if self.form == "eigen":
            return block.unrotate(xi * self.variances(name).sqrt())
        L_Q, L_H = block.Q.cholesky(self.jitter), block.H.cholesky(self.jitter)
        half = torch.linalg.solve_triangular(L_Q, xi, upper=False, left=False)
        return torch.linalg.solve_triangular(L_H.transpose(1, 2), half, upper=True)

    @full_precision()
    def quadratic(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return ``J Sigma J^T`` (..., D, D) of gradients (..., D, *shape) of all parameters."""
        parts = []
        for name, block in self.blocks.items():
            matrix = block.layer.matrix(gradients).to(block.H.values.dtype)
            G = (block.rotate(matrix) * self.variances(name).sqrt()).flatten(-3)  # (..., D, w)
            parts.append(G @ G.transpose(-1, -2))
        return reduce(torch.add, parts)

    def check_detector(self, detector: Detector) -> None:
        """Raise if the posterior is of other weights, or of another configuration."""
        check_fingerprint(self.fingerprint, detector, "posterior")
        if self.configuration:
            check_configuration(self.configuration, detector.configuration(), "posterior")

    # other posteriors with the same factors

    def restricted(self, names: Iterable[str]) -> Posterior:
        """Return the posterior of some of the layers, without its error model."""
        return replace(self, blocks={name: self.blocks[name] for name in names}, error_model=None)

    def with_prior(self, prior_precision: float | Mapping[str, float]) -> Posterior:
        """Return the posterior with another prior precision, in the form "eigen", uncalibrated.

        The error bound of a compressed posterior grows as the prior precision falls.
        """
        other = replace(
            self,
            prior_precision=prior_precision,
            form="eigen",
            error_model=None,
            meta={key: text for key, text in self.meta.items() if key != EVIDENCE_LAYERS},
        )
        if not self.error:
            return other
        from boxcov.posterior.compress import error_under_prior

        ratio = max(self.tau(name) / other.tau(name) for name in self.blocks)
        return replace(other, error=error_under_prior(self.error, ratio))

    def paper(self, jitter: float = 1e-6) -> Posterior:
        """Return the paper's form ``Q^-1 (x) H^-1`` (n = 1, no prior).

        jitter: added to the eigenvalues of each factor, relative to their mean.
        """
        if self.error:
            raise BoxcovError(
                "a compressed posterior has lost the small eigenvalues that the paper's form "
                "divides by: use the original"
            )
        return replace(self, form="paper", jitter=jitter, error_model=None)

    def compress(self, error: float = 0.01) -> Posterior:
        """Compress the posterior with an error bound, see ``boxcov.posterior.compress``."""
        from boxcov.posterior.compress import compress

        return compress(self, error)

    def with_error_model(self, error_model: ErrorModel | None) -> Posterior:
        """Return the posterior with another error model, see ``boxcov.calibrate``."""
        return replace(self, error_model=error_model)

    def to(self, device: torch.device | str) -> Posterior:
        factors = {id(f): f for block in self.blocks.values() for f in (block.Q, block.H)}
        moved = {key: factor.to(device) for key, factor in factors.items()}  # shared ones stay so
        blocks = {}
        for name, block in self.blocks.items():
            values = block.ekfac_eigenvalues
            values = None if values is None else values.to(device)
            Q, H = moved[id(block.Q)], moved[id(block.H)]
            blocks[name] = replace(block, Q=Q, H=H, ekfac_eigenvalues=values)
        return replace(self, blocks=blocks)

    def optimize_prior_precision(self, *, per_layer: bool = False) -> Posterior:
        """Return the posterior with the prior precision of the largest marginal likelihood.

        It lies between 1e-8 and 1e8. For a detector the prior tends to be far wider than the
        weights: see ``boxcov.posterior.prior.auto_prior_precision``.

        per_layer: optimize one precision per layer.
        """
        if not per_layer:
            return self.with_prior(maximize_evidence(list(self.blocks.values()), self.n_data))
        blocks = self.blocks.items()
        return self.with_prior({n: maximize_evidence([block], self.n_data) for n, block in blocks})

    # files

    def storage(self) -> Storage:
        """See ``boxcov.posterior.file.storage``."""
        from boxcov.posterior.file import storage

        return storage(self)

    def save(self, path: str | Path) -> None:
        """Write the posterior to a safetensors file, which replaces ``path`` as a whole."""
        from boxcov.posterior.file import save

        save(self, path)

    @staticmethod
    def load(path: str | Path, detector: Detector) -> Posterior:
        """Load a posterior onto the detector's device; raise if it is of another detector.

        ``path`` may be "small", for ``centerpoint.load("small")``: calibrated, in the package.
        """
        from boxcov.posterior.file import load

        return load(path, detector)


def _layer_seed(seed: int, name: str) -> int:
    """Return the random seed of one layer, which does not depend on the other layers."""
    return int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:7], "big")
