"""The tables of the paper: its numbers next to ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from boxcov.evaluate.quality import ERRORS, METRICS
from boxcov.evaluate.records import Records
from boxcov.pipeline.reproduce import paper
from boxcov.pipeline.reproduce.metrics import measure, spearman
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
from boxcov.pipeline.reproduce.result_table import Table
from boxcov.pipeline.reproduce.workspace import Workspace, restrict_posterior

NAMES = {"paper": "the paper's posterior Q^-1 (x) H^-1", "prior": "the posterior (n F + tau I)^-1"}
METRIC_COLUMNS = tuple(
    f"{metric}{what}" for metric in METRICS for what in (", paper", "", " by chance")
)
CHANCE = (
    "By chance: the mean of the metric when u is shuffled over the boxes "
    "(P(U) for P(U|I), P(A) for P(A|C)). AUROC: of finding the inaccurate boxes; 0.5 is chance."
)


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
    if workspace.path(Run("nms")).exists():
        found["boxes that NMS removed"] = workspace.records(Run("nms"))
    found |= _risk(workspace, form)
    boxes, difference = compare_glm(workspace, form)
    notes: tuple[str, ...] = (
        CHANCE,
        f"GLM: computed by ExactGLM; one backward pass per output agrees to {difference:.1g} "
        f"on the {boxes} boxes where it was run.",
    )
    if workspace.setting.calibration_count:
        count = workspace.setting.calibration_count
        notes += (f"Risk: GLM with the error model, fitted on {count} other frames.",)
    if refusal is not None:
        notes += (f"MC-GLM by finite differences of 1e-7: no numbers. {refusal}.",)
    paired = {method: records[records.paired] for method, records in found.items()}
    tables = []
    for name, title, methods in (
        ("all", "all predictions", found),
        ("paired", "predictions with an object", paired),
    ):
        rows = _metric_rows(methods, paper.QUALITY)
        columns = ("method", "error", *METRIC_COLUMNS, "AUROC")
        title = f"Quality, {NAMES[form]}, {title}"
        tables.append(Table(f"quality-{form}-{name}", title, columns, rows, notes))
    return tables


def _risk(workspace: Workspace, form: Form) -> dict[str, Records]:
    """Return the predictions with u = risk, if there are frames to fit the error model on."""
    if not workspace.setting.calibration_count:
        return {}
    records = workspace.records(Run("exact", form, calibrated=True))
    assert records.risk is not None
    return {"risk": records.without_covariance(records.risk)}


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
    found, sizes = {}, {}
    for name, part in DEPTHS.items():
        run = Run("mcglm", form, part)
        found[name] = workspace.records(run)
        posterior = restrict_posterior(workspace.posterior(), run, workspace.detector)
        storage = posterior.storage()
        sizes[name] = (paper.STORAGE[name], storage.factors / 2**20, storage.stored / 2**20)
    rows = [(*row, *sizes[row[0]]) for row in _metric_rows(found, paper.DEPTH)]
    storage_columns = ("MB, paper", "MiB as the paper counts", "MiB stored")
    return Table(
        f"depth-{form}",
        f"Depth of the posterior, MC-GLM with exact derivatives, {NAMES[form]}",
        ("depth", "error", *METRIC_COLUMNS, "AUROC", *storage_columns),
        rows,
        (CHANCE,),
    )


def share(workspace: Workspace, form: Form) -> Table:
    """Return table IV: the posterior of the whole network from a share of the training data."""
    whole = workspace.records(Run("exact", form)).uncertainty
    found, correlation = {}, {}
    for name, part in SHARES.items():
        found[name] = workspace.records(Run("mcglm", form, "backbone", share=part))
        exact = workspace.records(Run("exact", form, share=part, counted=part < 1))
        correlation[name] = spearman(whole, exact.uncertainty)
    rows = [(*row, correlation[row[0]]) for row in _metric_rows(found, paper.SHARE)]
    note = (
        "Rank correlation: of the exact u of the head's posterior with the u of the posterior "
        "from all data; no sampling is involved."
    )
    return Table(
        f"share-{form}",
        f"Share of the training data, MC-GLM with exact derivatives, B+N+H, {NAMES[form]}",
        ("share", "error", *METRIC_COLUMNS, "AUROC", "rank correlation, head"),
        rows,
        (CHANCE, note),
    )


def epsilon(workspace: Workspace, form: Form) -> Table:
    """Return table V: the step of the finite difference, and its error."""
    exact = workspace.records(Run("mcglm", form))
    runs = {name: paper_mcglm(form, step) for name, step in EPSILONS.items()}
    refusals = {name: workspace.refusal(run) for name, run in runs.items()}
    found = {name: workspace.records(run) for name, run in runs.items() if not refusals[name]}
    notes = [
        CHANCE,
        "Off the derivative: median over the boxes of the relative distance of the covariance "
        "from that of exact derivatives (jvp) along the same directions; rank correlation: of "
        "the u with those.",
        *(f"epsilon = {name}: no numbers. {why}." for name, why in refusals.items() if why),
    ]
    return Table(
        f"epsilon-{form}",
        f"Step of the finite difference, MC-GLM, head, {NAMES[form]}",
        ("epsilon", "error", *METRIC_COLUMNS, "AUROC", "off the derivative", "rank correlation"),
        _rows_with_distance(found, paper.EPSILON, exact),
        tuple(notes),
    )


def samples(workspace: Workspace, form: Form) -> Table:
    """Return table VI: the number of samples, and the sampling error."""
    exact = workspace.records(Run("exact", form))
    found = {name: workspace.records(Run("mcglm", form, samples=k)) for name, k in SAMPLES.items()}
    note = (
        "Off the exact: median over the boxes of the relative distance of the covariance from the "
        "exact one; rank correlation: of the u."
    )
    return Table(
        f"samples-{form}",
        f"Number of samples, MC-GLM with exact derivatives, head, {NAMES[form]}",
        ("k", "error", *METRIC_COLUMNS, "AUROC", "off the exact", "rank correlation"),
        _rows_with_distance(found, paper.SAMPLES, exact),
        (CHANCE, note),
    )


def runtime(workspace: Workspace) -> Table:
    """Return table II: median milliseconds per frame."""
    exact, glm = Run("exact", "paper"), Run("glm", "paper")
    detections = workspace.detections(exact)
    boxes = len(detections) / detections.meta["frames"]
    glm_boxes = len(workspace.detections(glm))
    glm_ms = workspace.milliseconds(glm)[0] * boxes / glm_boxes
    times = {
        "MCI, k = 10": ("MCI", workspace.milliseconds(Run("mci"))),
        "GLM": ("GLM", [glm_ms]),
        "MC-GLM, k = 10, finite differences": (
            "MC-GLM",
            workspace.milliseconds(paper_mcglm("paper")),
        ),
        "MC-GLM, k = 10, exact derivatives": ("", workspace.milliseconds(Run("mcglm", "paper"))),
        "exact": ("", workspace.milliseconds(exact)),
    }
    plain = float(np.median(workspace.plain_milliseconds()))
    rows: list[tuple[Any, ...]] = [("plain detector", None, plain, 1.0)]
    for name, (column, milliseconds) in times.items():
        ms = float(np.median(milliseconds))
        rows.append((name, paper.RUNTIME.get(column), ms, ms / plain))
    notes = (
        f"Head posterior, {boxes:.1f} boxes per frame (the paper: 97.3), "
        f"{workspace.setting.device}; medians, including the plain detector.",
        f"GLM was timed on {glm_boxes} boxes of one frame and extrapolated: "
        "every box costs the same.",
    )
    columns = ("method", "ms, paper", "ms", "times the plain detector")
    return Table("runtime", "Run time", columns, rows, notes)


def _metric_rows(found: Mapping[str, Records], figures: paper.Figures) -> list[tuple[Any, ...]]:
    """Return one row per method and error: the paper's number, ours and chance per metric."""
    rows = []
    for name, records in found.items():
        values = measure(records)
        for error in ERRORS:
            cells: list[Any] = [name, error]
            for metric in METRICS:
                cell = values[error][metric]
                cells.append(figures[name][metric][error] if name in figures else None)
                cells += [cell["value"], cell["chance"]]
            rows.append((*cells, values[error]["AUROC"]["value"]))
    return rows


def _rows_with_distance(
    found: Mapping[str, Records], figures: paper.Figures, exact: Records
) -> list[tuple[Any, ...]]:
    """Append the relative distance from ``exact`` and the rank correlation with it."""
    distance = {
        name: (
            _relative_distance(records, exact),
            spearman(records.uncertainty, exact.uncertainty),
        )
        for name, records in found.items()
    }
    return [(*row, *distance[row[0]]) for row in _metric_rows(found, figures)]


def _relative_distance(records: Records, exact: Records) -> float:
    """Return the median relative Frobenius distance of the covariances."""
    assert records.covariance is not None
    assert exact.covariance is not None
    size = np.maximum(np.linalg.norm(exact.covariance, axis=(1, 2)), 1e-300)
    distance = np.linalg.norm(records.covariance - exact.covariance, axis=(1, 2))
    return float(np.median(distance / size))
