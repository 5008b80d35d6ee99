"""The work of ``boxcov fit``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from boxcov._torch.distributed import join_process_group
from boxcov.errors import BoxcovError
from boxcov.files import remove_leftovers
from boxcov.kfac.fit import Progress, second_of
from boxcov.kfac.fit import fit as fit_posterior
from boxcov.pipeline.sources import Source, check_folder, detector_named
from boxcov.posterior.posterior import Posterior


def run(
    out: Path,
    detector: str,
    source: Source,
    depth: str = "head",
    *,
    prior_precision: float = 1.0,
    n_data: float | None = None,
    fisher: Literal["empirical", "mc", "identity"] = "empirical",
    fraction: float = 1.0,
    form: Literal["eigen", "paper"] = "eigen",
    locations: Literal["all", "gradient"] = "all",
    corrected: bool = False,
    compress: float | None = None,
    batch: int = 1,
    nonfinite: Literal["error", "skip"] = "error",
    every: float = 60.0,
    resume: bool = False,
    device: str = "cpu",
    workers: int = 0,
    progress: Progress | None = None,
) -> Posterior:
    """Fit the posterior of ``detector`` to the frames of ``source`` and write it to ``out``; the file says what it was made from.

    compress: keep a truncated posterior, no variance further off than this share.
    What was counted is kept in a file beside ``out`` until all is done: ``resume`` goes on with it.
    """
    check_folder(out)
    remove_leftovers(out)
    if compress is not None:
        check_compress(compress, corrected, form, prior_precision)
    checkpoint = checkpoint_of(out)
    with join_process_group(device) as (ranks, device):
        network = detector_named(detector, device)
        frames = source.read(device, network.classes, workers, batch)
        posterior = fit_posterior(
            network,
            frames,
            depth.split(",") if "," in depth or "." in depth else depth,
            n_data,
            prior_precision,
            fisher,
            fraction=fraction,
            form=form,
            locations=locations,
            corrected=corrected,
            seed=source.seed,
            nonfinite=nonfinite,
            checkpoint=checkpoint,
            every=every,
            resume=resume,
            distributed=not ranks.is_single,
            progress=progress,
        )
        made_from = {
            "detector": detector,
            **{name: str(value) for name, value in asdict(source).items() if value is not None},
        }
        posterior = replace(posterior, meta={**posterior.meta, **made_from})
        if ranks.rank == 0:
            posterior = posterior if compress is None else posterior.truncated(compress)
            posterior.save(out)
        ranks.barrier()  # no checkpoint goes before the posterior is there
    kept = ranks.rank_path(checkpoint)
    for path in (kept, second_of(kept)):
        assert path is not None
        path.unlink(missing_ok=True)
    return posterior


def check_compress(compress: float, corrected: bool, form: str, prior_precision: float) -> None:
    """Before the fit, not after it.

    >>> check_compress(0.01, True, "eigen", 1.0)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: --compress goes with a plain fit: no --corrected, no --form paper, and a --prior-precision above 0
    """
    if not 0 < compress < 1:
        raise BoxcovError(
            f"--compress is a share of the variances, above 0 and below 1, got {compress}"
        )
    if corrected or form == "paper" or prior_precision == 0:
        raise BoxcovError(
            "--compress goes with a plain fit: no --corrected, no --form paper, and a --prior-precision above 0"
        )


def checkpoint_of(out: Path) -> Path:
    """Where a fit keeps what it has counted, until ``out`` is there.

    >>> str(checkpoint_of(Path("posterior.safetensors")))
    'posterior.safetensors.checkpoint'
    """
    return out.with_name(f"{out.name}.checkpoint")


def report(posterior: Posterior, minutes: float) -> dict[str, Any]:
    """What there is to say of a posterior.

    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> report(fit_posterior(TinyCenter(), shapes.frames(count=2)), 0.1)["layers"]
    9
    """
    storage = posterior.storage()
    conditions = {name: posterior.condition(name) for name in posterior.blocks}
    worst = max(conditions, key=conditions.__getitem__)
    return {
        "layers": len(posterior.blocks),
        "depth": posterior.depth,
        "frames": posterior.frames,
        "skipped": posterior.skipped,
        "n_data": posterior.n_data,
        "prior_precision": posterior.prior_precision,
        "fisher": posterior.fisher,
        "form": posterior.form,
        "locations": posterior.locations,
        "error": posterior.error,
        "corrected": any(block.refined for block in posterior.blocks.values()),
        "loss": posterior.loss,
        "condition": conditions[worst],
        "worst": worst,
        "storage": str(storage),
        "bytes": asdict(storage),
        "weights_sha256": posterior.fingerprint,
        "made_from": dict(posterior.meta),
        "minutes": minutes,
    }
