"""``boxcov predict``: the boxes of every frame with their covariances, in one file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from boxcov._files.input_file import hash_file, reading
from boxcov._files.output_file import to_json
from boxcov._files.plain_text import printable
from boxcov._torch.distributed import join_process_group
from boxcov._torch.process_state import seconds
from boxcov.concatenation import concatenate
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.outlines import background_of
from boxcov.pipeline.block_store import BLOCK, BlockStore
from boxcov.pipeline.detectors import load_detector, open_data
from boxcov.pipeline.frame_files import FileFrames, Frame, FrameReader, is_video, look_at_first
from boxcov.pipeline.frames import (
    Progress,
    frame_names,
    load_frames,
    load_in_background,
    numbered,
    silent,
    warn_of_fewer_frames,
)
from boxcov.pipeline.options import DataOptions, EstimatorOptions, PredictCommand, RankCommand
from boxcov.pipeline.options.option import SHIPPED_POSTERIOR
from boxcov.pipeline.output_format import check_format, write_detections
from boxcov.pipeline.paths import holds_output, is_unfinished
from boxcov.pipeline.show import check_frames, check_show, pictures
from boxcov.pipeline.source import (
    default_split,
    other_split,
    warn_of_other_inputs,
    warn_of_shared_frames,
)
from boxcov.posterior import file as posterior_file
from boxcov.posterior.posterior import Posterior
from boxcov.predict.exact import ExactGLM
from boxcov.predict.glm import GLM
from boxcov.predict.mcglm import MCGLM
from boxcov.predict.mci import MCI
from boxcov.predict.nms_spread import NMSSpread
from boxcov.predict.predictor import Predictor
from boxcov.version import __version__


@holds_output
def run(
    options: PredictCommand,
    progress: Progress = silent,
    block: int = BLOCK,
    drawing: Progress = silent,
) -> dict[str, Any]:
    """Predict every frame, write the boxes to ``options.out`` and return a summary.

    The finished blocks of frames are stored next to the output until the run is complete. Under
    torchrun the ranks share the blocks; rank 0 writes the output and the others return {}.
    ``meta`` of the output states the options, the frames and the milliseconds per frame.
    """
    estimator = options.estimator.for_detector(options.detector)
    check_show(options.show, options.force or (options.resume and is_unfinished(options.out)))
    store = block_store(options.out, block)
    with join_process_group(options.device) as (world, device):
        store.refuse_leftovers(options.resume, world)
        detector = load_detector(options, device)
        frames, frames_meta = open_frames(options, device, detector)
        if options.show is not None:
            check_frames(options.show, len(frames), _backgrounds(frames))
        seed = options.source.seed
        model = build_predictor(detector, estimator, seed, with_logit=options.with_logit)
        frames_meta = {**frames_meta, "frames": len(frames)}
        if model.posterior is not None and "source" in frames_meta:
            source = DataOptions(**frames_meta["source"])
            warn_of_other_inputs(model.posterior.meta, source)
        _warn_of_calibration_frames(model, frames_meta)
        is_calibrated, fields = model.error_model is not None, tuple(detector.box_fields)
        check_format(options.format, frames, fields, is_calibrated, options.message)
        about = {**posterior_meta(estimator), **options.detector_meta, **frames_meta}
        meta = model_meta(model, about)
        loaded = load_in_background(frames, options.workers, device, seed)
        compute = partial(_predict_block, model, total=len(frames), progress=progress)
        store.fill(loaded, _block_meta(meta), compute, world, progress)
    if world.rank:
        return {}
    found = read_blocks(store, len(frames))
    found = replace(found, meta={**meta, **found.meta})
    write_detections(options.format, options.out, frames, found, options.message)
    if options.show is not None:
        _draw(options.show, frames, found, drawing)
    store.remove()
    return {"out": str(options.out), **_summary(found), **meta}


def model_meta(model: Predictor, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return how boxes were computed, as when it is read from a file: tuples become lists."""
    settings = model.settings()
    if model.error_model is not None:
        settings["error_model"] = model.error_model.summary()
    versions = {"device": model.device.type, "boxcov": __version__, "torch": torch.__version__}
    return json.loads(to_json({**settings, **about, **versions}))


def _block_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each block states: the names of all frames would be repeated in every one."""
    found = dict(meta)
    if "names" in found:
        found["names_sha256"] = sha256(to_json(found.pop("names")).encode()).hexdigest()
    return found


def _summary(found: Detections) -> dict[str, Any]:
    """Return the numbers of all frames that the command prints."""
    risk = None if found.no_object is None else found.risk
    return {
        "boxes": len(found),
        "milliseconds": median(found.meta["milliseconds"]),
        "uncertainty": float(found.uncertainty.median()) if len(found) else None,
        "risk": float(risk.median()) if risk is not None and len(found) else None,
        "low_risk": None if risk is None else int((risk < 0.2).sum()),
    }


def open_frames(
    options: PredictCommand | RankCommand, device: str, detector: Detector
) -> tuple[Any, dict[str, Any]]:
    """Return the frames of ``--data`` or ``--source``, and what the file says about them."""
    source = options.source
    if options.files.source is not None:
        where = Path(options.files.source)
        entries = FrameReader.of(detector, options.files).entries(where)
        frames: Any = FileFrames(list(look_at_first(detector, islice(entries, source.count))))
        if options.workers and is_video(where):
            raise BoxcovError(f"{where}: a video is read in order: remove --workers")
        warn_of_fewer_frames(frames, source.count, str(where))
        return frames, {"files": printable(where, one_line=True), **_names_meta(frames)}
    source = replace(source, split=source.split or default_split(source.data, "predict"))
    source, frames = open_data(detector, source, device, load_frames)
    return frames, {"source": asdict(source), **_names_meta(frames)}


def _names_meta(frames: Any) -> dict[str, list[str]]:
    names = frame_names(frames)
    return {} if names is None else {"names": [printable(name, one_line=True) for name in names]}


def _warn_of_calibration_frames(model: Predictor, about: Mapping[str, Any]) -> None:
    """Warn if the error model was fitted on the frames that are predicted."""
    if model.error_model is None or "source" not in about:
        return
    source, fitted = DataOptions(**about["source"]), model.error_model.provenance
    name, count = fitted.get("data"), fitted.get("frames")
    if not isinstance(name, str) or type(count) is not int:
        return
    effect = (
        ", so its risk and regions look better on these frames than they are: "
        f"{other_split(source, 'calibrate', 'predict')}"
    )
    warn_of_shared_frames("the error model", name, count, source, about["frames"], effect)


def _draw(out: Path, frames: Any, found: Detections, progress: Progress) -> None:
    """Draw the boxes of every frame."""
    with pictures(out) as show:
        drawn = zip(_backgrounds(frames), found.frames(len(frames)))
        for done, ((name, background), boxes) in enumerate(drawn, 1):
            show(name, background, boxes)
            progress(done, len(frames))


def _backgrounds(frames: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each frame, and what its boxes are drawn on."""
    names = frame_names(frames) or numbered(len(frames))
    for number, name in enumerate(names):
        inputs, frame = frames[number]
        yield name, frame.background if isinstance(frame, Frame) else background_of(inputs)


def build_predictor(
    detector: Detector,
    options: EstimatorOptions,
    seed: int = 0,
    *,
    with_logit: bool = False,
    calibrated: bool = True,
) -> Predictor:
    """Return the predictor that ``options`` describe; ``calibrated=False`` has no error model.

    The method and number of samples are those of the error model, if the options state none.
    """
    posterior = error_model = None
    if options.posterior is not None and options.method != "nms":
        posterior = Posterior.load(options.posterior, detector)
        if posterior.error_model is not None:
            options = options.as_calibrated(*posterior.error_model.method)
        error_model = posterior.error_model if calibrated else None
        posterior = posterior.with_error_model(None)
    model = predictor_of(detector, posterior, options, seed, with_logit)
    if error_model is None:
        return model
    try:
        return model.with_error_model(error_model)
    except BoxcovError as error:
        raise BoxcovError(f"{options.posterior}: {error}") from None


def predictor_of(
    detector: Detector,
    posterior: Posterior | None,
    options: EstimatorOptions,
    seed: int = 0,
    with_logit: bool = False,
) -> Predictor:
    """Return the predictor for a posterior that is loaded."""
    samples = 10 if options.samples is None else options.samples
    if options.method == "nms":
        return NMSSpread(detector)
    if options.method == "mci":
        return MCI(detector, posterior, samples=samples, seed=seed, with_logit=with_logit)
    if posterior is None:
        raise BoxcovError(
            f"the method {options.method or 'exact'} needs a posterior: give --posterior FILE"
        )
    if options.method == "glm":
        return GLM(detector, posterior, with_logit=with_logit)
    if options.method in ("exact", None):
        return ExactGLM(detector, posterior, options.samples, seed, with_logit=with_logit)
    return MCGLM(detector, posterior, samples, seed=seed, with_logit=with_logit)


def posterior_meta(options: EstimatorOptions) -> dict[str, Any]:
    """Return the path and the hash of the posterior."""
    path = options.posterior
    if path is None or options.method == "nms":
        return {}
    if path == SHIPPED_POSTERIOR:
        path = posterior_file.SHIPPED
    return {"posterior": str(options.posterior), "posterior_sha256": hash_file(path)}


def block_store(out: Path, block: int = BLOCK) -> BlockStore[Detections]:
    """Return the store for the blocks of the run that writes ``out``."""

    def write(found: Detections, path: Path, meta: Mapping[str, Any]) -> None:
        replace(found, meta={**meta, **found.meta}).save(path)

    def read(path: Path) -> tuple[Detections, Mapping[str, Any]]:
        found = Detections.load(path)
        return found, found.meta

    return BlockStore(out, write, read, block)


def read_blocks(store: BlockStore[Detections], count: int) -> Detections:
    """Return the detections of ``count`` frames, with the milliseconds per frame in ``meta``."""
    found = store.read_all(count)
    milliseconds: list[float] = []
    for numbers, (_, meta) in zip(store.ranges(count), found):
        with reading(store.path(numbers.start), "a block of a run"):
            milliseconds += map(float, meta["milliseconds"])
    boxes = concatenate([block for block, _ in found])
    return replace(boxes, meta={**_result_meta(boxes), "milliseconds": milliseconds})


def _predict_block(
    model: Predictor, numbers: range, items: Iterator[Any], total: int, progress: Progress
) -> Detections:
    found, milliseconds = [], []
    for number, (inputs, frame) in zip(numbers, items):
        began = seconds(model.device)
        # boxcov evaluate compares with the detector's own signals
        boxes = model(inputs) if model.error_model is not None else model.with_signals(inputs)
        milliseconds.append(round(1e3 * (seconds(model.device) - began), 3))
        if isinstance(frame, Frame):
            boxes = frame.in_file(boxes)
        found.append(replace(boxes, frame=boxes.frame + number).to("cpu"))
        progress(number + 1, total)
    boxes = concatenate(found)
    return replace(boxes, meta={**_result_meta(boxes), "milliseconds": milliseconds})


def _result_meta(found: Detections) -> dict[str, Any]:
    """Return what the signals and the error model's numbers mean."""
    return {name: found.meta[name] for name in ("signals", "error_model") if name in found.meta}
