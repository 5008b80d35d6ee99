"""The work of each rank in tests of distributed fits; other processes import this module."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed as dist

from boxcov import BoxcovError, BoxcovWarning, Checkpoint, FitOptions, Posterior, fit
from boxcov.data import batched, shapes
from boxcov.detectors.tiny import TinyCenter


def spoiled(count: int) -> list:
    frames = list(shapes.frames(count=count))
    frames[1] = (frames[1][0] * float("nan"), frames[1][1])
    return frames


CASES = {
    "few": ({"frames": shapes.frames(count=2)}, {}),  # fewer than three ranks
    "uneven": ({"frames": shapes.frames(count=7)}, {"depth": "backbone"}),
    "batches": (
        {"frames": batched(shapes.frames(count=7), 2)},
        {"fisher": "mc", "options": FitOptions(seed=4)},
    ),
    "share": ({"frames": shapes.frames(count=9)}, {"options": FitOptions(fraction=0.5)}),
    "skipped": ({"frames": spoiled(5)}, {"options": FitOptions(nonfinite="skip")}),
    "corrected": (
        {"frames": spoiled(7)},
        {"options": FitOptions(nonfinite="skip", ekfac=True), "fisher": "mc"},
    ),
    "few corrected": ({"frames": shapes.frames(count=2)}, {"options": FitOptions(ekfac=True)}),
    "identity": ({"frames": shapes.frames(count=2)}, {"fisher": "identity"}),
}


def posterior_of(case: str, **more) -> Posterior:
    data, settings = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoxcovWarning)
        return fit(TinyCenter(width=4), **data, **settings, **more)


def work(rank: int, count: int, folder: str) -> None:
    """Run all cases and errors on one rank, and write down the results."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count
    )
    for case in CASES:
        posterior_of(case, distributed=True).save(f"{folder}/{case}.{rank}")
    stream = (item for item in shapes.frames(count=5))
    fit(TinyCenter(width=4), stream, distributed=True).save(f"{folder}/stream.{rank}")
    kept = Checkpoint(f"{folder}/kept", every_seconds=0)
    fit(TinyCenter(width=4), shapes.frames(count=5), checkpoint=kept, distributed=True)
    kept = replace(kept, resume=True)
    resumed = fit(TinyCenter(width=4), shapes.frames(count=5), checkpoint=kept, distributed=True)
    resumed.save(f"{folder}/resumed.{rank}")
    try:
        fit(
            TinyCenter(width=4),
            [(torch.zeros(1, 1, 64, 64), None)] * count,
            distributed=True,
        )
    except BoxcovError as error:
        Path(f"{folder}/error.{rank}").write_text(str(error))
    dist.destroy_process_group()
