"""Fit a posterior: frames -> Kronecker factors -> Gaussian over the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from boxcov._torch.distributed import World
from boxcov._torch.modules import check_finite_weights, fingerprint
from boxcov.detector import Detector, check_type, own_configuration
from boxcov.errors import (
    BoxcovError,
    BoxcovWarning,
    check_choice,
    check_flag,
    check_instance,
    check_real,
    check_seed,
    counted,
    join_names,
)
from boxcov.kfac.accumulate import Accumulator
from boxcov.kfac.checkpoint import Checkpoint
from boxcov.kfac.ekfac import GradientMoments
from boxcov.kfac.factors import kronecker_blocks
from boxcov.kfac.losses import FrameLosses, has_length, select_parameters
from boxcov.kfac.passes import Items, NonFinite, Pass, Progress, load_item
from boxcov.posterior.kronecker_block import check_precisions
from boxcov.posterior.posterior import FisherKind, Form, Posterior
from boxcov.posterior.prior import auto_prior_precision

_EMPTY = "the data set is empty: fit needs at least one frame"


@dataclass(frozen=True)
class FitOptions:
    """Options of ``boxcov.fit``.

    exclude: names of modules or parameters to keep constant.
    fraction: share of the items to use, drawn with ``seed``.
    seed: random seed of the drawn items and, for ``fisher="mc"``, of the drawn targets.
    ekfac: correct the eigenvalues by a second pass over the frames, see ``boxcov.kfac.ekfac``.
    form: "eigen" is ``(n F + tau I)^-1``; "paper" is ``Q^-1 (x) H^-1`` with ``jitter``.
    jitter: added to each factor of the form "paper", relative to its mean eigenvalue.
    nonfinite: "error" stops at an item with NaN or infinite inputs, loss or gradients; "skip"
        leaves it out and counts it.

    >>> FitOptions(fraction=0.1, ekfac=True).form
    'eigen'
    """

    exclude: Sequence[str] = ()
    fraction: float = 1.0
    seed: int = 0
    ekfac: bool = False
    form: Form = "eigen"
    jitter: float = 1e-6
    nonfinite: NonFinite = "error"

    def __post_init__(self) -> None:
        check_choice("form", self.form, Form)
        check_choice("nonfinite", self.nonfinite, NonFinite)
        check_real("fraction", self.fraction)
        check_real("jitter", self.jitter)
        check_flag("ekfac", self.ekfac)
        if not 0 < self.fraction <= 1:
            raise BoxcovError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        if self.ekfac and self.form == "paper":
            raise BoxcovError("ekfac needs form='eigen': the paper's form is Q^-1 (x) H^-1")
        object.__setattr__(self, "seed", check_seed(self.seed))


_DEFAULTS = FitOptions()


@torch.inference_mode(False)  # its tensors are written to in place
def fit(
    detector: Detector,
    frames: Iterable[Any],
    depth: str | Sequence[str] = "head",
    n_data: float | None = None,
    prior_precision: float | Literal["auto"] = "auto",
    fisher: FisherKind = "empirical",
    *,
    options: FitOptions = _DEFAULTS,
    checkpoint: Checkpoint | None = None,
    distributed: bool = False,
    progress: Progress | None = None,
) -> Posterior:
    """Return the Laplace posterior of the detector's weights.

    frames: yields items, which are pairs (inputs, targets) with any number of frames in each.
    depth: "head", "neck" (neck and head), "backbone" (all three), or a list of module names.
    n_data: number of training frames; by default the number of frames in ``frames``, also if
        ``options.fraction`` uses only a share of them.
    prior_precision: precision tau of the Gaussian prior, or "auto": one per layer, from the
        marginal likelihood or the RMS of the weights, see ``auto_prior_precision``.
        ``Posterior.with_prior`` sets one value per layer. The form "paper" has no prior.
    fisher: "empirical" (the paper), "mc" (the detector samples the targets, so frames may be
        (inputs, None)), or "identity" (a baseline).
    options: see ``FitOptions``.
    checkpoint: where an interrupted fit continues, see ``Checkpoint``.
    distributed: every process of torch.distributed's default group makes the same call, processes
        its share of the items and gets the same posterior.
    progress: called with the number of items done and their total, which is None if unknown. With
        ``options.ekfac``, which reads every item twice, both numbers count every item twice.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> posterior = fit(TinyCenter(), shapes.frames(count=4), depth="neck", n_data=1000)
    >>> posterior.frames, posterior.n_data
    (4, 1000.0)
    """
    check_type(detector)
    check_instance("options", options, FitOptions)
    if checkpoint is not None:
        check_instance("checkpoint", checkpoint, Checkpoint)
    _check_arguments(frames, prior_precision, fisher, options)
    tau = 1.0 if isinstance(prior_precision, str) else prior_precision  # "auto" is chosen last
    check_precisions(1.0 if n_data is None else n_data, tau, "all layers")
    check_finite_weights(detector)
    depth = depth if isinstance(depth, str) else list(depth)  # an iterator can be read once
    parameters = select_parameters(detector, depth, options.exclude)
    world = World.current() if distributed else World()
    items = Items(frames, options.fraction, options.seed, world)
    settings = _checkpoint_settings(detector, depth, fisher, options)
    settings |= {"parameters": list(parameters), **items.settings()}
    n_passes = 1 + options.ekfac
    checkpoints: Sequence[Checkpoint | None] = [None] * n_passes
    if checkpoint is not None:  # checked before any work is done
        checkpoints = checkpoint.for_passes(n_passes, world, settings)
    total = None if items.expected is None else items.expected * n_passes
    losses = FrameLosses(detector, parameters, options.seed if fisher == "mc" else None)
    accumulator = Accumulator(losses)
    if fisher == "identity":
        frames_read, items_read, skipped = _find_layers(accumulator, frames, options), 1, 0
        factors = [(sums.layer, *sums.identity()) for sums in accumulator.sums.values()]
    else:
        first = Pass(items, accumulator, settings, checkpoints[0], options.nonfinite)
        first.run(progress, total)
        items_read, skipped = first.count_items()
        accumulator.reduce(world)
        frames_read = accumulator.frames
        _check_factors(accumulator, skipped)
        factors = accumulator.factors()
    posterior = Posterior(
        blocks=kronecker_blocks(factors, parameters),
        n_data=float(items.total_frames(frames_read, items_read) if n_data is None else n_data),
        prior_precision=tau,
        fisher=fisher,
        frames=accumulator.frames,
        loss=accumulator.loss / max(accumulator.frames, 1),
        fingerprint=settings["weights_sha256"],
        configuration=detector.configuration(),
        depth=settings["depth"],
        form=options.form,
        jitter=options.jitter,
        skipped=skipped,
        meta={"seed": str(options.seed), "fraction": f"{options.fraction:g}"},
    )
    if options.ekfac:
        moments = GradientMoments(posterior, losses)
        settings = {**settings, **moments.settings()}
        second = Pass(items, moments, settings, checkpoints[1], options.nonfinite)
        second.run(progress, total, first)
        moments.reduce(world)
        posterior = moments.posterior()
    if prior_precision == "auto" and options.form == "eigen":
        posterior = auto_prior_precision(posterior, detector)
    return posterior


def _find_layers(accumulator: Accumulator, frames: Iterable[Any], options: FitOptions) -> int:
    """Find the layers by a forward pass of one item; return the number of its frames."""
    for number, item in Items(frames, options.fraction, options.seed, World()).starting_at(0):
        inputs, targets = load_item(item, number, accumulator.device)
        accumulator.find_layers(inputs)
        if has_length(targets):
            return len(targets)
        if isinstance(inputs, (list, tuple)):
            return len(inputs)
        return len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))
    raise BoxcovError(_EMPTY)


def _checkpoint_settings(
    detector: Detector, depth: str | Sequence[str], fisher: str, options: FitOptions
) -> dict[str, Any]:
    """Return what decides the sums of a checkpoint."""
    return {
        "weights_sha256": fingerprint(detector),
        "depth": depth if isinstance(depth, str) else ",".join(depth),
        "fisher": fisher,
        "fraction": options.fraction,
        "seed": options.seed,
        **{f"configuration {name}": text for name, text in own_configuration(detector).items()},
    }


def _check_arguments(
    frames: Iterable[Any], prior_precision: Any, fisher: str, options: FitOptions
) -> None:
    if isinstance(prior_precision, str | Mapping) and prior_precision != "auto":
        raise BoxcovError(
            f"prior_precision must be 'auto' or a number, got {prior_precision!r}: "
            "Posterior.with_prior sets one per layer afterwards"
        )
    check_choice("fisher", fisher, FisherKind)
    if options.ekfac and isinstance(frames, Iterator):
        raise BoxcovError(
            f"ekfac reads the frames twice, but a {type(frames).__name__} can be read only once: "
            "give a list or a sequence"
        )
    if options.ekfac and fisher == "identity":
        raise BoxcovError("ekfac needs gradients: fisher='identity' has none")


def _check_factors(accumulator: Accumulator, skipped: int) -> None:
    """Raise if no frame was added, or nothing reached a layer; warn of gradients of zero."""
    if not accumulator.frames:
        raise BoxcovError(
            f"inputs, loss or gradients of all {skipped} items are not finite: none is left to fit"
            if skipped
            else _EMPTY
        )
    frames, sums = counted(accumulator.frames, "frame"), accumulator.sums
    if unseen := [name for name, one in sums.items() if not one.locations]:
        raise BoxcovError(
            f"{join_names(unseen)} saw no location in {frames}: give frames with something in them"
        )
    if cut_off := [name for name, one in sums.items() if not one.has_gradient]:
        modules = [sums[name].layer.name for name in cut_off]
        raise BoxcovError(
            f"the loss has no gradient for {join_names(cut_off)}: "
            f"leave them out with FitOptions(exclude={modules!r}), or let loss() use their output"
        )
    if flat := [name for name, one in sums.items() if not bool(one.H.any())]:
        message = f"the loss of {frames} has a zero gradient for {join_names(flat)}"
        warn(f"{message}: the posterior there is the prior", BoxcovWarning, stacklevel=4)
