"""``boxcov fit``: fit the posterior of a detector's weights and write it to a file."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from boxcov._torch.distributed import join_process_group
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.kfac.checkpoint import Checkpoint, second_pass_path
from boxcov.kfac.fit import FitOptions
from boxcov.kfac.fit import fit as fit_posterior
from boxcov.kfac.passes import Progress
from boxcov.pipeline.detectors import load_detector, open_data
from boxcov.pipeline.frames import load_in_background
from boxcov.pipeline.options import FitCommand
from boxcov.pipeline.paths import checkpoint_path, holds_output
from boxcov.posterior.posterior import Posterior
from boxcov.posterior.prior import determined_weights


@holds_output
def run(options: FitCommand, progress: Progress | None = None) -> Posterior:
    """Fit the posterior, write it to ``options.out`` and return it.

    A checkpoint next to the output exists until the fit is complete. Under torchrun the ranks
    share the frames, and rank 0 writes.
    """
    out, checkpoint = options.out, checkpoint_path(options.out)
    with join_process_group(options.device) as (world, device):
        detector = load_detector(options, device)
        depth = _part_or_names(options.depth, detector)
        source, frames = open_data(detector, options.source, device)
        stated = {name: str(value) for name, value in asdict(source).items() if value is not None}
        posterior = fit_posterior(
            detector,
            load_in_background(frames, options.workers, device, source.seed, options.batch),
            depth,
            options.n_data,
            options.prior_precision,
            options.fisher,
            options=FitOptions(
                fraction=options.fraction,
                form=options.form,
                ekfac=options.ekfac,
                seed=source.seed,
                nonfinite=options.nonfinite,
            ),
            checkpoint=Checkpoint(checkpoint, options.checkpoint_every, options.resume),
            distributed=not world.is_single,
            progress=progress,
        )
        meta = {**posterior.meta, **options.detector_meta, **stated}
        posterior = replace(posterior, meta=meta)
        if world.rank == 0:
            if options.compress is not None:
                posterior = posterior.compress(options.compress)
            posterior.save(out)
        world.barrier()  # no rank deletes its checkpoint before the posterior is written
    own = world.rank_path(checkpoint)
    for path in (own, second_pass_path(own)):
        path.unlink(missing_ok=True)
    return posterior


def _part_or_names(depth: str, detector: Detector) -> str | list[str]:
    """Return a part of the detector, or the names of modules. The empty name is the detector's."""
    names = [name.strip() for name in depth.split(",")]
    if not all(names):
        raise BoxcovError(f"--depth {depth!r} has an empty name: remove a comma")
    modules = {name.removeprefix("model.") for name, _ in detector.named_modules()}
    is_module = depth in modules and depth not in detector.parts()
    return names if is_module or "," in depth or "." in depth else depth


def summarize(posterior: Posterior, minutes: float) -> dict[str, Any]:
    """Return what ``boxcov fit --json`` prints about a posterior."""
    storage, n_data = posterior.storage(), posterior.n_data
    blocks = posterior.blocks
    determined = None  # without a prior
    if posterior.form != "paper":
        determined = sum(determined_weights(b, n_data, posterior.tau(n)) for n, b in blocks.items())
    return {
        "layers": len(blocks),
        "depth": posterior.depth,
        "frames": posterior.frames,
        "skipped": posterior.skipped,
        "n_data": n_data,
        "prior_precision": posterior.prior_precision,
        "prior": posterior.prior_summary,
        "weights": sum(block.size for block in blocks.values()),
        "determined": determined,
        "fisher": posterior.fisher,
        "form": posterior.form,
        "error": posterior.error,
        "corrected": bool(posterior.ekfac_layers),
        "loss": posterior.loss,
        "storage": str(storage),
        "bytes": asdict(storage),
        "weights_sha256": posterior.fingerprint,
        "made_from": dict(posterior.meta),
        "minutes": minutes,
    }
