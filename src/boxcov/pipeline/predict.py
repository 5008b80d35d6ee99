"""The work of ``boxcov predict``: frame by frame, in blocks that are kept beside the output until all are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from boxcov._torch.distributed import join_process_group
from boxcov.detections import Detections, concatenated
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.files import reading, remove_leftovers
from boxcov.pipeline import formats
from boxcov.pipeline.blocks import BLOCK, Parts, Progress, blocks, parts_of
from boxcov.pipeline.sources import Source, ahead, check_folder, detector_named
from boxcov.posterior.posterior import Posterior
from boxcov.predict.exact import ExactGLM
from boxcov.predict.glm import GLM
from boxcov.predict.mcglm import MCGLM, Derivative
from boxcov.predict.mci import MCI
from boxcov.predict.nms_spread import NMSSpread
from boxcov.predict.predictor import Predictor
from boxcov.version import __version__

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
        uses = {
            "mcglm": {"samples", "derivative", "epsilon"},
            "exact": {"samples"},
            "mci": {"samples"},
            "glm": {"most"},
        }
        used = uses.get(self.method, set())
        for name in ("samples", "derivative", "epsilon", "most"):
            if getattr(self, name) is not None and name not in used:
                raise BoxcovError(
                    f"--{name} means nothing to the method {self.method}: leave it out"
                )
        if self.epsilon is not None and self.derivative != "fd":
            raise BoxcovError("--epsilon is the step of --derivative fd: forward mode needs none")
        if self.posterior is None and self.method in ("mcglm", "glm", "exact"):
            raise BoxcovError(
                f"the method {self.method} needs a posterior: make one with boxcov fit, and give it as --posterior FILE"
            )
        if self.calibrated and (self.posterior is None or self.method == "nms"):
            raise BoxcovError(
                "--calibrated takes a posterior that carries a calibration: make one with boxcov calibrate"
            )
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
            return MCI(
                detector,
                posterior,
                samples=samples,
                seed=self.seed,
                calibrated=self.calibrated,
                with_logit=self.score,
            )
        assert posterior is not None
        if self.method == "glm":
            return GLM(
                detector,
                posterior,
                calibrated=self.calibrated,
                max_boxes=self.most,
                with_logit=self.score,
            )
        if self.method == "exact":
            return ExactGLM(
                detector,
                posterior,
                self.samples,
                self.seed,
                calibrated=self.calibrated,
                with_logit=self.score,
            )
        epsilon = 1e-7 if self.epsilon is None else self.epsilon
        derivative: Derivative = "fd" if self.derivative == "fd" else "jvp"
        return MCGLM(
            detector,
            posterior,
            samples,
            derivative,
            epsilon,
            self.seed,
            calibrated=self.calibrated,
            with_logit=self.score,
        )

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
    workers: int = 0,
    progress: Progress | None = None,
    block: int = BLOCK,
    words: formats.Words | None = None,
) -> dict[str, Any]:
    """Predict the frames of ``source`` and write them to ``out``; gives what there is to say of the run.

    Blocks of frames are kept in a folder beside ``out`` until all are done: ``resume`` goes on with those that are missing, and the processes of
    torchrun share them, of which the first one writes ``out`` and the others give nothing. ``frame`` of a box is the
    number of its frame; ``meta`` says how all was made, where the frames are from, and how many milliseconds each took.
    """
    check_folder(out, folder=format == "kitti")
    remove_leftovers(out)
    parts = blocks_of(out)
    with join_process_group(device) as (ranks, device):
        parts.check(resume, ranks)
        network = detector_named(detector, device)
        frames = source.frames(device, network.classes)
        formats.check(format, frames, network, how.calibrated, words)
        model = how.model(network)
        made = {
            **model.settings(),
            **how.about(),
            "detector": detector,
            "source": asdict(source),
            "frames": len(frames),
        }
        about = formats.plain(
            {**made, "device": model.device.type, "boxcov": __version__, "torch": torch.__version__}
        )

        def predicted(numbers: range, items: Iterator[Any]) -> Detections:
            return _block(
                model,
                numbers,
                items,
                (lambda done: None)
                if progress is None
                else lambda done: progress(done, len(frames)),
            )

        parts.fill(
            ahead(frames, workers, device, source.seed), about, predicted, ranks, block, progress
        )
    if ranks.rank:
        return {}
    found = merged(parts, len(frames), block)
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


def blocks_of(out: Path) -> Parts[Detections]:
    """The blocks of a run that is to write ``out``."""

    def write(path: Path, part: Detections, about: dict[str, Any]) -> None:
        replace(part, meta={**about, **part.meta}).save(path)

    def read(path: Path) -> tuple[Detections, Mapping[str, Any]]:
        found = Detections.load(path)
        return found, found.meta

    return Parts(parts_of(out), write, read)


def merged(parts: Parts[Detections], count: int, block: int = BLOCK) -> Detections:
    """All blocks of ``count`` frames as one, with the ``milliseconds`` of each frame."""
    found = parts.all(count, block)
    milliseconds: list[float] = []
    for numbers, (_, about) in zip(blocks(count, block), found):
        with reading(parts.path(numbers.start), "a block of a run"):
            milliseconds += map(float, about["milliseconds"])
    return replace(concatenated([part for part, _ in found]), meta={"milliseconds": milliseconds})


def _block(
    model: Predictor, numbers: range, items: Iterator[Any], progress: Callable[[int], None]
) -> Detections:
    """The boxes of some frames, on the CPU, with ``milliseconds`` of each frame in their meta."""
    found, milliseconds = [], []
    for number, (inputs, _) in zip(numbers, items):
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
