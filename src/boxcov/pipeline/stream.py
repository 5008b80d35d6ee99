"""``boxcov stream``: frames in, one JSON line per frame out, latencies at the end."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from boxcov._files.output_file import to_json
from boxcov._files.plain_text import printable
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, counted
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frame_files import (
    FAILURES,
    Entry,
    FrameReader,
    look_at_first,
    paths_from_lines,
)
from boxcov.pipeline.options import StreamCommand
from boxcov.pipeline.predict import build_predictor, model_meta, posterior_meta
from boxcov.pipeline.show import Add, check_show, pictures
from boxcov.pipeline.terminal import say
from boxcov.predict.predictor import Predictor

WARMUP = 5  # frames
MAX_LATENCIES = 100_000  # only the last ones are stored, so that an endless stream fits in memory
LEVEL = 0.9  # of the regions
# significant digits of the arrays of a line, those that there are
_DIGITS = {"boxes": 5, "scores": 4, "risk": 3, "no_object": 3, "misplaced": 3, "flipped": 3}
_DIGITS |= {"region": 3, "std": 3, "predictive_std": 3}
_MATRICES = {"covariance": 5, "predictive": 5}
_UNKNOWN = ("region", "predictive_std", "predictive")  # null for fields without labels
clock = time.perf_counter


def run(options: StreamCommand, out: TextIO, latencies: Latencies) -> None:
    """Write one JSON line per frame to ``out``, and add the time of each frame to ``latencies``.

    The first line also states how all of them are computed, as ``meta`` of ``boxcov predict``.
    A frame that cannot be read gives a line with an error, and the stream continues; raise at the
    end if there was one.
    """
    check_show(options.show, options.force)
    estimator = options.estimator.for_detector(options.detector)
    detector = load_detector(options, options.device)
    model = build_predictor(
        detector, estimator, options.seed, calibrated=options.calibrated is not False
    )
    if options.calibrated and model.error_model is None:
        raise BoxcovError(
            f"--calibrated: {estimator.posterior or 'the method'} has no error model: fit one with "
            "boxcov calibrate"
        )
    read = FrameReader.of(detector, options.files)
    source = str(options.files.source)
    entries = read.entries(Path(source), options.watch)
    if source == "-":
        paths = paths_from_lines(sys.stdin)
        entries = (Entry(str(path), partial(read, path)) for path in paths)
    entries = islice(look_at_first(detector, entries), options.count)
    about = {**posterior_meta(estimator), **options.detector_meta, "seed": options.seed}
    meta, with_covariance = model_meta(model, about), options.with_covariance
    done = failed = 0
    stop: BaseException | None = None
    with pictures(options.show) as show:
        try:
            predict = partial(predict_line, model, show=show, with_covariance=with_covariance)
            done, failed = write_lines(predict, entries, out, latencies, meta)
        except (KeyboardInterrupt, SystemExit, BoxcovError) as error:
            if isinstance(error, BoxcovError) and not latencies.count:
                raise
            stop = error  # Ctrl-C is how a watched folder ends: its video is written first
    if stop is not None:
        raise stop
    if failed:
        raise BoxcovError(f"{failed} of {done} frames failed: see the errors in their lines")


class Latencies:
    """Milliseconds per frame, without the first frames, which warm up, if there are others."""

    def __init__(self) -> None:
        self.count = 0
        self._last: deque[float] = deque(maxlen=MAX_LATENCIES)

    def add(self, milliseconds: float) -> None:
        if self.count == WARMUP:
            self._last.clear()
        self._last.append(milliseconds)
        self.count += 1

    def __str__(self) -> str:
        if not self.count:
            return "no frame was predicted"
        p50, p95, p99 = np.percentile(self._last, [50, 95, 99])
        frames = f"{counted(self.count, 'frame')}, all warm-up"
        if self.count > WARMUP:
            frames = f"{counted(self.count - WARMUP, 'frame')} after {WARMUP} of warm-up"
        return (
            f"{frames}: p50 {p50:.1f} ms, p95 {p95:.1f} ms, p99 {p99:.1f} ms, "
            f"maximum {max(self._last):.1f} ms"
        )


def write_lines(
    predict: Callable[[Entry], dict[str, Any]],
    entries: Iterable[Entry],
    out: TextIO,
    latencies: Latencies,
    meta: Mapping[str, Any] | None = None,
) -> tuple[int, int]:
    """Write a line for each frame; return the number of frames and of failed frames.

    meta: how the boxes are computed, in the first line only.
    """
    done = failed = 0
    for entry in entries:
        line = predict(entry)
        done += 1
        if "error" in line:
            failed += 1
        else:
            latencies.add(line["ms"])
        if done == 1 and meta is not None:
            line = {**line, "meta": meta}
        try:
            say(to_json(line, compact=True), out)
        except BoxcovError as error:
            raise BoxcovError(f"the line of frame {done}: {error}, and continue there") from None
    return done, failed


def predict_line(
    model: Predictor, entry: Entry, show: Add | None = None, with_covariance: bool = False
) -> dict[str, Any]:
    """Return the boxes of one frame, or the error if it cannot be read or is not finite."""
    began, name = clock(), printable(entry.name, one_line=True)
    try:
        frame = entry.read()
        found = frame.in_file(model(frame.inputs).to("cpu"))
        ms = 1e3 * (clock() - began)
        line = {"frame": name, **_box_lists(found, with_covariance), "ms": round(ms, 3)}
    except FAILURES as error:
        kind = "" if isinstance(error, BoxcovError) else f"{type(error).__name__}: "
        return {"frame": name, "error": f"{kind}{error}"}
    if show is not None:
        show(entry.name, frame.background, found)
    return line


def _box_lists(found: Detections, with_covariance: bool) -> dict[str, Any]:
    """Return the arrays of a line: rounded, standard deviations instead of covariances."""
    arrays = found.numpy()
    if found.region_widths is not None:
        arrays["region"] = found.region(LEVEL).numpy()
    for name, short in (("covariance", "std"), ("predictive", "predictive_std")):
        if name in arrays:
            arrays[short] = np.sqrt(np.einsum("mdd->md", arrays[name]).clip(min=0))
    lists: dict[str, Any] = {"fields": list(found.fields)}
    for name, digits in (_DIGITS | (_MATRICES if with_covariance else {})).items():
        if name not in arrays:
            continue
        if not bool(np.isfinite(arrays[name]).all()) and name not in _UNKNOWN:
            raise BoxcovError(f"{name} are not finite")
        lists[name] = _round(arrays[name], digits)
    return {**lists, "labels": [found.classes[label] for label in found.labels.tolist()]}


def _round(array: np.ndarray[Any, Any], digits: int) -> Any:
    """Return nested lists, rounded to significant digits; None for NaN and infinities.

    Numbers below 5e-7 are 0, but not in matrices: they would not be positive definite any more.
    """
    x = array.astype(float)
    is_finite = np.isfinite(x)
    x[~is_finite | (np.abs(x) < (1e-30 if x.ndim == 3 else 5e-7))] = 0.0
    exponent = np.floor(np.log10(np.abs(x), where=x != 0, out=np.zeros_like(x)))
    exponent -= digits - 1
    factor = 10.0 ** np.abs(exponent)  # whole, so that the quotient is the nearest number
    x = np.where(exponent < 0, np.round(x * factor) / factor, np.round(x / factor) * factor)
    shown = x.astype(object)
    shown[~is_finite] = None
    return shown.tolist()
