"""``boxcov stream``: frames in, one JSON line per frame out, latencies at the end."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from boxcov.data import kitti
from boxcov.data.coco.images import letterbox, read_image
from boxcov.data.points import read_points
from boxcov.data.poses import transform_detections
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.yolox import YOLOX
from boxcov.errors import BoxcovError
from boxcov.files import to_json
from boxcov.input_file import MAX_BYTES, check_regular, reading
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.kitti_axes import TO_KITTI, points_to_nuscenes
from boxcov.pipeline.options import StreamCommand
from boxcov.pipeline.predict import build_predictor
from boxcov.pipeline.terminal import say
from boxcov.pipeline.user_code import load_function
from boxcov.predict.predictor import Predictor

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
MAX_LATENCIES = 100_000  # only the last ones are stored, so that an endless stream fits in memory
_LINE = (  # arrays of a line, those that there are
    *("boxes", "scores", "covariance", "risk", "no_object", "misplaced", "flipped", "predictive"),
)
clock = time.perf_counter


def run(options: StreamCommand, out: TextIO, latencies: Latencies) -> None:
    """Write one JSON line per frame to ``out``, and add the time of each frame to ``latencies``.

    A frame that cannot be read gives a line with an error, and the stream continues; raise at the
    end if there was one.
    """
    estimator = options.estimator.for_detector(options.detector)
    detector = load_detector(options, options.device)
    model = build_predictor(detector, estimator, options.seed)
    read = FrameReader(detector, options.points, options.size, load_reader(options.reader))
    paths = (
        paths_from_lines(sys.stdin)
        if options.frames == "-"
        else paths_in_folder(Path(options.frames), read.suffixes, options.watch)
    )
    done, failed = write_lines(model, read, paths, out, latencies, options.count)
    if failed:
        raise BoxcovError(f"{failed} of {done} frames failed: see the errors in their lines")


def load_reader(name: str | None) -> Callable[[Path], Any] | None:
    """Return the function that ``--reader`` names, if it is given."""
    return None if name is None else load_function(name)


@dataclass(frozen=True)
class FrameReader:
    """Reads a file as an input of the detector.

    points: layout of a point in a .bin file. "nuscenes": x y z intensity ring; "kitti": x y z and
    an intensity up to 1, x ahead; "plain": x y z intensity age. size: side of the square that an
    image is letterboxed to, in pixels. function: the user's own, from a path to inputs, for any
    other detector.
    """

    detector: Detector
    points: str = "nuscenes"
    size: int | None = None
    function: Callable[[Path], Any] | None = None

    def __post_init__(self) -> None:
        if self.function is None and not isinstance(self.detector, (CenterPoint, YOLOX)):
            raise BoxcovError(
                f"boxcov does not know the input files of a {type(self.detector).__name__}: give "
                "--reader python:FILE.py:FUNCTION, which takes a path and returns the inputs"
            )

    @property
    def suffixes(self) -> tuple[str, ...]:
        """How the names of frames end; every name ends in an empty suffix."""
        if self.function is not None:
            return ("",)
        return IMAGE_SUFFIXES if isinstance(self.detector, YOLOX) else (".bin",)

    def __call__(self, path: Path) -> tuple[Any, Callable[[Detections], Detections]]:
        """Return the inputs, and a function that maps boxes to the axes or pixels of the file."""
        if self.function is not None:
            return self.function(path), lambda found: found
        if isinstance(self.detector, YOLOX):
            square, scale = letterbox(read_image(path), self.size or self.detector.config.size)
            return square.unsqueeze(0), lambda found: scale_boxes(found, 1 / scale)
        cloud = read_points(path, 4 if self.points == "kitti" else 5)
        if self.points == "plain":
            return [cloud], lambda found: found
        age = torch.zeros(len(cloud), 1)
        if self.points == "nuscenes":
            return [torch.cat([cloud[:, :4], age], 1)], lambda found: found
        cloud = torch.cat([cloud[:, :3], 255 * cloud[:, 3:], age], 1)
        classes = [name.lower() for name in self.detector.classes]
        if classes == [name.lower() for name in kitti.CLASSES]:
            return [cloud], lambda found: found
        return [points_to_nuscenes(cloud)], lambda found: transform_detections(found, TO_KITTI)


def scale_boxes(found: Detections, factor: float) -> Detections:
    """Return boxes x1 y1 x2 y2 and their covariances in pixels of another size.

    >>> zero, fields = torch.zeros(1), ("x1", "y1", "x2", "y2")
    >>> box, covariance = torch.ones(1, 4), torch.ones(1, 4, 4)
    >>> one = Detections(box, torch.ones(1), zero, zero, fields, ("cat",), covariance)
    >>> scale_boxes(one, 2.0).boxes[0, 0], scale_boxes(one, 2.0).covariance[0, 0, 0]
    (tensor(2.), tensor(4.))
    """
    pixels = ("x1", "y1", "x2", "y2")
    factors = torch.tensor([factor if name in pixels else 1.0 for name in found.fields])
    lengths = ("boxes", "scale", "region_widths", "joint_widths")
    scales = dict.fromkeys(lengths, factors)
    scales |= dict.fromkeys(("covariance", "predictive"), factors * factors.unsqueeze(1))
    tensors = {name: getattr(found, name) for name in scales}
    scaled: dict[str, Any] = {n: t * scales[n] for n, t in tensors.items() if t is not None}
    return replace(found, **scaled)


def paths_from_lines(lines: TextIO) -> Iterator[Path]:
    """Yield one path per line as soon as the line is written.

    >>> import io
    >>> [str(path) for path in paths_from_lines(io.StringIO("a.bin\\n\\nb.bin\\n"))]
    ['a.bin', 'b.bin']
    """
    for line in iter(lines.readline, ""):  # iterating over the file itself would read ahead
        if line.strip():
            yield Path(line.strip())


def paths_in_folder(
    folder: Path, suffixes: tuple[str, ...], watch: bool, poll: float = 0.1
) -> Iterator[Path]:
    """Yield the files of a folder by name; ``watch``: also new files once they stop growing."""
    if not folder.is_dir():
        raise BoxcovError(
            f"{folder}: no such folder: give a folder of frames, or - for paths on stdin"
        )
    done: set[str] = set()
    sizes: dict[str, int] = {}
    while True:
        names = sorted(
            path.name
            for path in folder.iterdir()
            if path.name.lower().endswith(suffixes) and path.name not in done and not path.is_dir()
        )
        for name in names:
            size = _size(folder / name) if watch else 0
            if watch and sizes.get(name) != size:  # not yet seen twice with the same size
                sizes[name] = size
                continue
            done.add(name)
            sizes.pop(name, None)
            yield folder / name
        if not watch:
            if not done:
                kinds = f"{' or '.join(suffixes)} file".lstrip()
                raise BoxcovError(f"{folder}: no {kinds} there")
            return
        time.sleep(poll)


def _size(path: Path) -> int:
    """The size of a file; -1 of a link that leads nowhere, which the line of the frame names."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


class Latencies:
    """Milliseconds per frame; the first frames are counted separately because they warm up.

    >>> latencies = Latencies(warmup=1)
    >>> for ms in (90.0, 10.0, 20.0, 30.0):
    ...     latencies.add(ms)
    >>> print(latencies)
    3 frames after 1 of warm-up: p50 20.0 ms, p95 29.0 ms, p99 29.8 ms, maximum 30.0 ms
    """

    def __init__(self, warmup: int) -> None:
        self.warmup, self.count = warmup, 0
        self._first: list[float] = []
        self._steady: deque[float] = deque(maxlen=MAX_LATENCIES)

    def add(self, milliseconds: float) -> None:
        (self._first if self.count < self.warmup else self._steady).append(milliseconds)
        self.count += 1

    def __str__(self) -> str:
        if not self.count:
            return "no frames"
        numbers = list(self._steady) or self._first
        p50, p95, p99 = np.percentile(numbers, [50, 95, 99])
        frames = (
            f"{self.count - self.warmup} frames after {self.warmup} of warm-up"
            if self._steady
            else f"{self.count} frames, all of them warm-up"
        )
        return (
            f"{frames}: p50 {p50:.1f} ms, p95 {p95:.1f} ms, p99 {p99:.1f} ms, "
            f"maximum {max(numbers):.1f} ms"
        )


def write_lines(
    model: Predictor,
    read: FrameReader,
    paths: Iterator[Path],
    out: TextIO,
    latencies: Latencies,
    count: int | None = None,
) -> tuple[int, int]:
    """Write a line for each path; return the number of frames and of failed frames."""
    done = failed = 0
    for path in paths:
        line = predict_line(model, read, path)
        done += 1
        if "error" in line:
            failed += 1
        else:
            latencies.add(line["ms"])
        _print_line(line, out, done)
        if count is not None and done >= count:
            break
    return done, failed


def _print_line(line: dict[str, Any], out: TextIO, number: int) -> None:
    try:
        say(to_json(line), out)
    except BoxcovError as error:
        raise BoxcovError(f"the line of frame {number}: {error}, and continue there") from None


def predict_line(model: Predictor, read: FrameReader, path: Path) -> dict[str, Any]:
    """Return the boxes of one frame, or the error if it cannot be read or is not finite."""
    began = clock()
    try:
        with reading(path, "a frame"):
            check_regular(path, MAX_BYTES)  # a pipe would wait for ever, a device never end
        inputs, to_file = read(path)
        found = to_file(model(inputs).to("cpu"))
        ms = 1e3 * (clock() - began)
        return {"frame": str(path), **_box_lists(found), "ms": round(ms, 3)}
    except (BoxcovError, OSError, RuntimeError, ValueError) as error:
        kind = "" if isinstance(error, BoxcovError) else f"{type(error).__name__}: "
        return {"frame": str(path), "error": f"{kind}{error}"}


def _box_lists(found: Detections) -> dict[str, Any]:
    lists: dict[str, Any] = {"fields": list(found.fields)}
    arrays = found.numpy()
    for name in (name for name in _LINE if name in arrays):
        if not bool(np.isfinite(arrays[name]).all()):
            raise BoxcovError(f"{name} are not finite")
        lists[name] = arrays[name].tolist()
    return {**lists, "labels": [found.classes[label] for label in found.labels.tolist()]}
