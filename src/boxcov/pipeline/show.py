"""``--show``: annotated pictures of the frames, as PNG files in a folder or as one video."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from boxcov._files.output_file import atomic_write, make_folder
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, import_package
from boxcov.pipeline.paths import check_output
from boxcov.report.canvas import draw_from_above, draw_image, reach_of

RATE = 10.0  # frames per second of a video
MAX_GIF = 500  # frames: a GIF is held in memory until it is complete
Add = Callable[[str, Any, Detections], None]  # name of a frame, its background, its boxes


def check_show(out: Path | None, force: bool) -> None:
    """Raise unless pictures can be written there, before the work."""
    if out is None:
        return
    import_package("PIL.Image")
    suffix = out.suffix.lower()
    if suffix not in ("", ".gif", ".mp4"):
        raise BoxcovError(f"--show {out}: give a folder, or a video that ends in .gif or .mp4")
    if suffix == ".mp4":
        import_package("av")
    check_output(out, force, folder=not suffix)


def check_frames(out: Path, frames: int, backgrounds: Iterator[tuple[str, Any]]) -> None:
    """Raise if a video of this kind holds fewer frames, or the first one cannot be drawn on.

    backgrounds: names and backgrounds of the frames.
    """
    if out.suffix.lower() == ".gif" and frames > MAX_GIF:
        raise BoxcovError(
            f"{out}: a GIF holds at most {MAX_GIF} frames, and these are {frames}: give an .mp4 "
            "file, or fewer frames with --count"
        )
    _check_background(*next(backgrounds))


def _check_background(name: str, background: Any) -> None:
    if background is None:
        raise BoxcovError(
            f"{name}: --show draws images (1, 3, h, w) and lists of points (n, 3 or more), and the "
            "inputs of this frame are neither: leave --show out"
        )


@contextmanager
def pictures(out: Path | None) -> Iterator[Add]:
    """Yield a function that draws one frame: name, image or points, detections of the frame."""
    if out is None:
        yield lambda name, background, found: None
        return
    writer = {".gif": _gif, ".mp4": _mp4}.get(out.suffix.lower(), _folder)
    reach: list[float] = []  # of the first frame: a view that changes with every frame flickers
    with writer(out) as write:

        def add(name: str, background: Any, found: Detections) -> None:
            _check_background(name, background)
            if background.ndim == 3:
                write(name, draw_image(found, background))
                return
            reach[:] = reach or [reach_of(background)]
            write(name, draw_from_above(found, background, reach[0]))

        yield add


@contextmanager
def _folder(out: Path) -> Iterator[Callable[[str, Any], None]]:
    for old in make_folder(out).glob(f"{'[0-9]' * 6}-*.png"):  # of a run that is replaced
        old.unlink()
    numbers = iter(range(1_000_000))

    def write(name: str, picture: Any) -> None:
        stem = os.fsdecode(os.fsencode(Path(name).stem.replace("#", "-"))[:200])  # 255 are a name
        with atomic_write(out / f"{next(numbers):06}-{stem}.png") as temporary:
            picture.save(temporary, "PNG")

    yield write


@contextmanager
def _gif(out: Path) -> Iterator[Callable[[str, Any], None]]:
    from PIL.Image import Quantize

    drawn: list[Any] = []

    def write(name: str, picture: Any) -> None:
        if len(drawn) == MAX_GIF:
            raise BoxcovError(f"{out}: a GIF holds at most {MAX_GIF} frames: give an .mp4 file")
        picture.thumbnail((800, 800))
        # median cut, Pillow's default, takes 20 times as long and turns amber boxes grey
        drawn.append(picture.quantize(255, Quantize.FASTOCTREE))

    yield write
    if drawn:
        with atomic_write(out) as temporary:
            pace = {"duration": round(1000 / RATE), "loop": 0}
            drawn[0].save(temporary, "GIF", save_all=True, append_images=drawn[1:], **pace)


@contextmanager
def _mp4(out: Path) -> Iterator[Callable[[str, Any], None]]:
    av = import_package("av")
    with atomic_write(out) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        stream = container.add_stream(codec, rate=round(RATE))
        stream.pix_fmt = "yuv420p"

        def write(name: str, picture: Any) -> None:
            if stream.width == 0 or not stream.codec_context.is_open:
                stream.width, stream.height = (side - side % 2 for side in picture.size)
            if picture.size != (stream.width, stream.height):
                picture = picture.resize((stream.width, stream.height))
            for packet in stream.encode(av.VideoFrame.from_image(picture)):
                container.mux(packet)

        yield write
        for packet in stream.encode():
            container.mux(packet)
