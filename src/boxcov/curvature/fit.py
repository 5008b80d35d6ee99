"""From frames to a posterior: the offline step, whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, get_args
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from boxcov.curvature.blocks import Block, Eigen
from boxcov.curvature.fisher import Accumulator, FisherKind, Locations
from boxcov.curvature.inputs import pairs
from boxcov.curvature.layers import to_matrix
from boxcov.curvature.losses import Weight
from boxcov.curvature.posterior import Form, Posterior
from boxcov.curvature.refine import check_names, refined
from boxcov.curvature.scope import chosen_parameters
from boxcov.data.frame import Batches
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.frozen import check_finite_weights, fingerprint, listed

Progress = Callable[[int, int | None], None]


def fit(
    detector: Detector,
    frames: Iterable[Any],
    depth: str | Sequence[str] = "head",
    n_data: float | None = None,
    prior_precision: float = 1.0,
    fisher: FisherKind = "empirical",
    *,
    fraction: float = 1.0,
    fixed: Sequence[str] = (),
    form: Form = "eigen",
    jitter: float = 1e-6,
    locations: Locations = "all",
    corrected: bool = False,
    full: str | Sequence[str] = (),
    weight: Weight | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Posterior:
    """The Laplace posterior of the weights of ``detector`` at ``depth``, from ``frames`` of (inputs, targets), any number of frames an item.

    depth: "head", "neck" (neck + head), "backbone" (all three), or a list of module names; ``fixed`` names modules to keep constant.
    n_data: training frames that the Fisher stands for; those seen (all of them, also with a ``fraction``) unless given.
    fisher: "empirical" (the paper), "mc" (targets drawn by the detector: frames may be (inputs, None)), "identity" (a baseline).
    fraction: share of the items to use, drawn with ``seed``.
    form: "eigen" is ``(n F + tau I)^-1`` exactly; "paper" is ``Q^-1 (x) H^-1`` with ``jitter``.
    locations: take the input factor Q over "all" locations alike, or weigh each by its squared "gradient": the box loss lives on few cells.
    corrected: the eigenvalue correction (EKFAC), by a second pass over the frames; ``full``: names of small layers, or "last", to keep the whole
    Fisher of, by the same pass. See ``boxcov.curvature.refine``.
    weight: from the targets of an item to a weight of each of its frames' losses, such as the number of objects that the loss was divided by.
    progress: called with the number of items done and their total, or None where that is unknown; two passes are twice as many.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> posterior = fit(TinyCenter(), shapes.frames(count=4), depth="neck", n_data=1000)
    >>> posterior.frames, posterior.n_data
    (4, 1000.0)
    """
    _check_arguments(fisher, fraction, form, locations)
    check_finite_weights(detector)
    chosen = chosen_parameters(detector, depth, fixed)
    twice = corrected or len(full) > 0
    if twice:
        _check_second_pass(frames, fisher, form)
        check_names(full, [name.removesuffix(".weight") for name in chosen if not name.endswith(".bias")])
    accumulator = Accumulator(detector, chosen, locations, weight)
    device = next(iter(chosen.values())).device
    generator = torch.Generator(device).manual_seed(seed) if fisher == "mc" else None
    taken = _Taken(frames, fraction, seed)
    expected = None if taken.expected is None else taken.expected * (1 + twice)
    with torch.inference_mode(False):
        for batch, inputs, targets in pairs(taken, device):
            if fisher == "identity":
                accumulator.discover(inputs)
                break
            accumulator.add(inputs, targets, generator, batch)
            if progress is not None:
                progress(batch + 1, expected)
    if not accumulator.sums:
        raise BoxcovError("the data set is empty: fit needs at least one frame")
    if fisher != "identity":
        _check_reached(accumulator)
    if n_data is None:
        n_data = taken.all_frames(_frames_in(inputs) if fisher == "identity" else accumulator.frames)
    posterior = Posterior(
        blocks=_blocks(accumulator, chosen, identity=fisher == "identity"),
        n_data=float(n_data),
        prior_precision=prior_precision,
        fisher=fisher,
        frames=accumulator.frames,
        loss=accumulator.loss / max(accumulator.frames, 1),
        fingerprint=fingerprint(detector),
        depth=depth if isinstance(depth, str) else ",".join(depth),
        form=form,
        jitter=jitter,
        locations=locations,
    )
    if not twice:
        return posterior
    again = None if progress is None else lambda done, _: progress(taken.used + done, expected)
    return refined(
        posterior, detector, _Taken(frames, fraction, seed), correct=corrected, full=full, weight=weight, seed=seed, progress=again
    )


class _Taken:
    """The items of ``frames`` that a share of the data means."""

    def __init__(self, frames: Iterable[Any], fraction: float, seed: int) -> None:
        self.frames, self.fraction = frames, fraction
        self.seen = self.used = 0
        self.done = False  # whether a stream was read to its end
        self.order: list[int] | None = None
        size = len(frames) if isinstance(frames, Sized) else None
        self.expected: int | None = None if size is None else max(1, round(fraction * size)) if size else 0
        if size and fraction < 1 and hasattr(frames, "__getitem__"):
            generator = torch.Generator().manual_seed(seed)
            self.order = sorted(torch.randperm(size, generator=generator)[: self.expected].tolist())
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        if self.order is not None:  # only what is used is ever read
            for i in self.order:
                self.used += 1
                yield self.frames[i]  # type: ignore[index]
            return
        for item in self.frames:  # a stream: evenly spread, the first one always
            self.seen += 1
            if self.used < round(self.seen * self.fraction, 9):
                self.used += 1
                yield item
        self.done = True

    def all_frames(self, used: int) -> int:
        """The frames of the whole data set, of which the items used hold ``used``: exact for equal items and for ``boxcov.data.batched``."""
        if isinstance(self.frames, Batches):
            return len(self.frames.frames)
        items = self.seen if self.size is None else self.size
        if self.size is None and not self.done:
            raise BoxcovError("fisher='identity' reads one item, and this data set has no length: give n_data, the number of its frames")
        return round(used * items / self.used)


def _frames_in(inputs: Any) -> int:
    """Frames of one item, for a Fisher that needs no loss to tell: the length of its list, or of its first tensor."""
    if isinstance(inputs, (list, tuple)):
        return len(inputs)
    return len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))


def _check_arguments(fisher: str, fraction: float, form: str, locations: str) -> None:
    for name, given, kinds in (("fisher", fisher, FisherKind), ("form", form, Form), ("locations", locations, Locations)):
        if given not in get_args(kinds):
            raise BoxcovError(f"{name} must be one of {', '.join(get_args(kinds))}, got {given!r}")
    if not 0 < fraction <= 1:
        raise BoxcovError(f"fraction must be above 0 and at most 1, got {fraction}")


def _check_second_pass(frames: Iterable[Any], fisher: str, form: str) -> None:
    """Before the first pass, not after it."""
    if isinstance(frames, Iterator):
        raise BoxcovError(
            f"corrected and full read the frames twice, and a {type(frames).__name__} can be read once: give a list or a sequence"
        )
    if fisher == "identity":
        raise BoxcovError("corrected and full go with a Fisher of gradients: fisher='identity' has none")
    if form == "paper":
        raise BoxcovError("corrected and full go with the form 'eigen': the paper's form is Q^-1 (x) H^-1 alone")


def _check_reached(accumulator: Accumulator) -> None:
    unseen = [name for name, sums in accumulator.sums.items() if not sums.locations]
    if unseen:
        raise BoxcovError(
            f"{listed(unseen)} never saw a single location in {accumulator.frames} frames: give frames with something in them"
        )
    cut_off = [name for name, sums in accumulator.sums.items() if not sums.reached]
    if cut_off:
        modules = [accumulator.sums[name].layer.name for name in cut_off]
        raise BoxcovError(
            f"the loss has no gradient for {listed(cut_off)}: nothing can be learned of them. "
            f"Keep them as constants with fixed={modules!r}, or let loss() use what they produce"
        )
    flat = [name for name, sums in accumulator.sums.items() if not bool(sums.H.any())]
    if flat:
        warn(
            f"the loss of {accumulator.frames} frames has a zero gradient for {listed(flat)}: the posterior there is the prior",
            BoxcovWarning,
            stacklevel=3,
        )


def _blocks(accumulator: Accumulator, chosen: dict[str, nn.Parameter], identity: bool) -> dict[str, Block]:
    shared: list[tuple[Tensor, Eigen]] = []  # layers that read the same tensor have the same Q, bit for bit
    blocks = {}
    for sums in accumulator.sums.values():
        layer = sums.layer
        weight = chosen[layer.weight]
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        if identity:
            Q, H = (torch.eye(len(M[0]), device=M.device).expand_as(M) for M in (sums.Q, sums.H))
        else:
            Q, H = sums.factors(accumulator.frames, accumulator.by_gradient)
        known = next((eigen for matrix, eigen in shared if matrix.shape == Q.shape and torch.equal(matrix, Q)), None)
        if known is None:
            known = Eigen.of(Q, dtype)
            shared.append((Q, known))
        bias = None if layer.bias is None else chosen[layer.bias].detach().double()
        norm = to_matrix(weight.detach().double(), bias, layer.geometry).square().sum()
        blocks[layer.name] = Block(layer, known, Eigen.of(H, dtype), float(norm))
    return blocks
