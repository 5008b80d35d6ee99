"""From frames to a posterior: the offline step, whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from boxcov.curvature.checkpoint import Keeper
from boxcov.curvature.fisher import Accumulator, FisherKind
from boxcov.curvature.inputs import move, ready
from boxcov.curvature.items import Items
from boxcov.curvature.layers import to_matrix
from boxcov.curvature.posterior import Block, Eigen, Form, Posterior
from boxcov.curvature.ranks import Ranks
from boxcov.curvature.scope import chosen_parameters
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning, NotFiniteFrameError
from boxcov.frozen import check_finite_weights, fingerprint, listed

Progress = Callable[[int, int | None], None]
NonFinite = Literal["error", "skip"]
_EMPTY = "the data set is empty: fit needs at least one frame"


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
    seed: int = 0,
    nonfinite: NonFinite = "error",
    checkpoint: str | Path | None = None,
    every: float = 60.0,
    resume: bool = False,
    distributed: bool = False,
    progress: Progress | None = None,
) -> Posterior:
    """The Laplace posterior of the weights of ``detector`` at ``depth``, from ``frames`` of (inputs, targets), any number of frames an item.

    depth: "head", "neck" (neck + head), "backbone" (all three), or a list of module names; ``fixed`` names modules to keep constant.
    n_data: training frames that the Fisher stands for; those seen (all of them, also with a ``fraction``) unless given.
    fisher: "empirical" (the paper), "mc" (targets drawn by the detector: frames may be (inputs, None)), "identity" (a baseline).
    fraction: share of the items to use, drawn with ``seed``.
    form: "eigen" is ``(n F + tau I)^-1`` exactly; "paper" is ``Q^-1 (x) H^-1`` with ``jitter``.
    nonfinite: what to do with an item whose inputs, loss or gradients hold a NaN or an infinity: "error", or "skip" it and count it.
    checkpoint: a file for what was counted so far, written every ``every`` seconds, on SIGINT and SIGTERM, and when something is raised. With
    ``resume`` the fit goes on from it, if it is there, to the same posterior; remove it when the posterior is saved.
    distributed: every process of torch.distributed's default group calls fit alike, counts its share of the items and gets the posterior of
    all of them; each keeps a checkpoint of its own.
    progress: called with the number of items done and their total, or None where that is unknown.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> posterior = fit(TinyCenter(), shapes.frames(count=4), depth="neck", n_data=1000)
    >>> posterior.frames, posterior.n_data
    (4, 1000.0)
    """
    _check_arguments(fisher, fraction, form, nonfinite)
    check_finite_weights(detector)
    chosen = chosen_parameters(detector, depth, fixed)
    accumulator = Accumulator(detector, chosen)
    ranks = Ranks.of_group() if distributed else Ranks()
    items = Items(frames, fraction, seed, ranks)
    settings: dict[str, Any] = {"weights_sha256": fingerprint(detector), "depth": depth if isinstance(depth, str) else ",".join(depth)}
    settings |= {"parameters": list(chosen), "fisher": fisher, "fraction": fraction, "seed": seed, "items": items.size}
    settings |= {} if ranks.alone else {"shard": f"{ranks.rank} of {ranks.count}"}
    keeper = Keeper(ranks.checkpoint(checkpoint), every, resume, settings, accumulator)
    skipped = 0
    if fisher == "identity":
        counted = _discover(accumulator, Items(frames, fraction, seed))
    else:
        generator = torch.Generator(accumulator.device) if fisher == "mc" else None
        with ranks.named(), torch.inference_mode(False), keeper:
            _accumulate(accumulator, items, keeper, generator, seed, nonfinite, progress)
            if not ranks.alone:
                keeper.save()  # another rank may die while this one waits for it
        done, skipped = ranks.reduce(accumulator, ranks.items(keeper.next), len(keeper.skipped))
        _check_counted(accumulator, skipped)
        counted = accumulator.frames, done - skipped
    return Posterior(
        blocks=_blocks(accumulator, chosen, identity=fisher == "identity"),
        n_data=float(items.all_frames(*counted) if n_data is None else n_data),
        prior_precision=prior_precision,
        fisher=fisher,
        frames=accumulator.frames,
        loss=accumulator.loss / max(accumulator.frames, 1),
        fingerprint=settings["weights_sha256"],
        depth=settings["depth"],
        form=form,
        jitter=jitter,
        skipped=skipped,
    )


def _discover(accumulator: Accumulator, items: Items) -> tuple[int, int]:
    """The layers, from one item: its frames, and that it is one."""
    for number, item in items.after(0):
        inputs = ready(_pair(item, number)[0], accumulator.device, f"inputs of batch {number}")
        with torch.inference_mode(False):
            accumulator.discover(inputs)
        return _frames_in(inputs), 1
    raise BoxcovError(_EMPTY)


def _accumulate(
    accumulator: Accumulator,
    items: Items,
    keeper: Keeper,
    generator: torch.Generator | None,
    seed: int,
    nonfinite: NonFinite,
    progress: Progress | None,
) -> None:
    for number, item in keeper.items(items):
        given, targets = _pair(item, number)
        if generator is not None:  # each item draws for itself, wherever a run begins
            generator.manual_seed(1_000_003 * seed + number)
        try:
            inputs = ready(given, accumulator.device, f"inputs of batch {number}")
            accumulator.add(inputs, move(targets, accumulator.device), generator, number)
        except NotFiniteFrameError as error:
            if nonfinite == "error":
                raise NotFiniteFrameError(f"{error}{_tokens(targets)}. Mend it, or leave such frames out with nonfinite='skip'") from None
            keeper.skipped.append(number)
            warn(f"{error}{_tokens(targets)}: left out", BoxcovWarning, stacklevel=3)
        keeper.counted(number, item)
        if progress is not None:
            progress(number + 1, items.expected)


def _tokens(targets: Any) -> str:
    """The frames of a batch as the data set calls them, where it says so."""
    known = [target["token"] for target in targets if isinstance(target, dict) and "token" in target] if isinstance(targets, list) else []
    return f" ({listed(known)})" if known else ""


def _frames_in(inputs: Any) -> int:
    """Frames of one item, for a Fisher that needs no loss to tell: the length of its list, or of its first tensor."""
    if isinstance(inputs, (list, tuple)):
        return len(inputs)
    return len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))


def _check_arguments(fisher: str, fraction: float, form: str, nonfinite: str) -> None:
    if nonfinite not in get_args(NonFinite):
        raise BoxcovError(f"nonfinite must be one of {', '.join(get_args(NonFinite))}, got {nonfinite!r}")
    if fisher not in get_args(FisherKind):
        raise BoxcovError(f"fisher must be one of {', '.join(get_args(FisherKind))}, got {fisher!r}")
    if form not in get_args(Form):
        raise BoxcovError(f"form must be one of {', '.join(get_args(Form))}, got {form!r}")
    if not 0 < fraction <= 1:
        raise BoxcovError(f"fraction must be above 0 and at most 1, got {fraction}")


def _pair(item: Any, batch: int) -> tuple[Any, Any]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise BoxcovError(f"frames must give pairs (inputs, targets); item {batch} is a {type(item).__name__}")
    return item[0], item[1]


def _check_counted(accumulator: Accumulator, skipped: int) -> None:
    if not accumulator.frames:
        raise BoxcovError(f"all {skipped} items hold a NaN or an infinity: nothing is left to fit to" if skipped else _EMPTY)
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
            Q, H = sums.Q / sums.locations, sums.H / accumulator.frames
        known = next((eigen for matrix, eigen in shared if matrix.shape == Q.shape and torch.equal(matrix, Q)), None)
        if known is None:
            known = Eigen.of(Q, dtype)
            shared.append((Q, known))
        bias = None if layer.bias is None else chosen[layer.bias].detach().double()
        norm = to_matrix(weight.detach().double(), bias, layer.geometry).square().sum()
        blocks[layer.name] = Block(layer, known, Eigen.of(H, dtype), float(norm))
    return blocks
