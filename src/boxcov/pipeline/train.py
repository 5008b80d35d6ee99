"""The work of ``boxcov train``: a CenterPoint from simulated or real frames, its weights, and its precision on frames that it has not seen."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from boxcov._torch.inputs import move
from boxcov.data.augment import Augmentation
from boxcov.detectors.centerpoint import CenterPoint, load, save
from boxcov.detectors.training import Progress, Recipe, train
from boxcov.evaluate.average_precision import Boxes, average_precision, mean_precision
from boxcov.files import replacing
from boxcov.pipeline.sources import (
    Making,
    check_folder,
    config_named,
    frames_named,
    kept,
    on_device,
    unseen_split,
)

Table = dict[str, dict[float, float]]


def run(
    out: Path,
    config: str = "small",
    data: str = "simulated:clear",
    split: str | None = None,
    test: Sequence[tuple[str, str | None]] = (("simulated:clear", None),),
    count: int = 2000,
    test_count: int = 100,
    steps: int = 4000,
    batch: int = 4,
    rate: float = 2e-3,
    sweeps: int = 10,
    seed: int = 0,
    device: str = "cpu",
    start_from: str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    making: Making | None = None,
) -> dict[str, Any]:
    """Train, test on each of ``test`` (data, split), write weights to ``out`` and the report beside it; gives the report.

    Simulated test frames are of the split ``test``, unless said otherwise. A checkpoint lies beside ``out`` until the end.
    """
    check_folder(out)
    detector = on_device(
        CenterPoint(config_named(config), seed) if start_from is None else load(start_from), device
    )
    began = time.perf_counter()
    frames = kept(
        frames_named(data, split, count, seed, sweeps, device, detector.classes),
        device,
        progress=making,
    )
    made = time.perf_counter() - began
    recipe = Recipe(steps, batch, rate, seed=seed, augmentation=Augmentation())
    checkpoint = out.with_suffix(".checkpoint")
    loss = train(detector, frames, recipe, checkpoint=checkpoint, resume=resume, progress=progress)
    report: dict[str, Any] = {
        "config": config,
        "data": data,
        "split": split,
        "frames": len(frames),
        "steps": steps,
        "batch": batch,
        "rate": rate,
        "sweeps": sweeps,
        "seed": seed,
        "start_from": start_from,
        "seconds_to_make_frames": made,
        "minutes": (time.perf_counter() - began) / 60,
        "loss": loss,
        "parameters": sum(p.numel() for p in detector.parameters()),
    }
    save(detector, out)
    report["test"] = {}
    for what, part in test:
        unseen = frames_named(
            what, part or unseen_split(what), test_count, seed, sweeps, device, detector.classes
        )
        table = precision(detector, kept(unseen, device))
        report["test"][what if part is None else f"{what} {part}"] = {
            "mAP": mean_precision(table),
            "AP": table,
        }
    with replacing(out.with_suffix(".json")) as file:
        file.write_text(json.dumps(report, indent=1) + "\n")
    checkpoint.unlink(missing_ok=True)
    return report


def precision(detector: CenterPoint, frames: Sequence[Any]) -> Table:
    """nuScenes-style AP by class and distance of what ``detector`` finds in ``frames``.

    >>> from boxcov.detectors.centerpoint import Config
    >>> untrained = CenterPoint(Config.small()).eval()
    >>> precision(untrained, kept(frames_named("simulated:clear", count=1, sweeps=1), "cpu"))["car"][2.0] < 0.5
    True
    """
    found, truth = [], []
    device = next(detector.parameters()).device
    for inputs, targets in frames:
        boxes = detector.detect(move(inputs, device)).numpy()
        found.append(
            Boxes(
                boxes["boxes"][:, :2].astype(float), boxes["labels"], boxes["scores"].astype(float)
            )
        )
        target = targets[0]
        centres = target["boxes"][:, :2].cpu().numpy().astype(float)
        points = target["points"].cpu().numpy() if "points" in target else np.ones(len(centres))
        truth.append(Boxes(centres, target["labels"].cpu().numpy(), points))
    return average_precision(found, truth, detector.classes)


def show(report: dict[str, Any]) -> str:
    """The report as a table for a terminal: AP by class, a column a test set.

    >>> print(show({"test": {"a": {"mAP": 0.5, "AP": {"car": {2.0: 0.5}}}}}))
    AP (0.5, 1, 2, 4 m)                          a
    car                                       0.50
    mean                                      0.50
    """
    names = list(report["test"])
    lines = [f"{'AP (0.5, 1, 2, 4 m)':24}" + "".join(f"{name[-20:]:>22}" for name in names)]
    for label in report["test"][names[0]]["AP"]:
        lines.append(
            f"{label:24}"
            + "".join(
                f"{np.mean(list(report['test'][name]['AP'][label].values())):22.2f}"
                for name in names
            )
        )
    return "\n".join(
        [*lines, f"{'mean':24}" + "".join(f"{report['test'][name]['mAP']:22.2f}" for name in names)]
    )
