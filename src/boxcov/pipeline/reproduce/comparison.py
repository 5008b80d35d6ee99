"""The tables of the paper: its numbers next to ours.

"Instance-Level Post Hoc Uncertainty Quantification in Object Detection".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from boxcov._files.input_file import read_json
from boxcov.detector import Detector
from boxcov.errors import import_package
from boxcov.evaluate.intervals import partition_chance
from boxcov.evaluate.quality import ERRORS, METRICS, accurate_iou, accurate_l2, auroc, partitions
from boxcov.evaluate.records import Records
from boxcov.pipeline.reproduce.plan import (
    DEPTHS,
    EPSILONS,
    FORMS,
    SAMPLES,
    SHARES,
    Form,
    Run,
    paper_mcglm,
)
from boxcov.pipeline.reproduce.workspace import Workspace, restrict_posterior

# The paper's own numbers: tables I, III to VI by column, metric and error; run times (II) by our
# names, in ms per frame of 97.3 boxes; storage (III) in MB.
PAPER = read_json(Path(__file__).with_name("paper.json"))
NAMES = {"paper": "the paper's posterior Q^-1 (x) H^-1", "prior": "the posterior (n F + tau I)^-1"}
CHANCE = (
    "By chance: the mean of the metric when u is shuffled over the boxes "
    "(P(U) for P(U|I), P(A) for P(A|C)). AUROC: of finding the inaccurate boxes; 0.5 is chance."
)


@dataclass(frozen=True)
class Table:
    """Rows of plain values by column; None or NaN where there is no value."""

    name: str
    title: str
    rows: Sequence[Mapping[str, Any]]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        columns = list(self.rows[0]) if self.rows else []
        is_text = [any(isinstance(row[name], str) for row in self.rows) for name in columns]
        rules = ["---" if text else "---:" for text in is_text]
        cells = [[_format(value) for value in row.values()] for row in self.rows]
        lines = [f"| {' | '.join(row)} |" for row in (columns, rules, *cells)]
        return "\n".join([f"**{self.title}**", "", *lines, *(f"\n{note}" for note in self.notes)])

    def json(self) -> dict[str, Any]:
        return {**vars(self), "rows": list(self.rows), "notes": list(self.notes)}


def _format(value: Any) -> str:
    """Return a value for people: two decimals below 10, three significant digits above."""
    if value is None or value != value:
        return ""
    if isinstance(value, str | int):
        return str(value)
    if abs(value) >= 1e6 or 0 < abs(value) < 5e-3:
        return f"{value:.2g}"
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{decimals}f}"


def paper_tables(workspace: Workspace) -> list[Table]:
    """Return all tables of the paper."""
    tables = [table for form in FORMS for table in quality(workspace, form)]
    tables.append(runtime(workspace))
    ablations: tuple[Callable[[Workspace, Form], Table], ...] = (depth, share, epsilon, samples)
    return tables + [ablation(workspace, form) for ablation in ablations for form in FORMS]


def quality(workspace: Workspace, form: Form) -> list[Table]:
    """Return table I for all predictions, and for those that match an object.

    MCI, GLM and MC-GLM as in the paper, the baselines 1 - score and NMS, and u = risk.
    """
    exact, refusal = workspace.records(Run("exact", form)), workspace.refusal(paper_mcglm(form))
    found = {"MCI": workspace.records(Run("mci")), "GLM": exact}
    if refusal is None:
        found["MC-GLM"] = workspace.records(paper_mcglm(form))
    found["MC-GLM, exact derivatives"] = workspace.records(Run("mcglm", form))
    found["1 - score"] = exact.with_uncertainty(1 - exact.scores)
    if type(workspace.detector).candidates is not Detector.candidates:
        found["boxes that NMS removed"] = workspace.records(Run("nms"))
    calibration_count = workspace.setting.calibration_count
    if calibration_count:
        calibrated = workspace.records(Run("exact", form, calibrated=True))
        assert calibrated.risk is not None
        found["risk"] = calibrated.without_covariance(calibrated.risk)
    boxes, difference = compare_glm(workspace, form)
    notes: tuple[str, ...] = (
        CHANCE,
        f"GLM: computed by ExactGLM; one backward pass per output agrees to {difference:.1g} "
        f"on the {boxes} boxes where it was run.",
    )
    if calibration_count:
        notes += (f"Risk: GLM with the error model, fitted on {calibration_count} other frames.",)
    if refusal is not None:
        notes += (f"MC-GLM by finite differences of 1e-7: no numbers. {refusal}.",)
    paired = {method: records[records.paired] for method, records in found.items()}
    parts = {"all": ("all predictions", found), "paired": ("predictions with an object", paired)}
    return [
        _metric_table(
            f"quality-{form}-{name}", f"Quality, {NAMES[form]}, {which}", "method", methods, notes
        )
        for name, (which, methods) in parts.items()
    ]


def compare_glm(workspace: Workspace, form: Form) -> tuple[int, float]:
    """Return the number of boxes of GLM and its largest relative difference from ExactGLM."""
    glm, exact = (workspace.detections(Run(method, form)) for method in ("glm", "exact"))
    assert glm.covariance is not None
    assert exact.covariance is not None
    if not len(glm):
        return 0, 0.0
    reference = exact.covariance[: len(glm)].double()
    difference = (glm.covariance.double() - reference).flatten(1).norm(dim=1)
    return len(glm), float((difference / reference.flatten(1).norm(dim=1)).max())


def depth(workspace: Workspace, form: Form) -> Table:
    """Return table III: head; neck and head; backbone, neck and head; with their storage."""
    runs = {name: Run("mcglm", form, part) for name, part in DEPTHS.items()}
    found = {name: workspace.records(run) for name, run in runs.items()}
    whole, detector = workspace.posterior(), workspace.detector
    sizes = {n: restrict_posterior(whole, run, detector).storage() for n, run in runs.items()}
    extra = {
        "MB, paper": PAPER["storage"],
        "MiB as the paper counts": {name: size.factors / 2**20 for name, size in sizes.items()},
        "MiB stored": {name: size.stored / 2**20 for name, size in sizes.items()},
    }
    title = f"Depth of the posterior, MC-GLM with exact derivatives, {NAMES[form]}"
    return _metric_table(f"depth-{form}", title, "depth", found, (CHANCE,), extra)


def share(workspace: Workspace, form: Form) -> Table:
    """Return table IV: the posterior of the whole network from a share of the training data."""
    whole = workspace.records(Run("exact", form)).uncertainty
    found, correlation = {}, {}
    for name, part in SHARES.items():
        found[name] = workspace.records(Run("mcglm", form, "backbone", share=part))
        exact = workspace.records(Run("exact", form, share=part, counted=part < 1))
        correlation[name] = spearman(whole, exact.uncertainty)
    note = (
        "Rank correlation: of the exact u of the head's posterior with the u of the posterior "
        "from all data; no sampling is involved."
    )
    title = f"Share of the training data, MC-GLM with exact derivatives, B+N+H, {NAMES[form]}"
    extra = {"rank correlation, head": correlation}
    return _metric_table(f"share-{form}", title, "share", found, (CHANCE, note), extra)


def epsilon(workspace: Workspace, form: Form) -> Table:
    """Return table V: the step of the finite difference, and its error."""
    runs = {name: paper_mcglm(form, step) for name, step in EPSILONS.items()}
    refusals = {name: workspace.refusal(run) for name, run in runs.items()}
    found = {name: workspace.records(run) for name, run in runs.items() if not refusals[name]}
    notes = (
        CHANCE,
        "Off the derivative: median over the boxes of the relative distance of the covariance "
        "from that of exact derivatives (jvp) along the same directions; rank correlation: of "
        "the u with those.",
        *(f"epsilon = {name}: no numbers. {why}." for name, why in refusals.items() if why),
    )
    title = f"Step of the finite difference, MC-GLM, head, {NAMES[form]}"
    extra = _distance(found, workspace.records(Run("mcglm", form)), "off the derivative")
    return _metric_table(f"epsilon-{form}", title, "epsilon", found, notes, extra)


def samples(workspace: Workspace, form: Form) -> Table:
    """Return table VI: the number of samples, and the sampling error."""
    found = {name: workspace.records(Run("mcglm", form, samples=k)) for name, k in SAMPLES.items()}
    note = (
        "Off the exact: median over the boxes of the relative distance of the covariance from the "
        "exact one; rank correlation: of the u."
    )
    title = f"Number of samples, MC-GLM with exact derivatives, head, {NAMES[form]}"
    extra = _distance(found, workspace.records(Run("exact", form)), "off the exact")
    return _metric_table(f"samples-{form}", title, "k", found, (CHANCE, note), extra)


def runtime(workspace: Workspace) -> Table:
    """Return table II: median milliseconds per frame."""
    exact, glm = Run("exact", "paper"), Run("glm", "paper")
    detections = workspace.detections(exact)
    boxes = len(detections) / detections.meta["frames"]
    glm_boxes = len(workspace.detections(glm))
    glm_ms = workspace.milliseconds(glm)[0] * boxes / glm_boxes if glm_boxes else float("nan")
    times = {
        "plain detector": workspace.plain_milliseconds(),
        "MCI, k = 10": workspace.milliseconds(Run("mci")),
        "GLM": [glm_ms],
        "MC-GLM, k = 10, finite differences": workspace.milliseconds(paper_mcglm("paper")),
        "MC-GLM, k = 10, exact derivatives": workspace.milliseconds(Run("mcglm", "paper")),
        "exact": workspace.milliseconds(exact),
    }
    medians = {name: float(np.median(milliseconds)) for name, milliseconds in times.items()}
    rows = [
        {
            "method": name,
            "ms, paper": PAPER["runtime"].get(name),
            "ms": ms,
            "times the plain detector": ms / medians["plain detector"],
        }
        for name, ms in medians.items()
    ]
    notes = (
        f"Head posterior, {boxes:.1f} boxes per frame (the paper: 97.3), "
        f"{workspace.setting.device}; medians, including the plain detector.",
        f"GLM was timed on {glm_boxes} boxes of one frame and extrapolated: "
        "every box costs the same.",
    )
    return Table("runtime", "Run time", rows, notes)


def _metric_table(
    name: str,
    title: str,
    first: str,
    found: Mapping[str, Records],
    notes: tuple[str, ...],
    extra: Mapping[str, Mapping[str, float]] | None = None,
) -> Table:
    """Return one row per method and error: the paper's number, ours and chance per metric.

    first: head of the column with the methods. extra: further columns by head, then by method.
    """
    figures, rows = PAPER["tables"][name.partition("-")[0]], []
    for method, records in found.items():
        values = measure(records)
        for error in ERRORS:
            row: dict[str, Any] = {first: method, "error": error}
            for metric in METRICS:
                cell = values[error][metric]
                published = figures.get(method, {}).get(metric, {})
                row[f"{metric}, paper"] = published.get(error)
                row |= {metric: cell["value"], f"{metric} by chance": cell["chance"]}
            row["AUROC"] = values[error]["AUROC"]["value"]
            rows.append(row | {head: column[method] for head, column in (extra or {}).items()})
    return Table(name, title, rows, notes)


def _distance(
    found: Mapping[str, Records], exact: Records, head: str
) -> dict[str, dict[str, float]]:
    """Return two columns: the median relative Frobenius distance from ``exact`` of the covariances,
    and the rank correlation of the u with those of ``exact``.
    """
    assert exact.covariance is not None
    size = np.maximum(np.linalg.norm(exact.covariance, axis=(1, 2)), 1e-300)
    distances, correlations = {}, {}
    for name, records in found.items():
        assert records.covariance is not None
        distance = np.linalg.norm(records.covariance - exact.covariance, axis=(1, 2))
        distances[name] = float(np.median(distance / size))
        correlations[name] = spearman(records.uncertainty, exact.uncertainty)
    return {head: distances, "rank correlation": correlations}


def measure(records: Records) -> dict[str, dict[str, dict[str, float]]]:
    """Return value and chance level by error ("IoU", "l2") and metric.

    The paper's metrics, AUROC, and the shares P(U) and P(A) of uncertain and accurate boxes.
    """
    paired = records[records.paired]
    rankings = {
        "IoU": auroc(~accurate_iou(records.iou), records.uncertainty),
        "l2": auroc(~accurate_l2(paired.l2), paired.uncertainty),
    }
    out = {}
    for error, partition in partitions(records.iou, records.l2, records.uncertainty).items():
        levels, values = partition_chance(partition), partition.metrics()
        found = {name: {"value": values[name], "chance": levels[name].mean} for name in METRICS}
        found["AUROC"] = {"value": rankings[error], "chance": 0.5}
        out[error] = {**found, **{name: {"value": values[name]} for name in ("P(U)", "P(A)")}}
    return out


def spearman(a: Any, b: Any) -> float:
    """Return the rank correlation of two arrays (n,)."""
    return float(import_package("scipy.stats").spearmanr(a, b).statistic)
