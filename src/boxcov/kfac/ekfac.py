"""EKFAC: better eigenvalues for a Kronecker-factored posterior, by a second pass over the frames.

With G_f the gradient matrix of frame f's loss, KFAC approximates the Fisher, the mean over frames
of ``vec(G_f) vec(G_f)^T``, by ``Q (x) H``. EKFAC keeps the eigenbases U of Q and V of H and
replaces the eigenvalues m_a l_b by the second moments of the gradients in that basis,

    lambda_ab = mean over frames of (V^T G_f U)_ab^2.

This is the diagonal of the Fisher in that basis, and so the nearest to the Fisher, in Frobenius
norm, of all matrices that are diagonal in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from boxcov._torch.distributed import World
from boxcov._torch.process_state import at_least_float32, full_precision
from boxcov.errors import BoxcovError, NotFiniteFrameError, join_names
from boxcov.kfac.checkpoint import check_count, read_sum
from boxcov.kfac.losses import FrameLosses
from boxcov.posterior.posterior import Posterior


class GradientMoments:
    """Sums the second moments of the frames' gradients in the eigenbases of ``posterior``.

    There is one backward pass per frame over its whole batch: batches of one frame are the fastest.
    """

    def __init__(self, posterior: Posterior, losses: FrameLosses) -> None:
        self.kfac_posterior, self.losses = posterior, losses
        self.device = losses.device
        self.frames = 0
        self.squares = {  # (G, n_out, n_in) sums of (V^T G_f U)^2 over frames, by layer
            name: torch.zeros_like(block.curvature, dtype=torch.float64)
            for name, block in posterior.blocks.items()
        }

    def settings(self) -> dict[str, Any]:
        """Return what decides the sums, for a checkpoint; moments depend on the eigenbases."""
        digest = sha256()
        for block in self.kfac_posterior.blocks.values():
            for factor in (block.Q, block.H):
                digest.update(factor.vectors.cpu().numpy().tobytes())
        return {"basis": digest.hexdigest()}

    def terms(self, inputs: Any, targets: Any, number: int) -> list[dict[str, Tensor]]:
        """Return what one item adds: the gradients of each of its frames, by parameter."""
        names, weights = zip(*self.losses.aliases.items())
        with torch.enable_grad():
            raw = self.losses.raw(inputs)
            losses = self.losses.compute(raw, inputs, targets, number).unbind()
        gradients = []
        for frame, loss in enumerate(losses):
            more = frame + 1 < len(losses)
            grads = torch.autograd.grad(loss, weights, retain_graph=more, materialize_grads=True)
            gradients.append(dict(zip(names, grads)))
        _check_finite(gradients, number)
        return gradients

    @full_precision()
    def add(self, terms: list[dict[str, Tensor]]) -> None:
        """Add the terms of one item to the sums."""
        for gradients in terms:
            for name, block in self.kfac_posterior.blocks.items():
                gradient = block.layer.matrix(gradients).to(block.Q.vectors)
                self.squares[name] += block.rotate(gradient).double().square()
        self.frames += len(terms)

    def posterior(self) -> Posterior:
        """Return the posterior with the corrected eigenvalues."""
        if not self.frames:
            raise BoxcovError("the frames of the first pass are not there for the second one")
        blocks = {}
        for name, block in self.kfac_posterior.blocks.items():
            mean = self.squares[name] / self.frames
            blocks[name] = replace(block, ekfac_eigenvalues=mean.to(block.Q.values.dtype))
        return replace(self.kfac_posterior, blocks=blocks)

    # several processes, and checkpoints

    def reduce(self, world: World) -> None:
        """Sum over all ranks, in place."""
        self.frames = int(world.all_reduce(list(self.squares.values()), [self.frames])[0])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of a checkpoint by name, and the rest of the state as JSON."""
        return self.squares, {"frames": self.frames}

    def load_state(self, file: Any, header: Mapping[str, Any]) -> None:
        """Restore the state from an open safetensors file; raise ValueError if it does not fit."""
        frames = check_count(header["frames"])
        for name, total in self.squares.items():
            total.copy_(read_sum(file, name, list(total.shape), total.device))
        if bool(frames) != any(bool(total.any()) for total in self.squares.values()):
            raise ValueError(f"sums of {frames} frames")
        self.frames = frames


def _check_finite(gradients: list[dict[str, Tensor]], number: int) -> None:
    squares = [
        torch.stack([at_least_float32(d).square().sum().double() for d in each.values()])
        for each in gradients
    ]
    finite = torch.stack(squares).isfinite().all(0)
    if not bool(finite.all()):
        bad = [name for name, ok in zip(gradients[0], finite.tolist()) if not ok]
        raise NotFiniteFrameError(
            f"item {number} gives a NaN or infinite gradient at {join_names(bad)}, "
            "though its loss is finite"
        )
