"""The work of ``boxcov predict``: frame by frame, in blocks that are kept beside the output until all are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from boxcov.commands import formats
from boxcov.commands.sources import Source, check_folder, detector_named
from boxcov.curvature.posterior import Posterior
from boxcov.detections import Detections, concatenated
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.files import reading
from boxcov.predict.exact import ExactGLM
from boxcov.predict.glm import GLM
from boxcov.predict.mcglm import MCGLM, Derivative
from boxcov.predict.mci import MCI
from boxcov.predict.nms import NMSSpread
from boxcov.predict.predictor import Predictor
from boxcov.version import __version__

BLOCK = 16  # frames that a run which is cut off loses at most
Progress = Callable[[int, int], None]
clock = perf_counter


@dataclass(frozen=True)
class How:
    """A method and its settings, as the command line has them; what a method has no use for must not be given.

    >>> How("glm", Path("p.safetensors"), samples=10)
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: --samples means nothing to the method glm: leave it out
    """

    method: str = "exact"
    posterior: Path | None = None
    samples: int | None = None
    derivative: str | None = None
    epsilon: float | None = None
    seed: int = 0
    calibrated: bool = False
    most: int | None = None
    score: bool = False

    def __post_init__(self) -> None:
        uses = {"mcglm": {"samples", "derivative", "epsilon"}, "exact": {"samples"}, "mci": {"samples"}, "glm": {"most"}}
        used = uses.get(self.method, set())
        for name in ("samples", "derivative", "epsilon", "most"):
            if getattr(self, name) is not None and name not in used:
                raise BoxcovError(f"--{name} means nothing to the method {self.method}: leave it out")
        if self.epsilon is not None and self.derivative != "fd":
            raise BoxcovError("--epsilon is the step of --derivative fd: forward mode needs none")
        if self.posterior is None and self.method in ("mcglm", "glm", "exact"):
            raise BoxcovError(f"the method {self.method} needs a posterior: make one with boxcov fit, and give it as --posterior FILE")
        if self.calibrated and (self.posterior is None or self.method == "nms"):
            raise BoxcovError("--calibrated takes a posterior that carries a calibration: make one with boxcov calibrate")
        if self.score and self.method == "nms":
            raise BoxcovError("--score means nothing to the method nms: leave it out")
        if self.posterior is not None and not self.posterior.is_file():
            raise BoxcovError(f"{self.posterior}: no such file: make a posterior with boxcov fit")

    def model(self, detector: Detector) -> Predictor:
        """The method at work on ``detector``."""
        if self.method == "nms":
            return NMSSpread(detector)
        posterior = None if self.posterior is None else Posterior.load(self.posterior, detector)
        samples = 10 if self.samples is None else self.samples
        if self.method == "mci":
            return MCI(detector, posterior, samples=samples, seed=self.seed, calibrated=self.calibrated, score=self.score)
        assert posterior is not None
        if self.method == "glm":
            return GLM(detector, posterior, calibrated=self.calibrated, most=self.most, score=self.score)
        if self.method == "exact":
            return ExactGLM(detector, posterior, self.samples, self.seed, calibrated=self.calibrated, score=self.score)
        epsilon = 1e-7 if self.epsilon is None else self.epsilon
        derivative: Derivative = "fd" if self.derivative == "fd" else "jvp"
        return MCGLM(detector, posterior, samples, derivative, epsilon, self.seed, calibrated=self.calibrated, score=self.score)

    def about(self) -> dict[str, Any]:
        """Which posterior, by name and content."""
        if self.posterior is None or self.method == "nms":
            return {}
        with self.posterior.open("rb") as file:
            digest = sha256()
            while piece := file.read(2**20):
                digest.update(piece)
        return {"posterior": str(self.posterior), "posterior_sha256": digest.hexdigest()}


def run(
    out: Path,
    detector: str,
    how: How,
    source: Source,
    *,
    format: str = "native",
    device: str = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
    block: int = BLOCK,
    words: formats.Words | None = None,
) -> dict[str, Any]:
    """Predict the frames of ``source`` and write them to ``out``; gives what there is to say of the run.

    Blocks of frames are kept in a folder beside ``out`` until all are done: ``resume`` goes on after the last one. ``frame`` of a box is the
    number of its frame; ``meta`` says how all was made, where the frames are from, and how many milliseconds each took.
    """
    check_folder(out)
    parts = Parts(out.with_name(f"{out.name}.parts"))
    parts.check(resume)
    network = detector_named(detector, device)
    frames = source.frames(device, network.classes)
    formats.check(format, out, frames, network, how.calibrated, words)
    model = how.model(network)
    made = {**model.settings(), **how.about(), "detector": detector, "source": asdict(source), "frames": len(frames)}
    about = formats.plain({**made, "device": str(model.device), "boxcov": __version__, "torch": torch.__version__})
    starts = range(0, len(frames), block)
    for start in starts:
        stop = min(start + block, len(frames))
        if not parts.holds(start, {**about, "block": block}):
            part = _block(
                model, frames, range(start, stop), (lambda done: None) if progress is None else lambda done: progress(done, len(frames))
            )
            parts.save(start, part, {**about, "block": block})
        elif progress is not None:
            progress(stop, len(frames))
    found = parts.merged(list(starts))
    milliseconds = found.meta["milliseconds"]
    found = replace(found, meta={**about, "milliseconds": milliseconds})
    formats.write(format, out, frames, found, words)
    parts.remove()
    known = float(found.uncertainty.median()) if len(found) else None
    return {
        "out": str(out),
        "boxes": len(found),
        "frames": len(frames),
        "milliseconds": median(milliseconds),
        "uncertainty": known,
        **about,
    }


def _block(model: Predictor, frames: Sequence[Any], numbers: range, progress: Callable[[int], None]) -> Detections:
    """The boxes of some frames, on the CPU, with ``milliseconds`` of each frame in their meta."""
    found, milliseconds = [], []
    for number in numbers:
        inputs, _ = frames[number]
        _wait(model.device)
        began = clock()
        boxes = model(inputs)
        _wait(model.device)
        milliseconds.append(round(1e3 * (clock() - began), 3))
        found.append(replace(boxes, frame=boxes.frame + number).to("cpu"))
        progress(number + 1)
    return replace(concatenated(found), meta={"milliseconds": milliseconds})


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Parts:
    """The blocks that are done, one file each, in a folder that is there only while a run is not finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check(self, resume: bool) -> None:
        if not resume and self._files():
            raise BoxcovError(
                f"{self.folder}: blocks of a run that was cut off: go on with it by --resume, or remove that folder to start anew"
            )

    def holds(self, start: int, about: dict[str, Any]) -> bool:
        """Whether the block is there; one of another run is an error."""
        path = self._path(start)
        if not path.exists():
            return False
        meta = Detections.load(path).meta
        differs = [name for name in about if meta.get(name) != about[name]]
        if differs:
            name = differs[0]
            raise BoxcovError(
                f"{path}: of another run ({name} was {meta.get(name)!r}, is {about[name]!r}): give the same options, or remove that folder"
            )
        return True

    def save(self, start: int, part: Detections, about: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        replace(part, meta={**about, **part.meta}).save(self._path(start))

    def merged(self, starts: list[int]) -> Detections:
        parts = [Detections.load(self._path(start)) for start in starts]
        milliseconds: list[float] = []
        for start, part in zip(starts, parts):
            with reading(self._path(start), "a block of a run"):
                milliseconds += map(float, part.meta["milliseconds"])
        return replace(concatenated(parts), meta={"milliseconds": milliseconds})

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

    def _path(self, start: int) -> Path:
        return self.folder / f"{start:08}.safetensors"
