"""EKFAC: better eigenvalues for a Kronecker-factored posterior, by a second pass over the frames.

With G_f the gradient matrix of frame f's loss, KFAC approximates the Fisher, the mean over frames
of ``vec(G_f) vec(G_f)^T``, by ``Q (x) H``. EKFAC keeps the eigenbases U of Q and V of H and
replaces the eigenvalues m_a l_b by the second moments of the gradients in that basis,

    lambda_ab = mean over frames of (V^T G_f U)_ab^2.

This is the diagonal of the Fisher in that basis, and so the nearest to the Fisher, in Frobenius
norm, of all matrices that are diagonal in it. Small layers can keep their full Fisher matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from boxcov._torch.distributed import World
from boxcov._torch.inputs import load_item
from boxcov._torch.layers import LayerCall, LayerCallMode
from boxcov._torch.precision import at_least_float32, full_precision
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, NotFiniteFrameError, join_names
from boxcov.kfac.factors import check_count, read_sum
from boxcov.kfac.losses import FrameLosses
from boxcov.kfac.options import FitOptions, check_layer_names
from boxcov.posterior.detector_check import check_detector
from boxcov.posterior.kronecker_block import Eigendecomposition, KroneckerBlock
from boxcov.posterior.posterior import Posterior

MAX_FULL = 4096  # weights per group of a layer with a full Fisher
_EKFAC = FitOptions(ekfac=True)


def apply_ekfac(
    posterior: Posterior,
    detector: Detector,
    frames: Iterable[Any],
    options: FitOptions = _EKFAC,
    progress: Callable[[int, int | None], None] | None = None,
) -> Posterior:
    """Return ``posterior`` with eigenvalues corrected by a pass over the frames of its fit.

    Of ``options``, ``ekfac``, ``full_layers``, ``frame_weight`` and ``seed`` are used. There is one
    backward pass per frame over its whole batch: batches of one frame are the fastest. The prior
    precision stays.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> detector, frames = TinyCenter(), shapes.frames(count=4)
    >>> posterior = apply_ekfac(boxcov.fit(detector, frames), detector, frames)
    >>> posterior.blocks["head.shared.0"].ekfac_eigenvalues.shape
    torch.Size([1, 16, 288])
    """
    check_detector(posterior, detector, "apply_ekfac")
    parameters = dict(detector.named_parameters())
    losses = FrameLosses(
        detector,
        {name: parameters[name] for name in posterior.parameters},
        options.frame_weight,
        options.seed if posterior.fisher == "mc" else None,
    )
    moments = GradientMoments(posterior, losses, options)
    total = len(frames) if isinstance(frames, Sized) else None
    with torch.inference_mode(False):
        for batch, item in enumerate(frames):
            moments.add(*load_item(item, batch, moments.device), batch)
            if progress is not None:
                progress(batch + 1, total)
    return moments.posterior()


@dataclass
class _MomentSum:
    """The sum of one layer over frames, in float64; at most one of the two tensors is used."""

    block: KroneckerBlock
    squares: Tensor | None = None  # (G, n_out, n_in) of (V^T G_f U)^2
    products: Tensor | None = None  # (G, w, w) of vec(G_f) vec(G_f)^T

    @property
    def total(self) -> Tensor | None:
        return self.products if self.squares is None else self.squares

    def add(self, gradient: Tensor) -> None:
        """Add the gradient matrix (G, n_out, n_in) of one frame."""
        if self.squares is not None:
            self.squares += self.block.rotate(gradient).double().square()
        if self.products is not None:
            flat = gradient.flatten(1).double()
            self.products += flat.unsqueeze(2) * flat.unsqueeze(1)

    def corrected_block(self, frames: int) -> KroneckerBlock:
        dtype = self.block.Q.values.dtype
        if self.squares is not None:
            return replace(self.block, ekfac_eigenvalues=(self.squares / frames).to(dtype))
        if self.products is not None:
            fisher = Eigendecomposition.of(self.products / frames, dtype)
            return replace(self.block, full_fisher=fisher)
        return self.block


class GradientMoments:
    """Sums the second moments of the frames' gradients in the eigenbases of ``posterior``."""

    def __init__(self, posterior: Posterior, losses: FrameLosses, options: FitOptions) -> None:
        if posterior.fisher == "identity":
            raise BoxcovError(
                "the identity Fisher has no gradients to correct it with: "
                "fit with fisher='empirical' or 'mc'"
            )
        if posterior.error:
            raise BoxcovError(
                "a compressed posterior has lost its small eigenvectors: "
                "apply EKFAC before compressing"
            )
        self.kfac_posterior, self.losses, self.options = posterior, losses, options
        self.device = losses.device
        self.frames = 0
        self.is_partial = False  # whether part of a batch is in the sums
        self.full_layers: list[str] | None = None  # "last" is resolved with the first batch
        self.sums: dict[str, _MomentSum] = {}

    def settings(self) -> dict[str, Any]:
        """Return what decides the sums, for a checkpoint; moments depend on the eigenbases."""
        digest = sha256()
        for block in self.kfac_posterior.blocks.values():
            for factor in (block.Q, block.H):
                digest.update(factor.vectors.detach().cpu().contiguous().numpy().tobytes())
        full = self.options.full_layers
        return {
            "corrected": self.options.ekfac,
            "full": full if isinstance(full, str) else list(full),
            "basis": digest.hexdigest(),
        }

    def add(self, inputs: Any, targets: Any, batch: int) -> None:
        """Add one batch; if anything is raised, the sums stay those of the batches before."""
        if self.full_layers is None:
            self._start(self._find_full_layers(inputs))
        aliases = self.losses.aliases
        with torch.enable_grad():
            raw = self.losses.raw(inputs)
            losses = self.losses.compute(raw, inputs, targets, batch).unbind()
        gradients = []
        for frame, loss in enumerate(losses):
            grads = torch.autograd.grad(
                loss,
                list(aliases.values()),
                allow_unused=True,
                retain_graph=frame + 1 < len(losses),
            )
            gradients.append(
                {
                    name: torch.zeros_like(p) if d is None else d
                    for (name, p), d in zip(aliases.items(), grads)
                }
            )
        _check_finite(gradients, batch)
        self.is_partial = True
        for each in gradients:
            self._add_frame(each)
        self.frames += len(losses)
        self.is_partial = False

    @full_precision
    def _add_frame(self, gradients: dict[str, Tensor]) -> None:
        for sums in self.sums.values():
            sums.add(sums.block.layer.matrix(gradients).to(sums.block.Q.vectors))

    def posterior(self) -> Posterior:
        """Return the posterior with the corrected eigenvalues, without its error model."""
        if not self.frames:
            raise BoxcovError(
                "the data set is empty: the second pass needs at least one frame, and a stream "
                "can be read only once"
            )
        blocks = {name: sums.corrected_block(self.frames) for name, sums in self.sums.items()}
        return replace(self.kfac_posterior, blocks=blocks, form="eigen", error_model=None)

    def _start(self, full_layers: list[str]) -> None:
        """Set all sums to zero."""
        self.full_layers = full_layers
        zero = torch.zeros((), dtype=torch.float64, device=self.kfac_posterior.device)
        for name, block in self.kfac_posterior.blocks.items():
            G, n_out, n_in = block.layer.geometry.groups, block.layer.n_out, block.layer.n_in
            plain = replace(
                block, ekfac_eigenvalues=None, full_fisher=None
            )  # drop an earlier correction
            if name in full_layers:
                w = n_out * n_in
                self.sums[name] = _MomentSum(plain, products=zero.repeat(G, w, w))
            elif self.options.ekfac:
                self.sums[name] = _MomentSum(plain, squares=zero.repeat(G, n_out, n_in))
            else:
                self.sums[name] = _MomentSum(block)

    def _find_full_layers(self, inputs: Any) -> list[str]:
        names, blocks = self.options.full_layers, self.kfac_posterior.blocks
        check_layer_names(names, blocks)
        if names == "last":
            names = last_layers(self.kfac_posterior, self.losses, inputs)
        sizes = {n: blocks[n].layer.n_out * blocks[n].layer.n_in for n in names}
        large = [f"{name} ({size})" for name, size in sizes.items() if size > MAX_FULL]
        if large:
            raise BoxcovError(
                f"the full Fisher of {join_names(large)} is too large: at most {MAX_FULL} weights "
                "per group"
            )
        return list(names)

    # several processes, and checkpoints

    def _totals(self) -> dict[str, Tensor]:
        return {name: total for name, s in self.sums.items() if (total := s.total) is not None}

    def reduce(self, world: World) -> None:
        """Sum over all ranks, in place."""
        gathered = world.gather(self.full_layers)
        if self.full_layers is None:  # this rank had no item
            self._start(next((names for names in gathered if names is not None), []))
        self.frames = int(world.all_reduce(list(self._totals().values()), [self.frames])[0])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See ``boxcov.kfac.checkpoint.PassSums``."""
        return self._totals(), {"frames": self.frames, "whole": self.full_layers}

    def load_state(self, file: Any, header: Mapping[str, Any]) -> None:
        """See ``boxcov.kfac.checkpoint.PassSums``."""
        full_layers, frames = header["whole"], check_count(header["frames"])
        if full_layers is not None:
            names = [str(name) for name in full_layers]
            check_layer_names(names, self.kfac_posterior.blocks)
            self._start(names)
        for name, total in self._totals().items():
            total.copy_(read_sum(file, name, list(total.shape), total.device))
        if bool(frames) != any(bool(total.any()) for total in self._totals().values()):
            raise ValueError(f"sums of {frames} frames")
        self.frames = frames


def _check_finite(gradients: list[dict[str, Tensor]], batch: int) -> None:
    squares = [
        torch.stack([at_least_float32(d).square().sum().double() for d in each.values()])
        for each in gradients
    ]
    finite = torch.stack(squares).isfinite().all(0)
    if not bool(finite.all()):
        bad = [name for name, ok in zip(gradients[0], finite.tolist()) if not ok]
        raise NotFiniteFrameError(
            f"batch {batch} gives a NaN or infinite gradient at {join_names(bad)}, "
            "though its loss is finite"
        )


def last_layers(posterior: Posterior, losses: FrameLosses, inputs: Any) -> list[str]:
    """Return the layers that the raw outputs depend on and that no other layer follows.

    The autograd graph is cut behind every layer: layers that a later layer's input still depends
    on are followed by it.
    """
    ends: list[tuple[str, Tensor]] = []
    followed: set[str] = set()

    def layers_before(outputs: list[Tensor]) -> set[str]:
        if not outputs or not ends:
            return set()
        grads = torch.autograd.grad(
            outputs, [end for _, end in ends], allow_unused=True, retain_graph=True
        )
        return {name for (name, _), d in zip(ends, grads) if d is not None}

    def run(name: str, call: LayerCall) -> Tensor:
        if call.x.requires_grad:
            followed.update(layers_before([call.x.sum()]))
        end = call().detach().requires_grad_()
        ends.append((name, end))
        return end.clone()  # the detector may change it in place

    aliases = losses.aliases
    names = {id(aliases[block.layer.weight]): name for name, block in posterior.blocks.items()}
    with torch.enable_grad():
        with LayerCallMode(names, run):
            raw = losses.raw(inputs)
        leaves = [t for t in tree_leaves(raw) if isinstance(t, Tensor) and t.requires_grad]
        last = layers_before([t.sum() for t in leaves]) - followed
    return [name for name in dict.fromkeys(name for name, _ in ends) if name in last]
