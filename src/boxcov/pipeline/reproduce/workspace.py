"""The folder of a reproduction: posteriors, predictions and objects, each file written once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from boxcov._files.input_file import read_json, reading
from boxcov._files.output_file import make_folder, write_json
from boxcov._torch.process_state import seconds
from boxcov.concatenation import join_frames
from boxcov.data import batched
from boxcov.detections import Detections
from boxcov.detector import Detector, part_modules
from boxcov.error_model.calibrate import calibrate
from boxcov.errors import BoxcovError, NotFiniteError
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.evaluate.records import Records
from boxcov.kfac.checkpoint import Checkpoint
from boxcov.kfac.fit import FitOptions, fit
from boxcov.kfac.passes import Progress
from boxcov.pipeline.detectors import load_detector, plain_milliseconds
from boxcov.pipeline.frames import load_frames, preload_frames
from boxcov.pipeline.options import DataOptions
from boxcov.pipeline.paths import checkpoint_path, refuse_other_settings
from boxcov.pipeline.predict import predictor_of
from boxcov.pipeline.reproduce.plan import CALIBRATION, TEST, Run, Setting, file_name
from boxcov.posterior.posterior import Posterior
from boxcov.predict.glm import GLM
from boxcov.predict.mcglm import MCGLM
from boxcov.version import __version__

Start = Callable[[str], Progress]  # from the name of a step to its progress
FOLDERS = ("posteriors", "predictions", "truth", "tables", "figures")


class Workspace:
    """Reads the files of a reproduction; missing ones are computed and written first."""

    def __init__(
        self, folder: Path, setting: Setting, started: Start = lambda what: lambda done, total: None
    ) -> None:
        self.folder, self.setting, self.started = folder, setting, started
        self._frames: dict[str, Sequence[Any]] = {}
        self._posteriors: dict[float, Posterior] = {}
        self._last_model: tuple[Run, Callable[[Any], Detections]] | None = None
        for name in FOLDERS:
            make_folder(folder / name)
        self._check_setting()
        for within in (folder, *folder.iterdir()):
            for leftover in within.glob(".*.????????"):
                leftover.unlink()  # a file that a killed run was writing

    def _check_setting(self) -> None:
        """Raise if the folder has results of another setting or version."""
        path, mine = self.folder / "setting.json", {"version": __version__, **self.setting.json()}
        empty = not any(any((self.folder / name).iterdir()) for name in FOLDERS)
        if empty or not path.exists():
            write_json(path, mine)
            return
        with reading(path, "a setting", "delete the folder or choose another with --out"):
            stored = dict(read_json(path))
        refuse_other_settings(path, stored, mine, "choose another folder with --out")

    @cached_property
    def detector(self) -> Detector:
        return load_detector(self.setting, self.setting.device)

    def frames(self, on: str) -> Sequence[Any]:
        """Return the frames of the test or of the error model, loaded once.

        A name of other data, such as simulated:rain, gives a third as many as the test has.
        """
        if on not in self._frames:
            s = self.setting
            source = DataOptions(s.test, s.test_split, s.test_count, s.seed, s.sweeps)
            if on == CALIBRATION:
                source = replace(source, split="val", count=s.calibration_count)
            elif on != TEST:
                source = replace(source, data=on, count=max((s.test_count or 0) // 3, 1))
            frames = load_frames(source, s.device, self.detector.classes)
            self._frames[on] = preload_frames(frames, s.device)
        return self._frames[on]

    # Posteriors

    def posterior(self, share: float = 1.0) -> Posterior:
        """Return the posterior of the whole network from a share of the frames."""
        if share not in self._posteriors:
            path = self.folder / "posteriors" / f"{share:g}.safetensors"
            checkpoint = checkpoint_path(path)
            if not path.exists():
                self._fit(share, checkpoint).save(path)
            checkpoint.unlink(missing_ok=True)
            self._posteriors[share] = Posterior.load(path, self.detector)
        return self._posteriors[share]

    def _fit(self, share: float, checkpoint: Path) -> Posterior:
        s = self.setting
        source = DataOptions(s.data, s.split, s.count, s.seed, s.sweeps)
        frames = load_frames(source, s.device, self.detector.classes)
        return fit(
            self.detector,
            batched(frames, 2),
            depth="backbone",
            n_data=s.n_data,
            prior_precision=s.prior_precision,
            options=FitOptions(fraction=share),
            checkpoint=Checkpoint(checkpoint, resume=True),
            progress=self.started(f"posterior from {100 * share:.0f} % of the frames"),
        )

    # Runs

    def path(self, run: Run) -> Path:
        return self.folder / "predictions" / f"{run.key}.safetensors"

    def detections(self, run: Run) -> Detections:
        """Return the predictions of a run."""
        path = self.path(run)
        if not path.exists():
            self._execute(run).save(path)
        return Detections.load(path)

    def _execute(self, run: Run) -> Detections:
        frames = self.frames(run.on)
        some = frames[:1] if run.method == "glm" else frames
        try:
            return self._predict(self._predictor(run), some, run.key)
        except NotFiniteError as error:  # a result too: this setting gives no covariance
            found = self._predict(self.detector.detect, frames, run.key)
            reason = str(error).partition(" (box")[0]
            return replace(found, meta={**found.meta, "refused": reason})

    def _predict(
        self, model: Callable[[Any], Detections], frames: Sequence[Any], step: str
    ) -> Detections:
        found, times, progress = [], [], self.started(step)
        for done, (inputs, _) in enumerate(frames, 1):
            start = seconds(self.setting.device)
            found.append(model(inputs))
            times.append(1e3 * (seconds(self.setting.device) - start))
            progress(done, len(frames))
        joined = join_frames(found).to("cpu")
        return replace(joined, meta={**joined.meta, "milliseconds": times})

    def _predictor(self, run: Run) -> Callable[[Any], Detections]:
        """Return the predictor of a run; the last one is reused if only the frames differ."""
        kind = replace(run, on=TEST)
        if self._last_model is None or self._last_model[0] != kind:
            self._last_model = kind, self._build_predictor(run)
        return self._last_model[1]

    def _build_predictor(self, run: Run) -> Callable[[Any], Detections]:
        posterior = None
        if run.form is not None:
            posterior = restrict_posterior(self.posterior(run.share), run, self.detector)
        if run.method == "glm" and posterior is not None:
            return GLM(self.detector, posterior, max_boxes=self.setting.slow)
        if run.epsilon is not None and posterior is not None:
            return MCGLM(self.detector, posterior, run.samples, "fd", run.epsilon)
        model = predictor_of(self.detector, posterior, run.estimator)
        if not run.calibrated:
            return model
        progress = self.started("frames of the error model")
        return calibrate(model, self.frames(CALIBRATION), progress=progress)

    # Results

    def records(self, run: Run) -> Records:
        """Return the predictions of a run, matched with the objects of its frames."""
        return match_detections(self.detections(run), self.truth(run.on), self.setting.threshold)

    def refusal(self, run: Run) -> str | None:
        """Return why a run gave no covariances, or None if it did."""
        return self.detections(run).meta.get("refused")

    def milliseconds(self, run: Run) -> list[float]:
        """Return the time of each frame but the first, which warms up."""
        times: list[float] = self.detections(run).meta["milliseconds"]
        return times[1:] or times

    def plain_milliseconds(self) -> list[float]:
        """Return the time of the plain detector on each test frame but the first."""
        path = self.folder / "predictions" / "plain.json"
        if not path.exists():
            write_json(path, plain_milliseconds(self.detector, self.frames(TEST)))
        with reading(path, "a list of milliseconds"):
            return [float(ms) for ms in read_json(path)]

    def truth(self, on: str) -> GroundTruth:
        """Return the objects of the frames."""
        path = self.folder / "truth" / f"{file_name(on)}.safetensors"
        if not path.exists():
            GroundTruth.from_frames(self.frames(on)).save(path, {"on": on})
        return GroundTruth.load(path)[0]


def restrict_posterior(whole: Posterior, run: Run, detector: Detector) -> Posterior:
    """Return the posterior of a run from that of the whole network.

    The paper's form has no inverse for a layer without gradients, so such layers are left out.
    """
    order = ("head", "neck", "backbone")
    parts = (run.depth,) if run.alone else order[: order.index(run.depth) + 1]
    names = [name for name in whole.blocks if part_of(name, detector) in parts]
    posterior = replace(whole.restricted(names), depth=run.depth + (" alone" if run.alone else ""))
    if run.counted:
        posterior = replace(posterior, n_data=run.share * posterior.n_data)
    if run.form == "prior":
        return posterior
    with_gradients = [name for name in names if posterior.blocks[name].H.values.amax() > 0]
    return posterior.restricted(with_gradients).paper()


def part_of(layer: str, detector: Detector) -> str:
    """Return the part of the network ("head", "neck" ...) that a layer belongs to."""
    modules = dict(detector.named_modules())
    for part, roots in part_modules(detector).items():
        if any(modules[layer] is module for root in roots for module in root.modules()):
            return part
    raise BoxcovError(f"the layer {layer} is in no part of {type(detector).__name__}.parts()")
