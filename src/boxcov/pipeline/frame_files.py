"""Frames without labels: images, point clouds and videos, or files of the user's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from boxcov._files.input_file import MAX_BYTES, check_regular, reading
from boxcov.box_layout import IMAGE
from boxcov.data.coco.images import letterbox, read_image, to_pixels
from boxcov.data.points import LAYOUTS, check_layout, read_points
from boxcov.data.poses import transform_detections
from boxcov.data.sequence import FrameSequence
from boxcov.data.video import SUFFIXES as VIDEO_SUFFIXES
from boxcov.data.video import Video
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.torchvision import TorchvisionDetector
from boxcov.detectors.transformers.detector import QueryDetector
from boxcov.detectors.ultralytics import Yolo
from boxcov.detectors.yolox import YOLOX
from boxcov.errors import BoxcovError
from boxcov.outlines import background_of
from boxcov.pipeline.detectors import is_foreign, trained_size, warn_if_implausible, warn_of_sweeps
from boxcov.pipeline.kitti_axes import TO_KITTI, has_kitti_classes, points_to_nuscenes
from boxcov.pipeline.options.common import ReaderOptions
from boxcov.pipeline.user_code import load_function

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FAILURES = (BoxcovError, OSError, RuntimeError, ValueError)  # of a frame that cannot be read


class Frame(NamedTuple):
    """The input of a detector, and what its boxes are drawn on."""

    inputs: Any
    background: Any  # image (h, w, 3) of bytes or points (N, 3 or more); None if unknown
    restore: Callable[[Detections], Detections] | None = None  # boxes in axes, pixels of the file

    def in_file(self, found: Detections) -> Detections:
        """Return the boxes in the axes or pixels of the file."""
        return found if self.restore is None else self.restore(found)


class Entry(NamedTuple):
    """A frame that is not read yet."""

    name: str
    read: Callable[[], Frame]


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

    @staticmethod
    def of(detector: Detector, options: ReaderOptions) -> FrameReader:
        function = None if options.reader is None else load_function(options.reader)
        if function is None and options.points != "plain":
            warn_of_sweeps(detector, 1, "join {} into each file, and give --points plain")
        return FrameReader(detector, options.points, options.size, function)

    def __post_init__(self) -> None:
        if self.function is None and not self._reads_images and not self._reads_points:
            raise BoxcovError(
                f"boxcov does not know the input files of a {type(self.detector).__name__}: give "
                "--reader python:FILE.py:FUNCTION, which takes a path and returns the inputs"
            )
        needs_size = self.function is None and isinstance(self.detector, (YOLOX, Yolo))
        if needs_size and not (self.size or trained_size(self.detector)):
            raise BoxcovError(
                "boxcov does not know the size of the images that this network was trained on: "
                "give --size, in pixels"
            )

    @property
    def suffixes(self) -> tuple[str, ...]:
        """How the names of frames end; every name ends in an empty suffix."""
        if self.function is not None:
            return ("",)
        return IMAGE_SUFFIXES if self._reads_images else (".bin",)

    @property
    def _reads_points(self) -> bool:
        return isinstance(self.detector, CenterPoint)

    @property
    def _reads_images(self) -> bool:
        if isinstance(self.detector, QueryDetector):
            return self.detector.images is not None
        return isinstance(self.detector, (YOLOX, TorchvisionDetector, Yolo))

    def __call__(self, path: Path) -> Frame:
        """Read a file."""
        with reading(path, "a frame"):
            check_regular(path, MAX_BYTES)  # a pipe would wait for ever, a device never end
        if self.function is not None:
            inputs = self.function(path)
            return Frame(inputs, background_of(inputs))
        return self.image(read_image(path)) if self._reads_images else self._cloud(path)

    def image(self, image: Tensor) -> Frame:
        """Return the frame of an image (3, h, w) of bytes: blue, green, red."""
        detector, background = self.detector, to_pixels(image)
        size = self.size or trained_size(detector)
        scale, inputs = 1.0, image.float()
        if size is not None:
            inputs, scale = letterbox(image, size)
        is_rgb = isinstance(detector, TorchvisionDetector) and detector.images == "rgb"
        if is_rgb or (isinstance(detector, Yolo) and not detector.coco):
            inputs = inputs.flip(0) / 255
        restore = None if scale == 1 else partial(scale_boxes, factor=1 / scale)
        return Frame(inputs.unsqueeze(0), background, restore)

    def _cloud(self, path: Path) -> Frame:
        cloud = read_points(path, 4 if self.points == "kitti" else 5, advice=LAYOUTS)
        check_layout(cloud, self.points, path)
        seen = cloud.numpy()
        if self.points == "plain":
            return Frame([cloud], seen)
        age = torch.zeros(len(cloud), 1)
        if self.points == "nuscenes":
            return Frame([torch.cat([cloud[:, :4], age], 1)], seen)
        cloud = torch.cat([cloud[:, :3], 255 * cloud[:, 3:], age], 1)
        if has_kitti_classes(self.detector.classes):
            return Frame([cloud], seen)
        restore = partial(transform_detections, pose=TO_KITTI)
        return Frame([points_to_nuscenes(cloud)], seen, restore)

    def entries(self, source: Path, watch: bool = False) -> Iterator[Entry]:
        """Yield the frames of a folder, of a video, or the one of a file."""
        if is_video(source):
            if not self._reads_images:
                raise BoxcovError(f"{source}: is a video; this detector reads no images")
            yield from self._video_entries(source)
        elif source.is_file():
            yield Entry(str(source), partial(self, source))
        else:
            for path in paths_in_folder(source, self.suffixes, watch):
                yield Entry(str(path), partial(self, path))

    def _video_entries(self, source: Path) -> Iterator[Entry]:
        video = Video(source)

        def frame(number: int) -> Frame:
            return self.image(torch.from_numpy(video[number][:, :, ::-1].copy()).permute(2, 0, 1))

        return (Entry(f"{source}#{number}", partial(frame, number)) for number in range(len(video)))


def is_video(source: Path) -> bool:
    """Return whether a source is a video, by the end of its name."""
    return source.suffix.lower() in VIDEO_SUFFIXES and not source.is_dir()


def look_at_first(detector: Detector, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the frames; warn if the boxes of the first one that can be read do not look right."""
    is_needed = is_foreign(detector)
    for entry in entries:
        if is_needed:
            with suppress(*FAILURES):  # whoever reads the frame will name it
                warn_if_implausible(detector, [(entry.read().inputs, ())])
                is_needed = False
        yield entry


class FileFrames(FrameSequence):
    """The frames of a source as (inputs, Frame), for commands that need their number."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__(len(entries))
        self.entries = entries

    @property
    def names(self) -> list[str]:
        return [self.entries[index].name for index in self.indices]

    def load(self, index: int) -> tuple[Any, Frame]:
        frame = self.entries[index].read()
        return frame.inputs, frame


def scale_boxes(found: Detections, factor: float) -> Detections:
    """Return boxes x1 y1 x2 y2 and their covariances in pixels of another size."""
    factors = torch.tensor(
        [factor if name in IMAGE else 1.0 for name in found.fields], device=found.boxes.device
    )
    lengths = ("boxes", "scale", "region_widths", "joint_widths", "score_covariance")
    scales = dict.fromkeys(lengths, factors)
    scales |= dict.fromkeys(("covariance", "predictive"), factors * factors.unsqueeze(1))
    tensors = {name: getattr(found, name) for name in scales}
    scaled: dict[str, Any] = {n: t * scales[n] for n, t in tensors.items() if t is not None}
    return replace(found, **scaled)


def paths_from_lines(lines: TextIO) -> Iterator[Path]:
    """Yield one path per line as soon as the line is written."""
    if isinstance(lines, TextIOWrapper):
        lines.reconfigure(errors="surrogateescape")  # names of files need not be UTF-8
    for line in iter(lines.readline, ""):  # iterating over the file itself would read ahead
        if line.strip():
            yield Path(line.strip())


def paths_in_folder(
    folder: Path, suffixes: tuple[str, ...], watch: bool, poll: float = 0.1
) -> Iterator[Path]:
    """Yield the files of a folder by name; ``watch``: also new files once they stop growing."""
    if not folder.is_dir():
        raise BoxcovError(
            f"{folder}: no such file or folder: give a folder of frames, one frame, or a video "
            "(boxcov stream also takes -, paths on stdin)"
        )
    done: set[str] = set()
    sizes: dict[str, int] = {}
    while True:
        with reading(folder, "a folder of frames"):  # a watched one can vanish
            found = list(folder.iterdir())
        names = sorted(
            path.name
            for path in found
            if path.name.lower().endswith(suffixes) and path.name not in done and not path.is_dir()
        )
        for name in names:
            size = 0
            with suppress(OSError):  # a link that leads nowhere: the line of the frame names it
                size = (folder / name).stat().st_size if watch else 0
            if watch and sizes.get(name) != size:  # not yet seen twice with the same size
                sizes[name] = size
                continue
            done.add(name)
            sizes.pop(name, None)
            yield folder / name
        if not watch:
            if not done:
                kinds = f"{' or '.join(suffixes)} file".lstrip()
                raise BoxcovError(
                    f"{folder}: no {kinds} there, which this detector reads: give a folder that "
                    "has some, another --detector, or --reader python:FILE.py:FUNCTION"
                )
            return
        time.sleep(poll)
