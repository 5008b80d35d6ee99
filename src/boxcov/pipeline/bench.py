"""``boxcov bench``: time every method on the same frames, or the stages of a frame."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import torch

from boxcov import GLM, MCGLM, MCI, ExactGLM, compile, fit
from boxcov._files.plain_text import aligned
from boxcov._torch.modules import LayerCallMode, fresh, ready
from boxcov._torch.process_state import Precision, matrix_precision, seconds
from boxcov.data.sequence import merge
from boxcov.detector import Detector
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.errors import BoxcovError
from boxcov.pipeline.detectors import load_detector, match_source, warn_if_implausible
from boxcov.pipeline.frames import Progress, load_frames, preload_frames, silent
from boxcov.pipeline.options import BenchCommand, DataOptions
from boxcov.pipeline.source import default_split
from boxcov.pipeline.stages import format_stages, measure_stages
from boxcov.posterior.posterior import Posterior
from boxcov.predict.compile import CompiledModel
from boxcov.predict.engine_options import EngineOptions
from boxcov.predict.forward_mode.derivatives import sample_covariance
from boxcov.static_selection import StaticLimits

BATCH = 8  # frames that are also timed at once on a GPU
GLM_OUTPUTS = 9  # outputs of the paper's GLM that are timed; the rest is extrapolated
FIT_FRAMES = 4
LIMITS = StaticLimits(boxes=256, candidates=500, pairs=60_000)  # per frame


@dataclass(frozen=True)
class TimedMethod:
    """One method to be timed."""

    name: str
    samples: int | None
    call: Callable[[Any], object] | None  # None if it cannot be timed; the note states why
    note: str = ""
    slow: bool = False  # timed once per frame


def run(options: BenchCommand, progress: Progress = silent) -> list[dict[str, Any]]:
    """Time all methods, or with ``stages`` the stages of a fused frame; return one row for each.

    Columns: ``method``, ``device``, ``boxes``, ``samples``, ``depth``, ``ms``, ``low`` and ``high``
    (quartiles), ``ratio`` to the plain detector, ``peak_mib`` and ``note``. The methods take turns
    after a warm-up. ``peak_mib`` is the peak memory of torch on a GPU, None on a CPU. Columns of
    stages: ``boxes`` and those of ``measure_stages``.
    """
    device = options.device
    detector = load_detector(options, device).eval()
    if options.stages and not isinstance(detector, CenterPoint):
        raise BoxcovError(
            f"a {type(detector).__name__} has no fused network with stages: remove --stages"
        )
    split = default_split(options.data, "predict")
    needed = max(options.count, BATCH if device.startswith("cuda") else FIT_FRAMES)
    source = DataOptions(options.data, split, needed, options.seed)
    frames = load_frames(match_source(source, detector), device, detector.classes)
    items = preload_frames(frames, device)
    warn_if_implausible(detector, items)
    loaded = [ready(frame, torch.device(device)) for frame, _ in items]
    inputs, first = loaded[: options.count], loaded[:BATCH]
    rows: list[dict[str, Any]] = []
    box_counts = options.boxes or (None,)
    posteriors = posteriors_to_time(detector, items[:FIT_FRAMES], options)
    settings, total = 0, max(len(options.depth), 1) * len(box_counts)
    for posterior in posteriors:
        for count in box_counts:
            model = detector if count is None else with_box_count(detector, count)
            own = posterior if count is None else posterior.with_error_model(None)
            if options.stages and isinstance(model, CenterPoint):
                rows += stage_rows(model, own, inputs[0], options)
            else:
                methods = methods_to_time(model, own, options, first)
                rows += measure(model, methods, inputs, options.repeats, device, posterior.depth)
            progress(settings := settings + 1, total)
    return rows


def posteriors_to_time(
    detector: Detector, frames: Sequence[Any], options: BenchCommand
) -> Iterator[Posterior]:
    """Yield the posterior that is given, or one per depth, fitted on the frames."""
    if options.posterior is not None:
        yield Posterior.load(options.posterior, detector)
        return
    for depth in options.depth or ("head",):
        with catch_warnings():
            simplefilter("ignore")  # few frames reach few classes: the speed is the same
            posterior = fit(detector, frames, depth, n_data=3000)
        yield posterior


def stage_rows(
    detector: CenterPoint, posterior: Posterior, inputs: Any, options: BenchCommand
) -> list[dict[str, Any]]:
    """Return the rows of the stages, on a GPU in float32 and in TF32."""
    precisions: tuple[Precision, ...] = ("float32",)
    if options.device.startswith("cuda"):
        precisions = ("float32", "tf32")
    rows: list[dict[str, Any]] = []
    for precision in precisions:
        with matrix_precision(precision):
            boxes = len(detector.detect(inputs))
        measured = measure_stages(detector, posterior, inputs, LIMITS, precision, options.repeats)
        rows += [{**row, "boxes": boxes, "device": options.device} for row in measured]
    return rows


def with_box_count(detector: Detector, count: int) -> Detector:
    """Return a copy of the detector that reports about ``count`` boxes per frame."""
    if not isinstance(detector, CenterPoint):
        raise BoxcovError(
            f"a {type(detector).__name__} has no fixed number of boxes: remove --boxes"
        )
    config = detector.config
    per_task = -(-count // len(config.tasks))
    rules = replace(
        config.reporting,
        threshold=1e-9,
        max_boxes=per_task,
        candidates=max(config.reporting.candidates, 4 * per_task),
    )
    other = CenterPoint(replace(config, reporting=rules))
    other.load_state_dict(detector.state_dict())
    return other.to(next(detector.parameters()).device).eval()


def methods_to_time(
    detector: Detector, posterior: Posterior, options: BenchCommand, frames: Sequence[Any]
) -> list[TimedMethod]:
    """Return the methods to compare; frames: inputs for ``boxcov.compile``.

    An error model of exact covariances is timed beside them. Below the head the exact covariance
    takes one backward pass per output, so it is combined with k samples there.
    """
    is_deep, samples, seed = posterior.depth != "head", options.samples, options.seed
    found = [TimedMethod("plain", None, detector.detect)]
    calibrated, posterior = posterior, posterior.with_error_model(None)
    timed = {} if is_deep else {"exact": posterior}
    own = calibrated.error_model
    if timed and own is not None and own.method == ("exact", None):
        timed["exact and error model"] = calibrated
    found += [TimedMethod(name, None, ExactGLM(detector, one)) for name, one in timed.items()]
    if next(detector.parameters()).device.type == "cuda":
        tf32 = EngineOptions(precision="tf32")
        models = {f"{name}, tf32": ExactGLM(detector, p, engine=tf32) for name, p in timed.items()}
        found += [TimedMethod(name, None, model) for name, model in models.items()]
        found += compiled_methods({"plain": detector, **models}, frames) if models else []
    for k in samples:
        if is_deep:
            combined = ExactGLM(detector, posterior, k, seed)
            found.append(TimedMethod("exact head", k, combined, "k samples below the head"))
        mcglm = MCGLM(detector, posterior, k, seed=seed)
        dropout = MCI(detector, dropout=0.1, samples=k, seed=seed, depth=posterior.depth)
        note = f"{k + 1} full passes, finite differences"
        found += [
            TimedMethod("mcglm", k, mcglm),
            TimedMethod("mcglm as published", k, paper_mcglm(mcglm), note, slow=True),
            TimedMethod("mc dropout", k, dropout, slow=is_deep),
        ]
    glm, note = paper_glm(GLM(detector, posterior)), f"from {GLM_OUTPUTS} backward passes"
    return [*found, TimedMethod("glm as published", None, glm, f"extrapolated {note}", slow=True)]


def compiled_methods(
    sources: Mapping[str, Detector | ExactGLM], frames: Sequence[Any]
) -> list[TimedMethod]:
    """Return detector and models as ``boxcov.compile`` makes them, for a GPU.

    frames: the first is the example; all of them, repeated up to ``BATCH``, are timed at once.
    """
    found = []
    for form in ("compiled", "fused", "batch"):
        for name, source in sources.items():
            title, note = f"{name}, {form}", ""
            call: Callable[[Any], object] | None = None
            try:
                if form == "batch":
                    title, note = f"{name}, fused, {BATCH} frames at once", "per frame"
                    batch = merge([frames[number % len(frames)] for number in range(BATCH)])
                    whole = compile(source, batch, batch_limits(LIMITS), fused=True)
                    call = batch_time(whole, batch)
                else:
                    call = compile(source, frames[0], LIMITS, fused=form == "fused")
            except BoxcovError as error:  # also inputs of different sizes, which no batch holds
                note = str(error).splitlines()[0]
            found.append(TimedMethod(title, None, call, note))
    return found


def batch_limits(limits: StaticLimits) -> StaticLimits:
    """Return the limits of ``BATCH`` frames at once."""
    return replace(limits, boxes=BATCH * limits.boxes, pairs=BATCH * limits.pairs)


def batch_time(call: CompiledModel, batch: Any) -> Callable[[Any], float]:
    """Return a function that runs a whole batch and returns the seconds per frame."""

    def run(_: Any) -> float:
        start = seconds(call.device)
        call(batch)
        return (seconds(call.device) - start) / BATCH

    return run


def paper_mcglm(model: MCGLM) -> Callable[[Any], object]:
    """Return algorithm 1 of the paper: a full pass and a finite difference per direction."""
    linearized, epsilon = model.linearized, 1e-5
    theta = linearized.theta()
    etas = model.posterior.sample(model.samples, torch.Generator().manual_seed(model.seed))

    def call(inputs: Any) -> object:
        with torch.no_grad():
            point = linearized.at(inputs, cache_trunk=False)
            columns = []
            for i in range(model.samples):
                answer = linearized.substitute(
                    {name: theta[name] + epsilon * eta[i] for name, eta in etas.items()}
                )
                with LayerCallMode(linearized.names, answer):
                    boxes = linearized.shadow.decode(
                        linearized.shadow(fresh(inputs)), point.selection
                    )
                columns.append(point.difference(boxes) / epsilon)
            return sample_covariance(torch.stack(columns, 2)) if len(point.boxes) else None

    return call


def paper_glm(model: GLM) -> Callable[[Any], float]:
    """Return the paper's GLM for a few outputs; a call returns the extrapolated seconds."""
    linearized = model.linearized

    def call(inputs: Any) -> float:
        start = seconds(model.device)
        with torch.enable_grad():
            point = linearized.at(inputs)
            weights = linearized.variables()
            z = point.z_at(weights).flatten()
            before = seconds(model.device)
            for number in z[:GLM_OUTPUTS]:
                torch.autograd.grad(
                    number, list(weights.values()), retain_graph=True, allow_unused=True
                )
        linearized.trunk.memory.clear()
        done = seconds(model.device)
        return before - start + (done - before) * len(z) / max(min(GLM_OUTPUTS, len(z)), 1)

    return call


def measure(
    detector: Detector,
    methods: list[TimedMethod],
    inputs: list[Any],
    repeats: int,
    device: str,
    depth: str = "head",
) -> list[dict[str, Any]]:
    """Time the methods in turns on all inputs and return one row per method."""
    times: list[list[float]] = [[] for _ in methods]
    peaks: list[float | None] = [None for _ in methods]
    is_gpu = device.startswith("cuda")
    count = statistics.mean(len(detector.detect(frame)) for frame in inputs)
    # negative turns warm up: the first boxes are checked, graphs are captured
    for turn in range(-3 - len(inputs), repeats * len(inputs)):
        for number, method in enumerate(methods):
            if method.call is None or (method.slow and not -1 <= turn < len(inputs)):
                continue
            if is_gpu:
                torch.cuda.reset_peak_memory_stats()
            start = seconds(device)
            result = method.call(inputs[turn % len(inputs)])
            taken = result if isinstance(result, float) else seconds(device) - start
            if turn >= 0:
                times[number].append(taken)
                if is_gpu:
                    peak = torch.cuda.max_memory_allocated() / 2**20
                    peaks[number] = max(peaks[number] or 0.0, peak)
    plain = statistics.median(times[0])
    common = {"device": device, "boxes": round(count), "depth": depth}
    return [
        {**_row(method, own, plain, peak), **common}
        for method, own, peak in zip(methods, times, peaks)
    ]


def _row(
    method: TimedMethod, times: list[float], plain: float, peak: float | None
) -> dict[str, Any]:
    row = {"method": method.name, "samples": method.samples, "peak_mib": peak, "note": method.note}
    numbers: dict[str, Any] = dict.fromkeys(("low", "ms", "high", "ratio"))
    if times:
        quartiles = (1e3 * np.quantile(times, (0.25, 0.5, 0.75))).tolist()
        numbers |= dict(zip(numbers, quartiles)) | {"ratio": quartiles[1] / (1e3 * plain)}
    return {**row, **numbers}


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table for a terminal."""
    if "stage" in rows[0]:
        return format_stages(rows)
    cells = [("method", "depth", "boxes", "samples", "ms (quartiles)", "ratio", "peak MiB")]
    for row in rows:
        ms = ratio = peak = "-"
        if row["ms"] is not None:
            ms = f"{row['ms']:.1f} ({row['low']:.1f} to {row['high']:.1f})"
            ratio = f"{row['ratio']:.2f}"
        if row["peak_mib"] is not None:
            peak = f"{row['peak_mib']:.0f}"
        samples = "-" if row["samples"] is None else row["samples"]
        cells.append((row["method"], row["depth"], row["boxes"], samples, ms, ratio, peak))
    notes = ["", *(row["note"] for row in rows)]
    return "\n".join(f"{line}  {note}".rstrip() for line, note in zip(aligned(cells), notes))
