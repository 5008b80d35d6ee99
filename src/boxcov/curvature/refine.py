"""What a second pass over the frames adds to a Kronecker-factored posterior.

With G_f the gradient matrix of frame f's own loss, KFAC takes the mean over frames of ``vec(G_f) vec(G_f)^T`` to be ``Q (x) H``. The eigenvalue
correction (EKFAC) keeps the eigenbases U and V of Q and H, and replaces the eigenvalues m_a l_b by the second moments that the gradients
really have there,

    lambda_ab = mean over frames of (V^T G_f U)_ab^2:

the diagonal of the Fisher in that basis, and so, of all matrices that are diagonal in it, the nearest to the Fisher in Frobenius norm. Of a
small layer the whole Fisher may be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from boxcov.curvature.blocks import Block, Eigen
from boxcov.curvature.calls import Call, Watch
from boxcov.curvature.fisher import at_least_float32, full_precision
from boxcov.curvature.inputs import pairs
from boxcov.curvature.layers import to_matrix
from boxcov.curvature.losses import Losses, Weight, seeded
from boxcov.curvature.posterior import Posterior
from boxcov.curvature.storage import check_fingerprint
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.frozen import listed

WIDEST = 4096  # weights of a group whose Fisher may be kept whole


def refined(
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
    >>> posterior = refined(boxcov.fit(detector, frames), detector, frames, full=["head.branches.size.3"])
    >>> posterior.blocks["head.shared.0"].corrected.shape, posterior.blocks["head.branches.size.3"].full.values.shape
    (torch.Size([1, 16, 288]), torch.Size([1, 290]))
    """
    if posterior.fisher == "identity":
        raise BoxcovError(
            "the identity Fisher comes from no gradients, and there is nothing to refine: fit with fisher='empirical' or 'mc'"
        )
    if posterior.error:
        raise BoxcovError("the small eigenvectors of a truncated posterior are gone, and there is nothing to correct: refine the whole one")
    check_fingerprint(posterior.fingerprint, detector, "refining")
    parameters = dict(detector.named_parameters())
    losses = Losses(detector, {name: parameters[name] for name in posterior.parameters}, weight)
    device = next(iter(losses.aliases.values())).device
    generator = torch.Generator(device) if posterior.fisher == "mc" else None
    moments: _Moments | None = None
    total = len(frames) if isinstance(frames, Sized) else None
    with torch.inference_mode(False):
        for batch, inputs, targets in pairs(frames, device):
            if moments is None:
                moments = _Moments(posterior, losses, _chosen(full, posterior, losses, inputs), correct)
            moments.add(inputs, targets, seeded(generator, seed, batch), batch)
            if progress is not None:
                progress(batch + 1, total)
    if moments is None:
        raise BoxcovError("the data set is empty: a second pass needs at least one frame; a stream can be read only once")
    return replace(posterior, blocks=moments.blocks(), form="eigen", calibration=None)


@dataclass
class _Sum:
    """What has been seen of one layer, in float64."""

    block: Block
    squares: Tensor | None = None  # (G, n_out, n_in) in the eigenbasis of Q and H
    products: Tensor | None = None  # (G, w, w)


class _Moments:
    """Second moments of the frames' gradients."""

    def __init__(self, posterior: Posterior, losses: Losses, full: list[str], correct: bool) -> None:
        self.losses, self.frames = losses, 0
        self.sums: dict[str, _Sum] = {}
        for name, block in posterior.blocks.items():
            G, w = block.layer.geometry.groups, block.layer.n_out * block.layer.n_in
            plain = replace(block, corrected=None, full=None)  # so that a posterior can be refined again
            zeros = torch.zeros((), dtype=torch.float64, device=posterior.device)
            if name in full:
                self.sums[name] = _Sum(plain, products=zeros.repeat(G, w, w))
            elif correct:
                self.sums[name] = _Sum(plain, squares=zeros.repeat(G, block.layer.n_out, block.layer.n_in))
            else:
                self.sums[name] = _Sum(block)

    def add(self, inputs: Any, targets: Any, generator: torch.Generator | None, batch: int) -> None:
        aliases = self.losses.aliases
        with torch.enable_grad():
            losses = self.losses.of(self.losses.raw(inputs), inputs, targets, generator, batch).unbind()
        for frame, loss in enumerate(losses):
            grads = torch.autograd.grad(loss, list(aliases.values()), allow_unused=True, retain_graph=frame + 1 < len(losses))
            self._add_frame({name: torch.zeros_like(p) if d is None else d for (name, p), d in zip(aliases.items(), grads)})
        self.frames += len(losses)
        sums = {name: total for name, s in self.sums.items() for total in (s.squares, s.products) if total is not None}
        finite = torch.stack([total.sum() for total in sums.values()]).isfinite() if sums else torch.ones(1)
        if not bool(finite.all()):
            bad = [name for name, ok in zip(sums, finite.tolist()) if not ok]
            raise BoxcovError(f"batch {batch} gives a NaN or infinite gradient at {listed(bad)}, though its loss is finite")

    @full_precision
    def _add_frame(self, gradients: dict[str, Tensor]) -> None:
        for sums in self.sums.values():
            layer = sums.block.layer
            bias = None if layer.bias is None else at_least_float32(gradients[layer.bias])
            matrix = to_matrix(at_least_float32(gradients[layer.weight]), bias, layer.geometry).to(sums.block.Q.vectors)  # (G, n_out, n_in)
            if sums.squares is not None:
                sums.squares += sums.block.rotate(matrix).double().square()
            if sums.products is not None:
                flat = matrix.flatten(1).double()
                sums.products += flat.unsqueeze(2) * flat.unsqueeze(1)

    def blocks(self) -> dict[str, Block]:
        found = {}
        for name, sums in self.sums.items():
            dtype = sums.block.Q.values.dtype
            corrected = None if sums.squares is None else (sums.squares / self.frames).to(dtype)
            full = None if sums.products is None else Eigen.of(sums.products / self.frames, dtype)
            touched = corrected is not None or full is not None
            found[name] = replace(sums.block, corrected=corrected, full=full) if touched else sums.block
        return found


def _chosen(full: str | Sequence[str], posterior: Posterior, losses: Losses, inputs: Any) -> list[str]:
    """The layers whose Fisher is kept whole, checked."""
    check_names(full, posterior.blocks)
    if full == "last":
        full = last_layers(posterior, losses, inputs)
    layers = {name: posterior.blocks[name].layer for name in full}
    wide = [f"{name} ({layer.n_out * layer.n_in})" for name, layer in layers.items() if layer.n_out * layer.n_in > WIDEST]
    if wide:
        raise BoxcovError(f"the whole Fisher of {listed(wide)} is too large: at most {WIDEST} weights a group")
    return list(full)


def check_names(full: str | Sequence[str], known: Iterable[str]) -> None:
    """Refuse names of layers that are not ``known``.

    >>> check_names("last", ["head.0"]), check_names(["head.0"], ["head.0"])
    (None, None)
    """
    if full == "last":
        return
    if isinstance(full, str):
        raise BoxcovError(f"full must be 'last' or a list of layer names, got the string {full!r}: write full=[{full!r}]")
    known = list(known)
    lost = [name for name in full if name not in known]
    if lost:
        raise BoxcovError(f"full names {listed(lost)}, which the posterior does not hold: it has {listed(known)}")


def last_layers(posterior: Posterior, losses: Losses, inputs: Any) -> list[str]:
    """The layers of the posterior from which a way leads to the raw outputs that passes no other.

    Found by cutting the graph behind every layer: what the outputs still depend on is the last.
    """
    ends: list[tuple[str, Tensor]] = []

    def run(name: str, call: Call) -> Tensor:
        end = call().detach().requires_grad_()
        ends.append((name, end))
        return end.clone()  # so that it may be worked on in place

    names = {id(losses.aliases[block.layer.weight]): name for name, block in posterior.blocks.items()}
    with torch.enable_grad():
        with Watch(names, run):
            raw = losses.raw(inputs)
        outputs = [t.sum() for t in tree_leaves(raw) if isinstance(t, Tensor) and t.requires_grad]
        grads = torch.autograd.grad(outputs, [end for _, end in ends], allow_unused=True) if outputs else []
    return list(dict.fromkeys(name for (name, _), d in zip(ends, grads) if d is not None))
