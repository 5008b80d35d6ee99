"""``boxcov train``: train a CenterPoint, write its weights and report its average precision."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from boxcov._files.output_file import remove_leftovers, write_json
from boxcov._torch.modules import move
from boxcov.concatenation import join_frames
from boxcov.data.augment import Augmentation
from boxcov.detectors.centerpoint import CenterPoint, Config, load, save
from boxcov.detectors.training import Progress as TrainingProgress
from boxcov.detectors.training import Recipe, train
from boxcov.errors import BoxcovError
from boxcov.evaluate.average_precision import average_precision, mean_precision
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.pipeline.detectors import move_to_device
from boxcov.pipeline.frames import Progress, load_labelled_frames, preload_frames, silent
from boxcov.pipeline.options import DataOptions, TrainCommand
from boxcov.pipeline.paths import check_output, checkpoint_path, holds_output
from boxcov.pipeline.source import default_split

_REPORTED = ("config", "data", "split", "steps", "batch", "rate", "sweeps", "seed", "start_from")


@holds_output
def run(
    options: TrainCommand, loading: Progress = silent, training: TrainingProgress | None = None
) -> dict[str, Any]:
    """Train, test, and write the weights and a report next to them; return the report.

    A checkpoint next to the output exists until the training is complete.

    loading, training: called with the progress of loading the frames and of the training steps.
    """
    report_path = options.out.with_suffix(".json")
    checkpoint = checkpoint_path(options.out)
    if options.out == report_path:
        raise BoxcovError(f"{options.out}: the report has this name: give another one")
    check_output(report_path, options.force or (options.resume and checkpoint.exists()))
    for path in (report_path, checkpoint):
        remove_leftovers(path)
    if options.start_from is None:
        detector = CenterPoint(getattr(Config, options.config)(), options.seed)
    else:
        detector = load(options.start_from)
    detector = move_to_device(detector, options.device)
    source = DataOptions(options.data, options.split, options.count, options.seed, options.sweeps)
    began = perf_counter()
    frames = load_labelled_frames(source, options.device, detector.classes)
    frames = preload_frames(frames, options.device, loading)
    seconds_to_load = perf_counter() - began
    recipe = Recipe(
        options.steps, options.batch, options.rate, seed=options.seed, augmentation=Augmentation()
    )
    loss = train(
        detector, frames, recipe, checkpoint=checkpoint, resume=options.resume, progress=training
    )
    minutes = (perf_counter() - began) / 60
    save(detector, options.out)
    report = {
        **{name: getattr(options, name) for name in _REPORTED},
        "frames": len(frames),
        "seconds_to_make_frames": seconds_to_load,
        "minutes": minutes,
        "loss": loss,
        "parameters": sum(p.numel() for p in detector.parameters()),
        "test": _test(detector, options),
    }
    write_json(report_path, report)
    checkpoint.unlink(missing_ok=True)
    return report


def _test(detector: CenterPoint, options: TrainCommand) -> dict[str, Any]:
    """Return mAP and AP for each test data set."""
    results = {}
    for data in options.test or (options.data,):
        split = options.test_split or default_split(data, "predict")
        source = DataOptions(data, split, options.test_count, options.seed, options.sweeps)
        frames = load_labelled_frames(source, options.device, detector.classes)
        table = measure_precision(detector, preload_frames(frames, options.device))
        name = data if options.test_split is None else f"{data} {options.test_split}"
        results[name] = {"mAP": mean_precision(table), "AP": table}
    return results


def measure_precision(
    detector: CenterPoint, frames: Sequence[Any]
) -> dict[str, dict[float, float]]:
    """Return the nuScenes-style average precision by class and distance in metres."""
    device = next(detector.parameters()).device
    found = [detector.detect(move(inputs, device)).to("cpu") for inputs, _ in frames]
    return average_precision(join_frames(found), GroundTruth.from_frames(frames))
