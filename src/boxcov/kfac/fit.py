"""From frames to a posterior: the offline step, whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from boxcov._torch.distributed import World
from boxcov._torch.fingerprint import check_finite_weights, fingerprint
from boxcov._torch.inputs import move, ready
from boxcov._torch.unfold import to_matrix
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning, NotFiniteFrameError, join_names
from boxcov.kfac.accumulate import Accumulator
from boxcov.kfac.checkpoint import Keeper, check
from boxcov.kfac.counts import FactorCounts
from boxcov.kfac.ekfac import Moments, check_names
from boxcov.kfac.items import Items
from boxcov.kfac.losses import Weight, seeded
from boxcov.kfac.subset import chosen_parameters
from boxcov.posterior.kronecker_block import Eigendecomposition, KroneckerBlock
from boxcov.posterior.posterior import FisherKind, Form, Locations, Posterior

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
    locations: Locations = "all",
    corrected: bool = False,
    full: str | Sequence[str] = (),
    weight: Weight | None = None,
    seed: int = 0,
    nonfinite: NonFinite = "error",
    checkpoint: str | Path | None = None,
    every: float = 60.0,
    resume: bool = False,
    distributed: bool = False,
    progress: Progress | None = None,
) -> Posterior:
    """The Laplace posterior of the weights of ``detector`` at ``depth``, from ``frames`` of (inputs, targets), any number of frames an item.

    depth: "head", "neck" (neck + head), "backbone" (all three), or a list of module names; ``fixed`` names modules or parameters to keep constant.
    n_data: training frames that the Fisher stands for; those seen (all of them, also with a ``fraction``) unless given.
    fisher: "empirical" (the paper), "mc" (targets drawn by the detector: frames may be (inputs, None)), "identity" (a baseline).
    fraction: share of the items to use, drawn with ``seed``.
    form: "eigen" is ``(n F + tau I)^-1`` exactly; "paper" is ``Q^-1 (x) H^-1`` with ``jitter``.
    locations: take the input factor Q over "all" locations alike, or weigh each by its squared "gradient": the box loss lives on few cells.
    corrected: the eigenvalue correction (EKFAC), by a second pass over the frames; ``full``: names of small layers, or "last", to keep the whole
    Fisher of, by the same pass. See ``boxcov.kfac.ekfac``.
    weight: from the targets of an item to a weight of each of its frames' losses, such as the number of objects that the loss was divided by.
    nonfinite: what to do with an item whose inputs, loss or gradients hold a NaN or an infinity: "error", or "skip" it and count it.
    checkpoint: a file for what was counted so far, written every ``every`` seconds, on SIGINT and SIGTERM, and when something is raised. With
    ``resume`` the fit goes on from it, if it is there, to the same posterior; remove it when the posterior is saved. A second
    pass is kept in a file of its own, with ``.second`` at the end of its name.
    distributed: every process of torch.distributed's default group calls fit alike, counts its share of the items and gets the posterior of
    all of them; each keeps a checkpoint of its own.
    progress: called with the number of items done and their total, or None where that is unknown; two passes are twice as many.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> posterior = fit(TinyCenter(), shapes.frames(count=4), depth="neck", n_data=1000)
    >>> posterior.frames, posterior.n_data
    (4, 1000.0)
    """
    _check_arguments(fisher, fraction, form, locations, nonfinite)
    check_finite_weights(detector)
    chosen = chosen_parameters(detector, depth, fixed)
    twice = corrected or len(full) > 0
    if twice:
        _check_second_pass(frames, fisher, form)
        check_names(
            full, [name.removesuffix(".weight") for name in chosen if not name.endswith(".bias")]
        )
    accumulator = Accumulator(detector, chosen, locations, weight)
    world = World.current() if distributed else World()
    items = Items(frames, fraction, seed, world)
    settings: dict[str, Any] = {
        "weights_sha256": fingerprint(detector),
        "depth": depth if isinstance(depth, str) else ",".join(depth),
    }
    settings |= {
        "parameters": list(chosen),
        "fisher": fisher,
        "fraction": fraction,
        "seed": seed,
        "items": items.size,
    }
    settings |= {
        "locations": locations,
        "weight": None
        if weight is None
        else getattr(weight, "__qualname__", type(weight).__name__),
    }
    settings |= {} if world.is_single else {"shard": f"{world.rank} of {world.size}"}
    keeper = Keeper(world.rank_path(checkpoint), every, resume, settings, FactorCounts(accumulator))
    second = second_of(keeper.path)
    if twice:
        check(second, every, resume)
    expected = None if items.expected is None else items.expected * (1 + twice)
    skipped = 0
    if fisher == "identity":
        counted = _discover(accumulator, Items(frames, fraction, seed))
    else:
        generator = torch.Generator(accumulator.device) if fisher == "mc" else None
        with world.label_errors(), torch.inference_mode(False), keeper:
            shown = None if progress is None else lambda done: progress(done, expected)
            _accumulate(accumulator, items, keeper, generator, seed, nonfinite, shown)
            keeper.save()  # more is to come: another pass, other ranks, a file that may not be written
        done, skipped = accumulator.reduce(
            world, world.count_items(keeper.next), len(keeper.skipped)
        )
        _check_counted(accumulator, skipped)
        counted = accumulator.frames, done - skipped
    posterior = Posterior(
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
        locations=locations,
        skipped=skipped,
        meta={"seed": str(seed), "fraction": f"{fraction:g}"},
    )
    if not twice:
        return posterior
    moments = Moments(posterior, detector, corrected, full, weight)
    settings |= {
        "corrected": corrected,
        "full": full if isinstance(full, str) else list(full),
        "basis": moments.basis(),
    }
    again = Keeper(second, every, resume, settings, moments)
    with world.label_errors(), torch.inference_mode(False), again:
        shown = None if progress is None else lambda done: progress(keeper.next + done, expected)
        _refine(moments, items, again, keeper.skipped, seed, shown)
        again.save()
    moments.reduce(world)
    return moments.posterior()


def second_of(checkpoint: Path | None) -> Path | None:
    """Where a fit keeps what its second pass has counted.

    >>> str(second_of(Path("p.safetensors.checkpoint")))
    'p.safetensors.checkpoint.second'
    """
    return None if checkpoint is None else checkpoint.with_name(f"{checkpoint.name}.second")


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
    progress: Callable[[int], None] | None,
) -> None:
    for number, item in keeper.items(items):
        given, targets = _pair(item, number)
        try:
            inputs = ready(given, accumulator.device, f"inputs of batch {number}")
            accumulator.add(
                inputs, move(targets, accumulator.device), seeded(generator, seed, number), number
            )
        except NotFiniteFrameError as error:
            if nonfinite == "error":
                raise NotFiniteFrameError(
                    f"{error}{_tokens(targets)}. Mend it, or leave such frames out with nonfinite='skip'"
                ) from None
            keeper.skipped.append(number)
            warn(f"{error}{_tokens(targets)}: left out", BoxcovWarning, stacklevel=3)
        keeper.counted(number, item)
        if progress is not None:
            progress(number + 1)


def _refine(
    moments: Moments,
    items: Items,
    keeper: Keeper,
    skipped: list[int],
    seed: int,
    progress: Callable[[int], None] | None,
) -> None:
    for number, item in keeper.items(items):
        if number not in skipped:
            given, targets = _pair(item, number)
            moments.add(
                ready(given, moments.device, f"inputs of batch {number}"),
                move(targets, moments.device),
                number,
                seed,
            )
        keeper.counted(number, item)
        if progress is not None:
            progress(number + 1)


def _tokens(targets: Any) -> str:
    """The frames of a batch as the data set calls them, where it says so."""
    known = (
        [target["token"] for target in targets if isinstance(target, dict) and "token" in target]
        if isinstance(targets, list)
        else []
    )
    return f" ({join_names(known)})" if known else ""


def _frames_in(inputs: Any) -> int:
    """Frames of one item, for a Fisher that needs no loss to tell: the length of its list, or of its first tensor."""
    if isinstance(inputs, (list, tuple)):
        return len(inputs)
    return len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))


def _check_arguments(
    fisher: str, fraction: float, form: str, locations: str, nonfinite: str
) -> None:
    choices = (
        ("fisher", fisher, FisherKind),
        ("form", form, Form),
        ("locations", locations, Locations),
        ("nonfinite", nonfinite, NonFinite),
    )
    for name, given, kinds in choices:
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
        raise BoxcovError(
            "corrected and full go with a Fisher of gradients: fisher='identity' has none"
        )
    if form == "paper":
        raise BoxcovError(
            "corrected and full go with the form 'eigen': the paper's form is Q^-1 (x) H^-1 alone"
        )


def _pair(item: Any, batch: int) -> tuple[Any, Any]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise BoxcovError(
            f"frames must give pairs (inputs, targets); item {batch} is a {type(item).__name__}"
        )
    return item[0], item[1]


def _check_counted(accumulator: Accumulator, skipped: int) -> None:
    if not accumulator.frames:
        raise BoxcovError(
            f"all {skipped} items hold a NaN or an infinity: nothing is left to fit to"
            if skipped
            else _EMPTY
        )
    unseen = [name for name, sums in accumulator.sums.items() if not sums.locations]
    if unseen:
        raise BoxcovError(
            f"{join_names(unseen)} never saw a single location in {accumulator.frames} frames: give frames with something in them"
        )
    cut_off = [name for name, sums in accumulator.sums.items() if not sums.reached]
    if cut_off:
        modules = [accumulator.sums[name].layer.name for name in cut_off]
        raise BoxcovError(
            f"the loss has no gradient for {join_names(cut_off)}: nothing can be learned of them. "
            f"Keep them as constants with fixed={modules!r}, or let loss() use what they produce"
        )
    flat = [name for name, sums in accumulator.sums.items() if not bool(sums.H.any())]
    if flat:
        warn(
            f"the loss of {accumulator.frames} frames has a zero gradient for {join_names(flat)}: the posterior there is the prior",
            BoxcovWarning,
            stacklevel=3,
        )


def _blocks(
    accumulator: Accumulator, chosen: dict[str, nn.Parameter], identity: bool
) -> dict[str, KroneckerBlock]:
    shared: list[
        tuple[Tensor, Eigendecomposition]
    ] = []  # layers that read the same tensor have the same Q, bit for bit
    blocks = {}
    for sums in accumulator.sums.values():
        layer = sums.layer
        weight = chosen[layer.weight]
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        if identity:
            Q, H = (torch.eye(len(M[0]), device=M.device).expand_as(M) for M in (sums.Q, sums.H))
        else:
            Q, H = sums.factors(accumulator.frames, accumulator.by_gradient)
        known = next(
            (
                eigen
                for matrix, eigen in shared
                if matrix.shape == Q.shape and torch.equal(matrix, Q)
            ),
            None,
        )
        if known is None:
            known = Eigendecomposition.of(Q, dtype)
            shared.append((Q, known))
        bias = None if layer.bias is None else chosen[layer.bias].detach().double()
        norm = to_matrix(weight.detach().double(), bias, layer.geometry).square().sum()
        blocks[layer.name] = KroneckerBlock(
            layer, known, Eigendecomposition.of(H, dtype), float(norm)
        )
    return blocks
