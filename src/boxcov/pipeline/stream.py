"""The work of ``boxcov stream``: frames in, one JSON line a frame out, latencies at the end."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from boxcov.data import kitti
from boxcov.data.coco.images import letterbox, read_image
from boxcov.data.points import read_points
from boxcov.data.poses import transform_detections
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.detectors.yolox import YOLOX
from boxcov.errors import BoxcovError
from boxcov.pipeline.formats import TURN_BACK
from boxcov.pipeline.sources import turned
from boxcov.predict.predictor import Predictor

POINTS = ("nuscenes", "kitti", "plain")
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
KEPT = 100_000  # latencies, the last ones: an endless stream takes no more memory
clock = time.perf_counter


@dataclass(frozen=True)
class Reader:
    """Files of one kind as inputs of the detector, and its boxes as they lie in the file.

    points: the numbers of a point in a .bin file. "nuscenes": x y z intensity and the beam's; "kitti": x y z and an intensity up to 1, x forward;
    "plain": x y z intensity and age, as boxcov has them. size: pixels of the square that an image is letterboxed to.
    """

    detector: Detector
    points: str = "nuscenes"
    size: int | None = None

    @property
    def suffixes(self) -> tuple[str, ...]:
        return PICTURES if isinstance(self.detector, YOLOX) else (".bin",)

    def __call__(self, path: Path) -> tuple[Any, Callable[[Detections], Detections]]:
        """The inputs, and how to bring boxes back into the file's own axes or pixels."""
        if isinstance(self.detector, YOLOX):
            square, scale = letterbox(read_image(path), self.size or self.detector.config.size)
            return square.unsqueeze(0), lambda found: enlarged(found, 1 / scale)
        cloud = read_points(path, 4 if self.points == "kitti" else 5)
        if self.points == "plain":
            return [cloud], lambda found: found
        age = torch.zeros(len(cloud), 1)
        if self.points == "nuscenes":
            return [torch.cat([cloud[:, :4], age], 1)], lambda found: found
        cloud = torch.cat([cloud[:, :3], 255 * cloud[:, 3:], age], 1)
        if tuple(name.lower() for name in self.detector.classes) == tuple(
            name.lower() for name in kitti.CLASSES
        ):
            return [cloud], lambda found: found
        return [turned(cloud)], lambda found: transform_detections(found, TURN_BACK)


def enlarged(found: Detections, factor: float) -> Detections:
    """Boxes x1 y1 x2 y2 and what goes with them, in pixels of another size.

    >>> one = Detections(torch.ones(1, 4), torch.ones(1), torch.zeros(1), torch.zeros(1), ("x1", "y1", "x2", "y2"), ("cat",), torch.ones(1, 4, 4))
    >>> enlarged(one, 2.0).boxes[0, 0], enlarged(one, 2.0).covariance[0, 0, 0]
    (tensor(2.), tensor(4.))
    """
    by = torch.tensor(
        [factor if name in ("x1", "y1", "x2", "y2") else 1.0 for name in found.fields]
    )
    covariance, predictive = (
        None if C is None else C * by * by.unsqueeze(1)
        for C in (found.covariance, found.predictive)
    )
    return replace(found, boxes=found.boxes * by, covariance=covariance, predictive=predictive)


def listed_paths(lines: TextIO) -> Iterator[Path]:
    """The paths that come in, a line each, until there are no more.

    >>> import io
    >>> [str(path) for path in listed_paths(io.StringIO("a.bin\\n\\nb.bin\\n"))]
    ['a.bin', 'b.bin']
    """
    for line in iter(lines.readline, ""):  # readline: a line is there as soon as it is written
        if line.strip():
            yield Path(line.strip())


def folder_paths(
    folder: Path, suffixes: tuple[str, ...], watch: bool, poll: float = 0.1
) -> Iterator[Path]:
    """The files of a folder by name; with ``watch`` new ones, too, without an end, each once it has stopped growing."""
    if not folder.is_dir():
        raise BoxcovError(f"{folder}: no such folder: give one of frames, or - for paths on stdin")
    done: set[str] = set()
    sizes: dict[str, int] = {}
    while True:
        names = sorted(
            path.name
            for path in folder.iterdir()
            if path.suffix.lower() in suffixes and path.name not in done
        )
        for name in names:
            size = (folder / name).stat().st_size if watch else 0
            if watch and sizes.get(name) != size:  # not before it was seen twice with the same size
                sizes[name] = size
                continue
            done.add(name)
            sizes.pop(name, None)
            yield folder / name
        if not watch:
            if not done:
                raise BoxcovError(f"{folder}: no {' or '.join(suffixes)} file there")
            return
        time.sleep(poll)


class Latencies:
    """Milliseconds of the frames so far, those of the first few apart: they pay for what is made once.

    >>> seen = Latencies(warmup=1)
    >>> for ms in (90.0, 10.0, 20.0, 30.0):
    ...     seen.add(ms)
    >>> seen.shown()
    '3 frames after 1 of warm-up: p50 20.0 ms, p95 29.0 ms, p99 29.8 ms, most 30.0 ms'
    """

    def __init__(self, warmup: int) -> None:
        self.warmup, self.count = warmup, 0
        self._first: list[float] = []
        self._steady: deque[float] = deque(maxlen=KEPT)

    def add(self, milliseconds: float) -> None:
        (self._first if self.count < self.warmup else self._steady).append(milliseconds)
        self.count += 1

    def shown(self) -> str:
        if not self.count:
            return "no frames"
        numbers = list(self._steady) or self._first
        half, most, nearly = np.percentile(numbers, [50, 95, 99])
        what = (
            f"{self.count - self.warmup} frames after {self.warmup} of warm-up"
            if self._steady
            else f"{self.count} frames, all of them warm-up"
        )
        return f"{what}: p50 {half:.1f} ms, p95 {most:.1f} ms, p99 {nearly:.1f} ms, most {max(numbers):.1f} ms"


def run(
    model: Predictor,
    reader: Reader,
    paths: Iterator[Path],
    out: TextIO,
    seen: Latencies,
    count: int | None = None,
) -> tuple[int, int]:
    """A line for every frame, as soon as it is there; how many frames there were, and how many of them gave an error."""
    done = bad = 0
    for path in paths:
        line = one(model, reader, path)
        bad += "error" in line
        done += 1
        if "error" not in line:
            seen.add(line["ms"])
        _print(line, out, done)
        if count is not None and done >= count:
            break
    return done, bad


def _print(line: dict[str, Any], out: TextIO, number: int) -> None:
    try:
        print(json.dumps(line), file=out, flush=True)
    except OSError as error:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), out.fileno()
        )  # what is left in the buffer has nowhere to go
        if isinstance(error, BrokenPipeError):  # whoever read has gone
            raise
        raise BoxcovError(
            f"the line of frame {number} cannot be written to stdout ({error.strerror or error}): make room, and go on from there"
        ) from None


def one(model: Predictor, reader: Reader, path: Path) -> dict[str, Any]:
    """What there is to say of one frame; a frame that cannot be read, or whose numbers are none, says why."""
    began = clock()
    try:
        inputs, back = reader(path)
        found = back(model(inputs).to("cpu"))
        ms = 1e3 * (clock() - began)
        return {"frame": str(path), **_numbers(found), "ms": round(ms, 3)}
    except (BoxcovError, OSError, RuntimeError, ValueError) as error:
        return {
            "frame": str(path),
            "error": str(error)
            if isinstance(error, BoxcovError)
            else f"{type(error).__name__}: {error}",
        }


def _numbers(found: Detections) -> dict[str, Any]:
    tensors = {
        "boxes": found.boxes,
        "scores": found.scores,
        "covariance": found.covariance,
        "predictive": found.predictive,
    }
    lists = {
        name: tensor.tolist()
        for name, tensor in tensors.items()
        if tensor is not None and _finite(name, tensor)
    }
    return {
        "fields": list(found.fields),
        **lists,
        "labels": [found.classes[label] for label in found.labels.tolist()],
    }


def _finite(name: str, tensor: Tensor) -> bool:
    if not bool(tensor.isfinite().all()):
        raise BoxcovError(f"{name} are not finite")
    return True
