"""The work of ``boxcov fit``."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist

from boxcov.commands.sources import Source, check_folder, detector_named
from boxcov.curvature.fit import Progress
from boxcov.curvature.fit import fit as fit_posterior
from boxcov.curvature.posterior import Posterior
from boxcov.curvature.ranks import Ranks
from boxcov.data import batched
from boxcov.errors import BoxcovError


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
    progress: Progress | None = None,
) -> Posterior:
    """Fit the posterior of ``detector`` to the frames of ``source`` and write it to ``out``; the file says what it was made from.

    compress: keep a truncated posterior, no variance further off than this share.
    What was counted is kept in a file beside ``out`` until all is done: ``resume`` goes on with it.
    """
    check_folder(out)
    if compress is not None:
        check_compress(compress, corrected, form, prior_precision)
    checkpoint = checkpoint_of(out)
    spread = launched(device)
    if spread:
        device = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
    network = detector_named(detector, device)
    frames = source.frames(device, network.classes)
    posterior = fit_posterior(
        network,
        frames if batch == 1 else batched(frames, batch),
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
        distributed=spread,
        progress=progress,
    )
    made_from = {"detector": detector, **{name: str(value) for name, value in asdict(source).items() if value is not None}}
    posterior = replace(posterior, meta=made_from)
    ranks = Ranks.of_group() if spread else Ranks()
    if ranks.rank == 0:
        posterior = posterior if compress is None else posterior.truncated(compress)
        posterior.save(out)
    if spread:
        dist.barrier()  # no checkpoint goes before the posterior is there
        dist.destroy_process_group()
    kept = ranks.checkpoint(checkpoint)
    assert kept is not None
    kept.unlink(missing_ok=True)
    return posterior


def check_compress(compress: float, corrected: bool, form: str, prior_precision: float) -> None:
    """Before the fit, not after it.

    >>> check_compress(0.01, True, "eigen", 1.0)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: --compress goes with a plain fit: no --corrected, no --form paper, and a --prior-precision above 0
    """
    if not 0 < compress < 1:
        raise BoxcovError(f"--compress is a share of the variances, above 0 and below 1, got {compress}")
    if corrected or form == "paper" or prior_precision == 0:
        raise BoxcovError("--compress goes with a plain fit: no --corrected, no --form paper, and a --prior-precision above 0")


def launched(device: str) -> bool:
    """Whether torchrun started this process as one of several; then they are joined in a group, by gloo on a CPU and nccl on GPUs.

    >>> launched("cpu")
    False
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return False
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return True


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
