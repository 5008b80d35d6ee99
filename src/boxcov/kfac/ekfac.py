"""What a second pass over the frames adds to a Kronecker-factored posterior.

With G_f the gradient matrix of frame f's own loss, KFAC takes the mean over frames of ``vec(G_f) vec(G_f)^T`` to be ``Q (x) H``. The eigenvalue
correction (EKFAC) keeps the eigenbases U and V of Q and H, and replaces the eigenvalues m_a l_b by the second moments that the gradients
really have there,

    lambda_ab = mean over frames of (V^T G_f U)_ab^2:

the diagonal of the Fisher in that basis, and so, of all matrices that are diagonal in it, the nearest to the Fisher in Frobenius norm. Of a
small layer the whole Fisher may be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from boxcov._torch.distributed import World
from boxcov._torch.fingerprint import check_fingerprint
from boxcov._torch.inputs import pairs
from boxcov._torch.layer_calls import LayerCall, LayerCallMode
from boxcov._torch.precision import at_least_float32, full_precision
from boxcov._torch.unfold import to_matrix
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, NotFiniteFrameError, join_names
from boxcov.kfac.counts import sums_in, whole
from boxcov.kfac.losses import Losses, Weight, seeded
from boxcov.posterior.kronecker_block import Eigendecomposition, KroneckerBlock
from boxcov.posterior.posterior import Posterior

WIDEST = 4096  # weights of a group whose Fisher may be kept whole


def apply_ekfac(
    posterior: Posterior,
    detector: Detector,
    frames: Iterable[Any],
    *,
    correct: bool = True,
    full: str | Sequence[str] = (),
    weight: Weight | None = None,
    seed: int = 0,
    progress: Callable[[int, int | None], None] | None = None,
) -> Posterior:
    """``posterior`` with what the gradients of single frames say: pass the ``frames``, and the ``weight``, that it was fitted to.

    correct: put the gradients' own second moments in the place of the eigenvalues m_a l_b (EKFAC).
    full: names of layers to keep the whole Fisher of, each group by itself, or "last" for those that no other layer of the posterior follows.
    seed: of the targets that the detector draws, for a posterior of fisher="mc".

    One backward pass a frame over its batch: batches of one frame cost least.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> detector, frames = TinyCenter(), shapes.frames(count=4)
    >>> posterior = apply_ekfac(boxcov.fit(detector, frames), detector, frames, full=["head.branches.size.3"])
    >>> posterior.blocks["head.shared.0"].corrected.shape, posterior.blocks["head.branches.size.3"].full.values.shape
    (torch.Size([1, 16, 288]), torch.Size([1, 290]))
    """
    moments = Moments(posterior, detector, correct, full, weight)
    total = len(frames) if isinstance(frames, Sized) else None
    with torch.inference_mode(False):
        for batch, inputs, targets in pairs(frames, moments.device):
            moments.add(inputs, targets, batch, seed)
            if progress is not None:
                progress(batch + 1, total)
    return moments.posterior()


@dataclass
class _Sum:
    """What has been seen of one layer, in float64."""

    block: KroneckerBlock
    squares: Tensor | None = None  # (G, n_out, n_in) in the eigenbasis of Q and H
    products: Tensor | None = None  # (G, w, w)

    @property
    def total(self) -> Tensor | None:
        return self.products if self.squares is None else self.squares


class Moments:
    """Second moments of the frames' gradients, in the bases of ``posterior``: what a second pass counts."""

    def __init__(
        self,
        posterior: Posterior,
        detector: Detector,
        correct: bool = True,
        full: str | Sequence[str] = (),
        weight: Weight | None = None,
    ) -> None:
        if posterior.fisher == "identity":
            raise BoxcovError(
                "the identity Fisher comes from no gradients, and there is nothing to refine: fit with fisher='empirical' or 'mc'"
            )
        if posterior.error:
            raise BoxcovError(
                "the small eigenvectors of a truncated posterior are gone, and there is nothing to correct: refine the whole one"
            )
        check_fingerprint(posterior.fingerprint, detector, "refining")
        parameters = dict(detector.named_parameters())
        self.known, self.correct, self.full = posterior, correct, full
        self.losses = Losses(
            detector, {name: parameters[name] for name in posterior.parameters}, weight
        )
        self.device = next(iter(self.losses.aliases.values())).device
        self.generator = torch.Generator(self.device) if posterior.fisher == "mc" else None
        self.frames = 0
        self.torn = False  # whether part of a batch is in the sums
        self.whole: list[str] | None = (
            None  # the layers whose Fisher is kept whole, once they are known
        )
        self.sums: dict[str, _Sum] = {}

    def begin(self, whole: list[str]) -> None:
        """Nothing seen so far."""
        self.whole = whole
        for name, block in self.known.blocks.items():
            G, w = block.layer.geometry.groups, block.layer.n_out * block.layer.n_in
            plain = replace(
                block, corrected=None, full=None
            )  # so that a posterior can be refined again
            zeros = torch.zeros((), dtype=torch.float64, device=self.known.device)
            if name in whole:
                self.sums[name] = _Sum(plain, products=zeros.repeat(G, w, w))
            elif self.correct:
                self.sums[name] = _Sum(
                    plain, squares=zeros.repeat(G, block.layer.n_out, block.layer.n_in)
                )
            else:
                self.sums[name] = _Sum(block)

    def totals(self) -> dict[str, Tensor]:
        """The sums of the layers that have any."""
        return {name: total for name, s in self.sums.items() if (total := s.total) is not None}

    def add(self, inputs: Any, targets: Any, batch: int, seed: int) -> None:
        """One batch: it counts whole or not at all."""
        if self.whole is None:
            self.begin(_chosen(self.full, self.known, self.losses, inputs))
        aliases = self.losses.aliases
        generator = seeded(self.generator, seed, batch)
        with torch.enable_grad():
            losses = self.losses.of(
                self.losses.raw(inputs), inputs, targets, generator, batch
            ).unbind()
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
        self.torn = True
        for each in gradients:
            self._add_frame(each)
        self.frames += len(losses)
        self.torn = False

    @full_precision
    def _add_frame(self, gradients: dict[str, Tensor]) -> None:
        for sums in self.sums.values():
            layer = sums.block.layer
            bias = None if layer.bias is None else at_least_float32(gradients[layer.bias])
            matrix = to_matrix(at_least_float32(gradients[layer.weight]), bias, layer.geometry).to(
                sums.block.Q.vectors
            )  # (G, n_out, n_in)
            if sums.squares is not None:
                sums.squares += sums.block.rotate(matrix).double().square()
            if sums.products is not None:
                flat = matrix.flatten(1).double()
                sums.products += flat.unsqueeze(2) * flat.unsqueeze(1)

    def posterior(self) -> Posterior:
        """The one known, with what was seen."""
        if not self.frames:
            raise BoxcovError(
                "the data set is empty: a second pass needs at least one frame; a stream can be read only once"
            )
        found = {}
        for name, sums in self.sums.items():
            dtype = sums.block.Q.values.dtype
            corrected = None if sums.squares is None else (sums.squares / self.frames).to(dtype)
            full = (
                None
                if sums.products is None
                else Eigendecomposition.of(sums.products / self.frames, dtype)
            )
            touched = corrected is not None or full is not None
            found[name] = (
                replace(sums.block, corrected=corrected, full=full) if touched else sums.block
            )
        return replace(self.known, blocks=found, form="eigen", calibration=None)

    # in a file, and over processes

    def basis(self) -> str:
        """SHA-256 of the eigenbases: sums in others mean something else."""
        found = sha256()
        for block in self.known.blocks.values():
            for factor in (block.Q, block.H):
                found.update(factor.vectors.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See ``boxcov.kfac.counts.Counts``."""
        return self.totals(), {"frames": self.frames, "whole": self.whole}

    def unpack(self, file: Any, about: Mapping[str, Any]) -> None:
        whole_layers, frames = about["whole"], whole(about["frames"])
        if whole_layers is not None:
            check_names([str(name) for name in whole_layers], self.known.blocks)
            self.begin([str(name) for name in whole_layers])
        for name, total in self.totals().items():
            total.copy_(sums_in(file, name, list(total.shape), total.device))
        if bool(frames) != any(bool(total.any()) for total in self.totals().values()):
            raise ValueError(f"sums of {frames} frames")
        self.frames = frames

    def reduce(self, world: World) -> None:
        """The sums of all ranks, into those of every one."""
        if self.whole is None:  # no item was this rank's
            self.begin(next((names for names in world.gather(None) if names is not None), []))
        else:
            world.gather(self.whole)
        self.frames = int(world.all_reduce(list(self.totals().values()), [self.frames])[0])


def _check_finite(gradients: list[dict[str, Tensor]], batch: int) -> None:
    squares = [
        torch.stack([at_least_float32(d).square().sum().double() for d in each.values()])
        for each in gradients
    ]
    finite = torch.stack(squares).isfinite().all(0)
    if not bool(finite.all()):
        bad = [name for name, ok in zip(gradients[0], finite.tolist()) if not ok]
        raise NotFiniteFrameError(
            f"batch {batch} gives a NaN or infinite gradient at {join_names(bad)}, though its loss is finite"
        )


def _chosen(
    full: str | Sequence[str], posterior: Posterior, losses: Losses, inputs: Any
) -> list[str]:
    """The layers whose Fisher is kept whole, checked."""
    check_names(full, posterior.blocks)
    if full == "last":
        full = last_layers(posterior, losses, inputs)
    layers = {name: posterior.blocks[name].layer for name in full}
    wide = [
        f"{name} ({layer.n_out * layer.n_in})"
        for name, layer in layers.items()
        if layer.n_out * layer.n_in > WIDEST
    ]
    if wide:
        raise BoxcovError(
            f"the whole Fisher of {join_names(wide)} is too large: at most {WIDEST} weights a group"
        )
    return list(full)


def check_names(full: str | Sequence[str], known: Iterable[str]) -> None:
    """Refuse names of layers that are not ``known``.

    >>> check_names("last", ["head.0"]), check_names(["head.0"], ["head.0"])
    (None, None)
    """
    if full == "last":
        return
    if isinstance(full, str):
        raise BoxcovError(
            f"full must be 'last' or a list of layer names, got the string {full!r}: write full=[{full!r}]"
        )
    known = list(known)
    lost = [name for name in full if name not in known]
    if lost:
        raise BoxcovError(
            f"full names {join_names(lost)}, which the posterior does not hold: it has {join_names(known)}"
        )


def last_layers(posterior: Posterior, losses: Losses, inputs: Any) -> list[str]:
    """The layers of the posterior that the raw outputs depend on and that no other follows.

    Found by cutting the graph behind every layer: what a layer's input still depends on is followed by it.
    """
    ends: list[tuple[str, Tensor]] = []
    followed: set[str] = set()

    def behind(numbers: list[Tensor]) -> set[str]:
        grads = (
            torch.autograd.grad(
                numbers, [end for _, end in ends], allow_unused=True, retain_graph=True
            )
            if numbers and ends
            else []
        )
        return {name for (name, _), d in zip(ends, grads) if d is not None}

    def run(name: str, call: LayerCall) -> Tensor:
        if call.x.requires_grad:
            followed.update(behind([call.x.sum()]))
        end = call().detach().requires_grad_()
        ends.append((name, end))
        return end.clone()  # so that it may be worked on in place

    names = {
        id(losses.aliases[block.layer.weight]): name for name, block in posterior.blocks.items()
    }
    with torch.enable_grad():
        with LayerCallMode(names, run):
            raw = losses.raw(inputs)
        found = (
            behind([t.sum() for t in tree_leaves(raw) if isinstance(t, Tensor) and t.requires_grad])
            - followed
        )
    return [name for name in dict.fromkeys(name for name, _ in ends) if name in found]
