"""Doing the runs: posteriors and predictions, each one file that is there whole or not at all, and is not made twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from boxcov.data import batched
from boxcov.detections import Detections, concatenated
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, NotFiniteError
from boxcov.files import made_folder, reading, replacing
from boxcov.kfac.fit import fit
from boxcov.pipeline.records import Truth, truth_of
from boxcov.pipeline.reproduce.setting import TEST, Run, Setting
from boxcov.pipeline.sources import Source, detector_named, kept
from boxcov.posterior.posterior import Posterior
from boxcov.predict.exact import ExactGLM
from boxcov.predict.glm import GLM
from boxcov.predict.mcglm import MCGLM
from boxcov.predict.mci import MCI
from boxcov.predict.nms_spread import NMSSpread
from boxcov.version import __version__

Progress = Callable[[str, int, int], None]  # what, done, of how many


_FOLDERS = ("posteriors", "predictions", "truth", "tables", "figures")


class Workshop:
    """The folder of a reproduction: what is there is used, what is missing is made when asked for."""

    def __init__(self, folder: Path, setting: Setting, progress: Progress | None = None) -> None:
        self.folder, self.setting = folder, setting
        self.progress = progress or (lambda what, done, total: None)
        self._detector: Detector | None = None
        self._frames: dict[str, Sequence[Any]] = {}
        self._posteriors: dict[float, Posterior] = {}
        self._last: tuple[Run, Callable[[Any], Detections]] | None = None
        for name in _FOLDERS:
            made_folder(folder / name)
        self._check_setting()
        for half in (
            half for within in (folder, *folder.iterdir()) for half in within.glob(".*.????????")
        ):
            half.unlink()  # what ``replacing`` had begun to write when it was killed

    def _check_setting(self) -> None:
        """A folder belongs to one setting and one version: figures of two would be mixed otherwise."""
        path, mine = self.folder / "setting.json", {"version": __version__, **self.setting.json()}
        if not path.exists() or not any(
            True for name in _FOLDERS for _ in (self.folder / name).iterdir()
        ):  # of nothing, as of a mistyped word
            with replacing(path) as file:
                file.write_text(json.dumps(mine, indent=1) + "\n")
            return
        try:
            there = json.loads(path.read_text())
        except ValueError:
            raise BoxcovError(
                f"{path}: damaged; remove the folder or choose another with --out"
            ) from None
        other = sorted(name for name in {*mine, *there} if mine.get(name) != there.get(name))
        if other:
            differs = ", ".join(
                f"{name} {there.get(name)!r} there and {mine.get(name)!r} now" for name in other
            )
            raise BoxcovError(
                f"{self.folder} holds a reproduction of another setting ({differs}): choose another folder with --out"
            )

    # what the runs are made of

    @property
    def detector(self) -> Detector:
        if self._detector is None:
            self._detector = detector_named(self.setting.detector, self.setting.device)
        return self._detector

    def frames(self, on: str) -> Sequence[Any]:
        """The frames of a run, made once: the test frames, or those of a shift."""
        if on not in self._frames:
            s = self.setting
            test = Source(s.test, s.test_split, s.test_count, s.seed, s.sweeps)
            source = test if on == TEST else replace(test, data=on, count=s.shift_count)
            self._frames[on] = kept(source.frames(s.device, self.detector.classes), s.device)
        return self._frames[on]

    def posterior(self, share: float = 1.0) -> Posterior:
        """Of the whole network, from a share of the frames: fitted once, then read."""
        if share not in self._posteriors:
            path = self.folder / "posteriors" / f"{share:g}.safetensors"
            checkpoint = path.with_name(f"{path.name}.checkpoint")
            if not path.exists():
                self._fitted(share, checkpoint).save(path)
            checkpoint.unlink(missing_ok=True)
            self._posteriors[share] = Posterior.load(path, self.detector)
        return self._posteriors[share]

    def _fitted(self, share: float, checkpoint: Path) -> Posterior:
        s, what = self.setting, f"posterior from {share:.0%} of the frames"
        data = Source(s.data, s.split, s.count, s.seed, s.sweeps).frames(
            s.device, self.detector.classes
        )
        return fit(
            self.detector,
            batched(data, 2),
            depth="backbone",
            n_data=s.n_data,
            prior_precision=s.prior_precision,
            fraction=share,
            checkpoint=checkpoint,
            resume=True,
            progress=lambda done, total: self.progress(what, done, total or done),
        )

    # the runs

    def path(self, run: Run) -> Path:
        return self.folder / "predictions" / f"{run.key}.safetensors"

    def done(self, run: Run) -> bool:
        """Whether there is nothing to do: the files are there, or the detector cannot say what NMS removed."""
        if run.method == "nms" and type(self.detector).candidates is Detector.candidates:
            return True
        return self.path(run).exists() and self._truth_path(run.on).exists()

    def make(self, run: Run) -> None:
        """The predictions of a run, written to their file; the objects of its frames, to theirs."""
        if not self._truth_path(run.on).exists():
            self._write_truth(run.on)
        if self.path(run).exists():
            return
        frames = self.frames(run.on)
        try:
            found, meta = self._predicted(
                self._model(run), frames[:1] if run.method == "glm" else frames, run.key
            )
        except NotFiniteError as error:  # a result, too: there is no covariance under this setting
            found, meta = self._predicted(self.detector.detect, frames, run.key)
            meta["refused"] = str(error).partition(" (box")[0]
        together = concatenated(found).to("cpu")
        replace(together, meta={**together.meta, **meta}).save(self.path(run))

    def _predicted(
        self, model: Callable[[Any], Detections], frames: Sequence[Any], what: str
    ) -> tuple[list[Detections], dict[str, Any]]:
        found, times = [], []
        for number, (inputs, _) in enumerate(frames):
            start = _now(self.setting.device)
            one = model(inputs)
            times.append(1e3 * (_now(self.setting.device) - start))
            found.append(replace(one, frame=torch.full_like(one.frame, number)))
            self.progress(what, number + 1, len(frames))
        return found, {"ms": times, "frames": len(frames)}

    def _model(self, run: Run) -> Callable[[Any], Detections]:
        """The method at work; kept while only the frames change."""
        kind = replace(run, on=TEST)
        if self._last is None or self._last[0] != kind:
            self._last = kind, self._made(run)
        return self._last[1]

    def _made(self, run: Run) -> Callable[[Any], Detections]:
        if run.method == "mci":
            return MCI(self.detector, samples=run.samples)
        if run.method == "nms":
            return NMSSpread(self.detector)
        posterior = posterior_of(run, self.posterior(run.share), self.detector)
        if run.method == "glm":
            return GLM(self.detector, posterior, max_boxes=self.setting.slow)
        if run.method == "exact":
            return ExactGLM(self.detector, posterior)
        return MCGLM(self.detector, posterior, run.samples, run.derivative, run.epsilon)

    def plain_times(self) -> list[float]:
        """Milliseconds of the plain detector on each test frame, measured once and kept."""
        path = self.folder / "predictions" / "plain.json"
        if not path.exists():
            times = []
            for inputs, _ in self.frames(TEST):
                start = _now(self.setting.device)
                self.detector.detect(inputs)
                times.append(1e3 * (_now(self.setting.device) - start))
            with replacing(path) as file:
                file.write_text(json.dumps(times) + "\n")
        with reading(path, "a list of milliseconds"):
            return [float(each) for each in json.loads(path.read_text())]

    # the objects

    def _truth_path(self, on: str) -> Path:
        return self.folder / "truth" / f"{on.replace(':', '-').replace('/', '-')}.safetensors"

    def _write_truth(self, on: str) -> None:
        truth_of(self.frames(on)).save(self._truth_path(on), {"on": on})

    def truth(self, on: str) -> Truth:
        """The objects of the frames, from their file."""
        return Truth.load(self._truth_path(on))[0]


def posterior_of(run: Run, whole: Posterior, detector: Detector) -> Posterior:
    """The posterior of a run, from that of the whole network.

    The paper's form has no inverse for a layer that no gradient ever reached: such layers are left out of it.
    """
    names = [name for name in whole.blocks if part_of(name, detector) in _parts(run)]
    posterior = replace(whole.restricted(names), depth=run.depth + (" alone" if run.alone else ""))
    if run.counted:
        posterior = replace(posterior, n_data=run.share * posterior.n_data)
    if run.form == "prior":
        return posterior
    return posterior.restricted(
        [name for name in names if posterior.blocks[name].H.values.amax() > 0]
    ).paper()


def part_of(layer: str, detector: Detector) -> str:
    """The part of the network ("head", "neck" ...) that a layer belongs to.

    >>> from boxcov.detectors.tiny import TinyCenter
    >>> part_of("head.shared.0", TinyCenter())
    'head'
    """
    modules = dict(detector.named_modules())
    for part, roots in detector.parts().items():
        for root in roots if isinstance(roots, tuple) else (roots,):
            if any(modules[layer] is module for module in root.modules()):
                return part
    raise BoxcovError(f"the layer {layer} is in no part of {type(detector).__name__}.parts()")


def _parts(run: Run) -> tuple[str, ...]:
    order = ("head", "neck", "backbone")
    return (run.depth,) if run.alone else order[: order.index(run.depth) + 1]


def _now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
