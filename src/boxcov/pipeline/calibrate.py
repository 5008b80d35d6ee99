"""The work of ``boxcov calibrate``: predict, fit on some of the frames, compare on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from boxcov.detections import concatenated
from boxcov.error_model.fit import apply_calibration, fit_calibration, region_coverage
from boxcov.errors import BoxcovError
from boxcov.evaluate.covariance_metrics import covariance_metrics, gaussian_fit
from boxcov.evaluate.records import Records
from boxcov.evaluate.resampling import bootstrap
from boxcov.pipeline.predict import How
from boxcov.pipeline.records import records_of
from boxcov.pipeline.sources import Source, check_folder, detector_named
from boxcov.posterior.calibration import Calibration, Kind
from boxcov.posterior.posterior import Posterior
from boxcov.predict.predictor import Predictor, estimator

if TYPE_CHECKING:
    from rich.table import Table

Progress = Callable[[int, int], None]
Heading = Literal["direction", "axis"]
BASELINE = "score and size alone"


def run(
    out: Path,
    detector: str,
    how: How,
    source: Source,
    kind: Kind = "product",
    *,
    heading: Heading = "direction",
    fit_share: float = 0.5,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the posterior of ``how`` to ``out`` (the same file, if you like) with a calibration inside; gives what there is to say of it.

    The first ``fit_share`` of the frames of ``source`` are fitted, the rest are what the report is about. Frames that follow each other
    look alike, so they are not dealt out in turn. With the heading "axis" boxes may be turned by half: see ``Records.as_axes``.
    """
    if how.posterior is None or how.method == "nms":
        raise BoxcovError(
            "a calibration is kept inside a posterior: give a --posterior FILE, and a method that uses it"
        )
    check_folder(out)
    network = detector_named(detector, device)
    frames = source.frames(device, network.classes)
    cut = _cut(len(frames), fit_share)
    model = how.model(network)
    records = predicted(model, frames, progress)
    turned = (
        {"heading": heading, "half_turns": half_turns(records)} if "yaw" in records.fields else {}
    )
    records = records.as_axes() if heading == "axis" else records
    data = " ".join(
        str(part) for part in (source.data, source.split, f"seed {source.seed}") if part
    )
    fitted = records[records.frame < cut]
    found = fit_calibration(fitted, kind, estimator=estimator(model.settings()), data=data)
    baseline = (
        found
        if found.kind == "score"
        else fit_calibration(fitted, "score", estimator=found.estimator, data=data)
    )
    held_out = compared(records[records.frame >= cut], found, baseline)
    found = replace(
        found,
        provenance={
            **found.provenance,
            **turned,
            "held_out": {"frames": len(frames) - cut, **held_out},
        },
    )
    posterior: Posterior = model.posterior  # type: ignore[attr-defined]  # every method but nms has one, given a file
    posterior.with_calibration(found).save(out)
    return {
        "out": str(out),
        "kind": found.kind,
        "estimator": found.estimator,
        **dict(found.provenance),
    }


def half_turns(records: Records) -> float | None:
    """The share of the paired boxes that look the wrong way: off by more than a quarter turn."""
    errors = records[records.paired].errors[:, records.fields.index("yaw")]
    return (
        float((np.abs(errors[~np.isnan(errors)]) > np.pi / 2).mean())
        if (~np.isnan(errors)).any()
        else None
    )


def predicted(model: Predictor, frames: Sequence[Any], progress: Progress | None = None) -> Records:
    """The records of all boxes that ``model`` finds in ``frames``; each frame is made once."""
    found, labelled = [], []
    for number in range(len(frames)):
        inputs, targets = frames[number]
        boxes = model(inputs)
        found.append(replace(boxes, frame=boxes.frame + number).to("cpu"))
        labelled.append((None, targets))
        if progress is not None:
            progress(number + 1, len(frames))
    return records_of(concatenated(found), labelled)


def compared(records: Records, found: Calibration, baseline: Calibration) -> dict[str, Any]:
    """NLL, coverage, ENCE and ANEES of paired boxes before, after, and under the baseline; and how much better the NLL is than the baseline's.

    ``gain`` is the mean NLL of the baseline less that of the calibration, with its 95 % interval by resampling frames.
    """
    paired = records[records.paired]
    if not len(paired):
        raise BoxcovError(
            "none of the boxes of the frames to report on was paired with an object: give more frames, or a smaller --fit-share"
        )
    after, alone = (apply_calibration(paired, one).predictive for one in (found, baseline))
    assert paired.covariance is not None
    assert after is not None
    assert alone is not None
    rows = {
        name: covariance_metrics(paired.errors, np.asarray(C, dtype=float), paired.fields)
        for name, C in (("before", paired.covariance), ("after", after), (BASELINE, alone))
    }
    gain = gaussian_fit(paired.errors, alone).nll - gaussian_fit(paired.errors, after).nll
    low, high = bootstrap(lambda chosen: gain[chosen].mean(), paired.frame)
    regions = {
        str(level): region_coverage(apply_calibration(paired, found), found, level)
        for level in (0.5, 0.9, 0.95)
    }
    return {
        "boxes": len(paired),
        "rows": rows,
        "regions": regions,
        "gain": {"mean": float(gain.mean()), "low": float(low), "high": float(high)},
    }


def shown(report: dict[str, Any]) -> Table:
    """The held-out rows for a terminal.

    >>> row = {"NLL": 1.0, "coverage": {"0.5": 0.5, "0.9": 0.9, "0.95": 0.95}, "ENCE": 0.1, "ANEES": 1.0}
    >>> made = {"kind": "score", "estimator": "exact", "held_out": {"frames": 2, "boxes": 9, "rows": {"before": row, "after": row}}}
    >>> shown(made).row_count
    2
    """
    from rich.table import Table

    held_out = report["held_out"]
    title = f"{report['kind']} for {report['estimator']}: {held_out['boxes']} boxes of {held_out['frames']} frames that the fit has not seen"
    table = Table("covariance", "NLL", "50 %", "90 %", "95 %", "ENCE", "ANEES", title=title)
    for name, row in held_out["rows"].items():
        inside = [f"{100 * row['coverage'][level]:.1f}" for level in ("0.5", "0.9", "0.95")]
        table.add_row(
            name, f"{row['NLL']:.3f}", *inside, f"{row['ENCE']:.3f}", f"{row['ANEES']:.3f}"
        )
    if "regions" in held_out:
        inside = [f"{100 * held_out['regions'][level]:.1f}" for level in ("0.5", "0.9", "0.95")]
        table.add_row("after, regions as seen in the fit", "", *inside, "", "")
    return table


def verdict(report: dict[str, Any]) -> str:
    """In words: does it do better than score and size alone?

    >>> verdict({"held_out": {"gain": {"mean": 0.5, "low": 0.3, "high": 0.7}}})
    'NLL 0.500 (0.300 to 0.700) better than score and size alone'
    >>> verdict({"held_out": {"gain": {"mean": 0.0, "low": -0.1, "high": 0.1}}})
    'NLL no better than score and size alone: 0.000 (-0.100 to 0.100)'
    """
    gain = report["held_out"]["gain"]
    figures = f"{gain['mean']:.3f} ({gain['low']:.3f} to {gain['high']:.3f})"
    return (
        f"NLL {figures} better than {BASELINE}"
        if gain["low"] > 0
        else f"NLL no better than {BASELINE}: {figures}"
    )


def _cut(frames: int, share: float) -> int:
    if not 0 < share < 1:
        raise BoxcovError(f"--fit-share must lie between 0 and 1, got {share}")
    cut = round(share * frames)
    if not 0 < cut < frames:
        raise BoxcovError(
            f"{frames} frames cannot be parted with --fit-share {share}: at least one must be on each side"
        )
    return cut
