"""Long runs in blocks of frames, each kept in a file until all are done: a run that was cut off goes on, and several processes share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from boxcov._torch.distributed import World
from boxcov.data.loader import load_items
from boxcov.errors import BoxcovError
from boxcov.files import made_folder, reading

T = TypeVar("T")
BLOCK = 16  # frames that a run which is cut off loses at most
Progress = Callable[[int, int], None]


def parts_of(out: Path) -> Path:
    """The folder of the blocks, until ``out`` is there.

    >>> str(parts_of(Path("d.safetensors")))
    'd.safetensors.parts'
    """
    return out.with_name(f"{out.name}.parts")


class Parts(Generic[T]):
    """The blocks that are done, one file each, in a folder that is there only while a run is not finished.

    write: a block to a file, with what is to be known about it; read: both, from the file.
    """

    def __init__(
        self,
        folder: Path,
        write: Callable[[Path, T, dict[str, Any]], None],
        read: Callable[[Path], tuple[T, Mapping[str, Any]]],
    ):
        self.folder, self.write, self.read = folder, write, read

    def check(self, resume: bool, ranks: World) -> None:
        """Refuse blocks that are in the way; one rank looks, before any of them writes."""
        if ranks.rank == 0 and not resume and self._files():
            raise BoxcovError(
                f"{self.folder}: blocks of a run that was cut off: go on with it by --resume, or remove that folder to start anew"
            )
        ranks.barrier()

    def fill(
        self,
        frames: Sequence[Any],
        about: Mapping[str, Any],
        make: Callable[[range, Iterator[Any]], T],
        ranks: World,
        block: int = BLOCK,
        progress: Progress | None = None,
    ) -> None:
        """Make what is missing of this rank's blocks, and wait for those of the others.

        make: from the numbers of some frames, and an iterator that gives just these next, to their block.
        """
        about = {**about, "block": block}
        mine = blocks(len(frames), block)[ranks.rank :: ranks.size]
        missing = []
        for numbers in mine:
            if not self.holds(numbers.start, about):
                missing.append(numbers)
            elif progress is not None:
                progress(numbers.stop, len(frames))
        with ranks.label_errors():
            items = load_items(frames, [number for numbers in missing for number in numbers])
            for numbers in missing:
                self.save(numbers.start, make(numbers, items), about)
        ranks.barrier()

    def holds(self, start: int, about: Mapping[str, Any]) -> bool:
        """Whether the block is there; one of another run is an error."""
        path = self.path(start)
        if not path.exists():
            return False
        there = self.read(path)[1]
        differs = [name for name in about if there.get(name) != about[name]]
        if differs:
            name = differs[0]
            raise BoxcovError(
                f"{path}: of another run ({name} was {there.get(name)!r}, is {about[name]!r}): give the same options, or remove that folder"
            )
        return True

    def save(self, start: int, part: T, about: Mapping[str, Any]) -> None:
        made_folder(self.folder)
        self.write(self.path(start), part, dict(about))

    def all(self, count: int, block: int = BLOCK) -> list[tuple[T, Mapping[str, Any]]]:
        """Every block of ``count`` frames, in order."""
        found = []
        for numbers in blocks(count, block):
            path = self.path(numbers.start)
            if not path.exists():
                raise BoxcovError(
                    f"{path}: is not there, though a process has made it: all must write to the same folder, on a shared disk"
                )
            with reading(path, "a block of a run"):
                found.append(self.read(path))
        return found

    def remove(self) -> None:
        for path in (*self._files(), *self.folder.glob(".*")):  # and what a kill left half written
            path.unlink()
        self.folder.rmdir()

    def clear(self) -> None:
        """Start anew, whatever is there."""
        if self.folder.is_dir():
            self.remove()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def path(self, start: int) -> Path:
        """The file of the block that begins with this frame."""
        return self.folder / f"{start:08}.safetensors"


def blocks(count: int, block: int) -> list[range]:
    """
    >>> blocks(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(start, min(start + block, count)) for start in range(0, count, block)]
