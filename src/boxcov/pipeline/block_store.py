"""Results of a long run in blocks of frames, one file per block until the run is complete.

An interrupted run continues with the missing blocks, and several processes share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from boxcov._files.input_file import reading
from boxcov._files.output_file import make_folder
from boxcov._torch.distributed import World
from boxcov.data.loader import load_items
from boxcov.errors import BoxcovError
from boxcov.pipeline.frames import Progress, silent
from boxcov.pipeline.paths import output_exists, refuse_other_settings

T = TypeVar("T")
BLOCK = 16  # frames per block: an interrupted run loses at most this many


class BlockStore(Generic[T]):
    """The folder next to ``out`` with the finished blocks, which exists until the run is complete.

    write: writes a block and its metadata to a file; read: returns both from the file.
    """

    def __init__(
        self,
        out: Path,
        write: Callable[[T, Path, Mapping[str, Any]], None],
        read: Callable[[Path], tuple[T, Mapping[str, Any]]],
        size: int = BLOCK,
    ):
        self.out, self.folder = out, out.with_name(f"{out.name}.parts")
        self.write, self.read, self.size = write, read, size

    def refuse_leftovers(self, resume: bool, world: World) -> None:
        """Raise if blocks of another run exist, or something else has the folder's name.

        A link would have blocks written to, and deleted from, a folder that is not the run's own.
        Rank 0 looks before any rank writes.
        """
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise BoxcovError(
                f"{self.folder}: not a folder of blocks: remove it, or give another name"
            )
        if world.rank == 0 and not resume and self._files():
            raise BoxcovError(
                f"{self.folder}: blocks of an interrupted run: continue it with --resume, "
                "or delete that folder to start again"
            )
        world.barrier()

    def refuse_finished(self, world: World) -> None:
        """Raise if the output exists and no block is left, so that no run can be continued.

        For outputs that do not state the settings they were made with.
        """
        if world.rank == 0 and output_exists(self.out) and not self._files():
            raise BoxcovError(
                f"{self.out}: exists, and no interrupted run of it is left to continue: replace it "
                "with --force, or give another name"
            )
        world.barrier()

    def fill(
        self,
        frames: Sequence[Any],
        meta: Mapping[str, Any],
        compute: Callable[[range, Iterator[Any]], T],
        world: World,
        progress: Progress = silent,
    ) -> None:
        """Compute the missing blocks of this rank, then wait for the other ranks.

        compute: computes the block of these frame numbers; the iterator yields their frames.
        """
        meta = {**meta, "block": self.size}
        missing = []
        for numbers in self.ranges(len(frames))[world.rank :: world.size]:
            if not self.has_block(numbers.start, meta):
                missing.append(numbers)
            else:
                progress(numbers.stop, len(frames))
        with world.label_errors():
            items = load_items(frames, [number for numbers in missing for number in numbers])
            for numbers in missing:
                self.save(numbers.start, compute(numbers, items), meta)
        world.barrier()

    def has_block(self, start: int, meta: Mapping[str, Any]) -> bool:
        """Return whether the block at frame ``start`` exists; raise if other options made it."""
        path = self.path(start)
        if path.exists():
            advice = "give the same options, or delete that folder"
            refuse_other_settings(path, self.read(path)[1], meta, advice)
        return path.exists()

    def save(self, start: int, block: T, meta: Mapping[str, Any]) -> None:
        """Write the block that starts at this frame."""
        make_folder(self.folder)
        self.write(block, self.path(start), meta)

    def read_all(self, count: int) -> list[tuple[T, Mapping[str, Any]]]:
        """Return every block of ``count`` frames with its metadata, in order."""
        found = []
        for numbers in self.ranges(count):
            path = self.path(numbers.start)
            if not path.exists():
                raise BoxcovError(
                    f"{path}: is missing although a process wrote it: "
                    "all processes must write to the same folder on a shared disk"
                )
            with reading(path, "a block of a run"):
                found.append(self.read(path))
        return found

    def remove(self) -> None:
        """Delete the folder and its blocks, if it exists."""
        if self.folder.is_dir():
            for path in (*self._files(), *self.folder.glob(".*")):  # hidden: left by a kill
                path.unlink()
            with suppress(OSError):  # files of somebody else stay
                self.folder.rmdir()

    def ranges(self, count: int) -> list[range]:
        """Return the frame numbers of each block of ``count`` frames."""
        starts = range(0, count, self.size)
        return [range(start, min(start + self.size, count)) for start in starts]

    def path(self, start: int) -> Path:
        """Return the file of the block that starts at this frame."""
        return self.folder / f"{start:08}.safetensors"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]" * 8 + ".safetensors"))
