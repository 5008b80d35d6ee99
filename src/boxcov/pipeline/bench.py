"""Every method on the same frames on the same device: milliseconds, and what they are in passes of the plain detector."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from warnings import catch_warnings, simplefilter

import torch
from torch.utils.data import DataLoader

from boxcov import GLM, MCGLM, MCI, ExactGLM, fit
from boxcov._torch.inputs import fresh, ready
from boxcov._torch.layer_calls import LayerCallMode
from boxcov.detector import Detector
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.errors import BoxcovError
from boxcov.pipeline.sources import Source, detector_named, kept, unseen_split
from boxcov.posterior.posterior import Posterior
from boxcov.predict.covariance import sample_covariance
from boxcov.predict.route import EngineOptions

Progress = Callable[[int, int], None]
_SCALARS = 9  # of the paper's GLM: so many outputs are timed, the rest is extrapolated


@dataclass(frozen=True)
class Entry:
    """One method: what is timed, a note on how the figure came about, and whether it takes too long for many repeats."""

    method: str
    samples: int | None
    call: Callable[[Any], object] | None  # None: it cannot be timed, the note says why
    note: str = ""
    slow: bool = False


def run(
    detector: str = "centerpoint:small",
    data: str = "simulated:clear",
    boxes: Sequence[int] = (),
    samples: Sequence[int] = (10,),
    depths: Sequence[str] = ("head",),
    device: str = "cpu",
    frames: int = 3,
    repeats: int = 7,
    fit_frames: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """One row a method: ``method``, ``device``, ``boxes``, ``samples``, ``depth``, ``ms``, ``low`` and ``high`` (quartiles), ``ratio``, ``peak_mib``
    and ``note``.

    boxes: numbers of boxes to report, where the detector can be told; as many as it reports unless given. All methods are timed in turn,
    after a warm-up, on ``frames`` frames, ``repeats`` times; ratios are to the plain detector in the same run. ``peak_mib`` is the most that torch
    held on a GPU, or that the whole process held on a CPU (Linux; None elsewhere).
    """
    if repeats < 1 or frames < 1:
        raise BoxcovError(
            f"a benchmark needs at least one frame and one repeat, got frames {frames} and repeats {repeats}"
        )
    model = detector_named(detector, device).eval()
    items = kept(
        Source(data, unseen_split(data), frames + fit_frames, seed).frames(device, model.classes),
        device,
    )
    inputs = [ready(given, torch.device(device)) for given, _ in items[:frames]]
    rows: list[dict[str, Any]] = []
    counts: list[int | None] = [*boxes] or [None]
    for depth in depths:
        with catch_warnings():
            simplefilter("ignore")  # few frames reach few classes: the speed is the same
            posterior = fit(model, items[frames:], depth, n_data=3000)
        for count in counts:
            told = model if count is None else reporting(model, count)
            others = [entry for entry in (laplace_torch(told, items[0]),) if entry is not None]
            rows += _measured(
                told,
                [*entries(told, posterior, samples, seed), *others],
                inputs,
                repeats,
                device,
                depth,
            )
            if progress is not None:
                progress(
                    depths.index(depth) * len(counts) + counts.index(count) + 1,
                    len(counts) * len(depths),
                )
    return rows


def reporting(detector: Detector, count: int) -> Detector:
    """The same detector, reporting about ``count`` boxes a frame, whatever their score."""
    if not isinstance(detector, CenterPoint):
        raise BoxcovError(
            f"a {type(detector).__name__} cannot be told how many boxes to report: leave --boxes away"
        )
    config = detector.config
    most = -(-count // len(config.tasks))
    rules = replace(
        config.reporting,
        threshold=1e-9,
        most=most,
        candidates=max(config.reporting.candidates, 4 * most),
    )
    other = CenterPoint(replace(config, reporting=rules))
    other.load_state_dict(detector.state_dict())
    return other.to(next(detector.parameters()).device).eval()


def entries(
    detector: Detector, posterior: Posterior, samples: Sequence[int], seed: int
) -> list[Entry]:
    """What is compared. Below the head the exact covariance takes a backward pass a number: there it is joined with k samples instead."""
    deep = posterior.depth != "head"
    found = [Entry("plain", None, detector.detect)]
    if not deep:
        found.append(Entry("exact", None, ExactGLM(detector, posterior)))
    if not deep and next(detector.parameters()).device.type == "cuda":
        found.append(
            Entry(
                "exact, tf32",
                None,
                ExactGLM(detector, posterior, engine=EngineOptions(precision="tf32")),
            )
        )
    for k in samples:
        if deep:
            found.append(
                Entry(
                    "exact head",
                    k,
                    ExactGLM(detector, posterior, k, seed),
                    "k samples below the head",
                )
            )
        ours = MCGLM(detector, posterior, k, seed=seed)
        found.append(Entry("mcglm", k, ours))
        found.append(
            Entry(
                "mcglm as published",
                k,
                _as_published(ours),
                f"{k + 1} whole passes, finite differences",
                slow=True,
            )
        )
        found.append(
            Entry(
                "mc dropout",
                k,
                MCI(detector, dropout=0.1, samples=k, seed=seed, depth=posterior.depth),
                slow=deep,
            )
        )
    glm = GLM(detector, posterior)
    found.append(
        Entry(
            "glm as published",
            None,
            _some_backwards(glm),
            f"extrapolated from {_SCALARS} backward passes",
            slow=True,
        )
    )
    return found


def laplace_torch(detector: Detector, frame: tuple[Any, Any]) -> Entry | None:
    """laplace-torch with Kronecker factors on the same detector, where it is installed; its row says so if it cannot take the detector."""
    if find_spec("laplace") is None:
        return None
    try:
        from laplace import Laplace  # type: ignore[import-not-found,unused-ignore]

        model = Laplace(
            deepcopy(detector), "regression", subset_of_weights="all", hessian_structure="kron"
        )
        model.fit(DataLoader(cast(Any, [frame]), batch_size=None))
        model(frame[0])
    except Exception as error:  # whatever comes is what there is to say of it
        what = (
            "cannot be imported" if isinstance(error, ImportError) else "cannot take this detector"
        )
        return Entry(
            "laplace-torch", None, None, f"{what}: {type(error).__name__}: {error}".splitlines()[0]
        )
    return Entry("laplace-torch", None, model, "as a regression: not the training loss", slow=True)


def _as_published(model: MCGLM) -> Callable[[Any], object]:
    """Algorithm 1 of the paper by the letter: the plain detector, then a whole pass for each direction, a finite difference, a covariance."""
    linearized, epsilon = model.linearized, 1e-5
    theta, etas = (
        linearized.theta(),
        model.posterior.sample(model.samples, torch.Generator().manual_seed(model.seed)),
    )

    def call(inputs: Any) -> object:
        with torch.no_grad():
            point = linearized.at(inputs, cache_trunk=False)
            columns = []
            for i in range(model.samples):
                answer = linearized.substitute(
                    {name: theta[name] + epsilon * eta[i] for name, eta in etas.items()}
                )
                with LayerCallMode(linearized.names, answer):
                    boxes = linearized.shadow.decode(
                        linearized.shadow(fresh(inputs)), point.selection
                    )
                columns.append(point.difference(boxes) / epsilon)
            return sample_covariance(torch.stack(columns, 2)) if len(point.boxes) else None

    return call


def _some_backwards(model: GLM) -> Callable[[Any], float]:
    """The paper's GLM, one backward pass a number, for the first numbers: gives the seconds that all of them would take."""
    linearized = model.linearized

    def call(inputs: Any) -> float:
        start = _clock(model.device.type)
        with torch.enable_grad():
            point = linearized.at(inputs)
            weights = {name: w.requires_grad_() for name, w in linearized.theta().items()}
            z = point.z_at(weights).flatten()
            before = _clock(model.device.type)
            for number in z[:_SCALARS]:
                torch.autograd.grad(
                    number, list(weights.values()), retain_graph=True, allow_unused=True
                )
        linearized.trunk.forget()
        done = _clock(model.device.type)
        return before - start + (done - before) * len(z) / max(min(_SCALARS, len(z)), 1)

    return call


def _measured(
    detector: Detector,
    found: list[Entry],
    inputs: list[Any],
    repeats: int,
    device: str,
    depth: str = "head",
) -> list[dict[str, Any]]:
    times: list[list[float]] = [[] for _ in found]
    peaks: list[float | None] = [None for _ in found]
    count = statistics.mean(len(detector.detect(given)) for given in inputs)
    for turn in range(
        -3 - len(inputs), repeats * len(inputs)
    ):  # for warming up: first boxes are checked, graphs are captured
        for number, entry in enumerate(found):
            if entry.call is None or (entry.slow and not -1 <= turn < len(inputs)):
                continue  # once a frame is enough
            counted = _forget_peak(device)
            start = _clock(device)
            told = entry.call(inputs[turn % len(inputs)])
            spent = told if isinstance(told, float) else _clock(device) - start
            if turn >= 0:
                times[number].append(spent)
                peaks[number] = max(peaks[number] or 0.0, _peak_mib(device)) if counted else None
    plain = statistics.median(times[0])
    about = {"device": device, "boxes": round(count), "depth": depth}
    return [
        _row(entry, taken, plain, peak, about) for entry, taken, peak in zip(found, times, peaks)
    ]


def _row(
    entry: Entry, taken: list[float], plain: float, peak: float | None, about: dict[str, Any]
) -> dict[str, Any]:
    low, middle, high = _quartiles(taken) if taken else (None, None, None)
    return {
        "method": entry.method,
        **about,
        "samples": entry.samples,
        "ms": None if middle is None else 1e3 * middle,
        "low": None if low is None else 1e3 * low,
        "high": None if high is None else 1e3 * high,
        "ratio": None if middle is None else middle / plain,
        "peak_mib": peak,
        "note": entry.note,
    }


def _forget_peak(device: str) -> bool:
    """Count the peak from here; whether it is counted at all."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes what is held now
    except OSError:
        return False
    return True


def _peak_mib(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**20
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024  # it says kB


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """
    >>> _quartiles([3.0, 1.0, 2.0])
    (1.5, 2.0, 2.5)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def shown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table for people.

    >>> row = {"method": "exact", "depth": "head", "boxes": 9, "samples": None, "ms": 3.21, "low": 3.0, "high": 4.0, "ratio": 1.5}
    >>> print(shown([{**row, "peak_mib": None, "note": ""}]).splitlines()[1])
    exact                     head      9         -                3.2 (3.0 to 4.0)      1.50         -
    """
    lines = [
        f"{'method':20}{'depth':>10}{'boxes':>7}{'samples':>10}{'ms (quartiles)':>32}{'ratio':>10}{'peak MiB':>10}"
    ]
    for row in rows:
        samples = "-" if row["samples"] is None else str(row["samples"])
        timed = row["ms"] is not None
        ms = f"{row['ms']:.1f} ({row['low']:.1f} to {row['high']:.1f})" if timed else "-"
        ratio = f"{row['ratio']:.2f}" if timed else "-"
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        note = f"  {row['note']}" if row["note"] else ""
        lines.append(
            f"{row['method']:20}{row['depth']:>10}{row['boxes']:>7}{samples:>10}{ms:>32}{ratio:>10}{peak:>10}{note}"
        )
    return "\n".join(lines)
