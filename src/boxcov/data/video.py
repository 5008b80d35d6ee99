"""Frames of videos: GIF by Pillow; MP4, MOV, MKV, WebM and AVI by PyAV (``pip install av``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov._files.input_file import MAX_FRAMES, open_bytes, reading
from boxcov.data.coco.images import MAX_BYTES, check_pixels
from boxcov.errors import BoxcovError, import_package

# by suffix: one container, so that no playlist can name other files or addresses
CONTAINERS = {".mp4": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "matroska", ".avi": "avi"}
SUFFIXES = (".gif", *CONTAINERS)
RATE = 10.0  # frames per second of a video that does not say


class Video:
    """The frames of a video as bytes (h, w, 3): red, green, blue. Fast if read in order.

    rate: frames per second.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self._reading():
            self.count, self.rate = self._describe()
            if not 0 < self.count <= MAX_FRAMES:
                raise BoxcovError(f"{self.count} frames, expected 1 to {MAX_FRAMES}")
        self._next = 0  # number of the next frame
        self._frames: Iterator[NDArray[np.uint8]] = iter(())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        index = range(self.count)[index]
        with self._reading():
            if index < self._next or not self._next:
                self._next, self._frames = 0, self._decode()
            for image in self._frames:
                self._next += 1
                if self._next > index:
                    return image
            raise BoxcovError(f"ends after {self._next} of {self.count} frames")

    def _reading(self) -> Any:
        return reading(self.path, "a GIF, MP4, MOV, MKV, WebM or AVI video")

    def _describe(self) -> tuple[int, float]:
        """Return the number of frames and the frames per second."""
        if self.path.suffix.lower() == ".gif":
            with self._gif() as image:
                milliseconds = image.info.get("duration", 0)
                return image.n_frames, 1000 / milliseconds if milliseconds else RATE
        with self._container() as (container, stream):
            count = sum(1 for packet in container.demux(stream) if packet.size)
            return count, float(stream.average_rate or RATE)

    def _decode(self) -> Iterator[NDArray[np.uint8]]:
        if self.path.suffix.lower() == ".gif":
            with self._gif() as image:
                for number in range(self.count):
                    image.seek(number)
                    yield np.asarray(image.convert("RGB"))
            return
        with self._container() as (container, stream):
            for frame in container.decode(stream):
                check_pixels(frame.width, frame.height)
                yield frame.to_ndarray(format="rgb24")

    @contextmanager
    def _gif(self) -> Iterator[Any]:
        Image = import_package("PIL.Image")
        with open_bytes(self.path, MAX_BYTES) as file, Image.open(file, formats=["GIF"]) as image:
            check_pixels(image.width, image.height)
            yield image

    @contextmanager
    def _container(self) -> Iterator[tuple[Any, Any]]:
        av = import_package("av")
        container = CONTAINERS.get(self.path.suffix.lower())
        if container is None:
            raise BoxcovError(f"unknown suffix: videos end in {', '.join(SUFFIXES)}")
        try:
            with open_bytes(self.path) as file, av.open(file, format=container) as opened:
                if not opened.streams.video:
                    raise BoxcovError("holds no video")
                stream = opened.streams.video[0]
                check_pixels(stream.width, stream.height)
                yield opened, stream
        except av.error.FFmpegError as error:
            raise ValueError(str(error)) from None
