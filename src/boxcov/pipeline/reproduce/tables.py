"""The paper's tables from the files of the runs, the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from boxcov.detections import Detections
from boxcov.evaluate.quality import ERRORS, METRICS
from boxcov.evaluate.records import Records
from boxcov.pipeline.reproduce import paper
from boxcov.pipeline.reproduce.measures import (
    known,
    measured,
    milliseconds,
    one_minus_score,
    records,
    refused,
    spearman,
    warm,
)
from boxcov.pipeline.reproduce.runs import Workshop, posterior_of
from boxcov.pipeline.reproduce.setting import (
    DEPTHS,
    EPSILONS,
    FORMS,
    SAMPLES,
    SHARES,
    Form,
    Run,
    published,
)
from boxcov.pipeline.reproduce.table import Table

NAMES = {"paper": "the paper's posterior Q^-1 (x) H^-1", "prior": "the posterior (n F + tau I)^-1"}
_COLUMNS = tuple(f"{metric}{what}" for metric in METRICS for what in (", paper", "", " by chance"))
CHANCE = (
    "By chance: the mean of the same metric when the same u are dealt out to the boxes at random (P(U) for P(U|I), P(A) for P(A|C)). "
    "AUROC: of finding the inaccurate boxes; 0.5 is chance."
)


def quality(workshop: Workshop, form: Form) -> list[Table]:
    """Table I: MCI, GLM, MC-GLM; and 1 - score and the spread under NMS. For all predictions, and for those with an object."""
    exact = records(workshop, Run("exact", form))
    differences = published(form)
    why = refused(workshop, differences)
    found = {
        "MCI": records(workshop, Run("mci")),
        "GLM": exact,
        **({"MC-GLM": records(workshop, differences)} if why is None else {}),
        "MC-GLM, exact derivatives": records(workshop, Run("mcglm", form)),
        "1 - score": one_minus_score(exact),
    }
    if workshop.path(Run("nms")).exists():
        found["boxes that NMS removed"] = records(workshop, Run("nms"))
    checked, off = glm_check(workshop, form)
    notes: tuple[str, ...] = (
        CHANCE,
        f"GLM: computed by ExactGLM; one backward pass a number gave the same to {off:.1g} on the {checked} boxes where it was run.",
    )
    if why is not None:
        notes += (f"MC-GLM by finite differences of 1e-7: no figures. {why}.",)
    tables = []
    for name, title in (("all", "all predictions"), ("paired", "predictions with an object")):
        rows = _rows(
            {
                method: part[part.paired] if name == "paired" else part
                for method, part in found.items()
            },
            paper.QUALITY,
        )
        about = f"Quality, {NAMES[form]}, {title}"
        tables.append(
            Table(
                f"quality-{form}-{name}",
                about,
                ("method", "error", *_COLUMNS, "AUROC"),
                rows,
                notes,
            )
        )
    return tables


def glm_check(workshop: Workshop, form: Form) -> tuple[int, float]:
    """On how many boxes GLM itself was run, and how far its covariances are from the exact ones, relatively, at most."""
    slow, fast = (Detections.load(workshop.path(Run(method, form))) for method in ("glm", "exact"))
    assert slow.covariance is not None
    assert fast.covariance is not None
    same = fast.covariance[: len(slow)].double()
    off = (slow.covariance.double() - same).flatten(1).norm(dim=1) / same.flatten(1).norm(dim=1)
    return len(slow), float(off.max()) if len(slow) else 0.0


def depth(workshop: Workshop, form: Form) -> Table:
    """Table III: head; neck and head; backbone, neck and head; with what the factors weigh."""
    found = {name: records(workshop, Run("mcglm", form, part)) for name, part in DEPTHS.items()}
    whole = workshop.posterior()
    sizes = {}
    for name, part in DEPTHS.items():
        storage = posterior_of(Run("mcglm", form, part), whole, workshop.detector).storage()
        sizes[name] = (paper.STORAGE[name], storage.factors / 2**20, storage.stored / 2**20)
    rows = [(*row, *sizes[row[0]]) for row in _rows(found, paper.DEPTH)]
    columns = (
        "depth",
        "error",
        *_COLUMNS,
        "AUROC",
        "MB, paper",
        "MiB as the paper counts",
        "MiB stored",
    )
    return Table(
        f"depth-{form}",
        f"Depth of the posterior, MC-GLM with exact derivatives, {NAMES[form]}",
        columns,
        rows,
        (CHANCE,),
    )


def share(workshop: Workshop, form: Form) -> Table:
    """Table IV: the posterior of all three parts from less of the training data."""
    found = {
        name: records(workshop, Run("mcglm", form, "backbone", share=part))
        for name, part in SHARES.items()
    }
    whole, exact = records(workshop, Run("exact", form)), {}
    for name, part in SHARES.items():
        exact[name] = spearman(
            whole.uncertainty,
            records(workshop, Run("exact", form, share=part, counted=part < 1)).uncertainty,
        )
    rows = [(*row, exact[row[0]]) for row in _rows(found, paper.SHARE)]
    columns = ("share", "error", *_COLUMNS, "AUROC", "rank correlation, head")
    note = "Rank correlation: of the exact u under the head's posterior with the u under that of all the data; no sampling in it."
    return Table(
        f"share-{form}",
        f"Share of the training data, MC-GLM with exact derivatives, B+N+H, {NAMES[form]}",
        columns,
        rows,
        (CHANCE, note),
    )


def epsilon(workshop: Workshop, form: Form) -> Table:
    """Table V: the step of the finite difference, and how far off the exact derivatives it is."""
    exact = records(workshop, Run("mcglm", form))
    steps = {name: published(form, step) for name, step in EPSILONS.items()}
    why = {name: refused(workshop, run) for name, run in steps.items()}
    found = {name: records(workshop, run) for name, run in steps.items() if why[name] is None}
    off = {name: _off(rows, exact) for name, rows in found.items()}
    rows = [
        (*row, off[row[0]], spearman(found[row[0]].uncertainty, exact.uncertainty))
        for row in _rows(found, paper.EPSILON)
    ]
    columns = ("epsilon", "error", *_COLUMNS, "AUROC", "off the derivative", "rank correlation")
    note = (
        "Off the derivative: median over the boxes of the relative distance of the covariance from that of exact derivatives (jvp) along "
        "the same directions; rank correlation: of the u with those."
    )
    lost = tuple(
        f"epsilon = {name}: no figures. {reason}."
        for name, reason in why.items()
        if reason is not None
    )
    return Table(
        f"epsilon-{form}",
        f"Step of the finite difference, MC-GLM, head, {NAMES[form]}",
        columns,
        rows,
        (CHANCE, note, *lost),
    )


def samples(workshop: Workshop, form: Form) -> Table:
    """Table VI: the number of samples, and how far off the exact covariance they are."""
    exact = records(workshop, Run("exact", form))
    found = {name: records(workshop, Run("mcglm", form, samples=k)) for name, k in SAMPLES.items()}
    rows = [
        (*row, _off(found[row[0]], exact), spearman(found[row[0]].uncertainty, exact.uncertainty))
        for row in _rows(found, paper.SAMPLES)
    ]
    columns = ("k", "error", *_COLUMNS, "AUROC", "off the exact", "rank correlation")
    note = "Off the exact: median over the boxes of the relative distance of the covariance from the exact one; rank correlation: of the u."
    return Table(
        f"samples-{form}",
        f"Number of samples, MC-GLM with exact derivatives, head, {NAMES[form]}",
        columns,
        rows,
        (CHANCE, note),
    )


def runtime(workshop: Workshop) -> Table:
    """Table II: milliseconds a frame, medians."""
    every = Detections.load(workshop.path(Run("exact", "paper")))
    boxes = len(every) / every.meta["frames"]
    slow = Run("glm", "paper")
    part = len(Detections.load(workshop.path(slow)))
    times = {
        "MCI, k = 10": ("MCI", milliseconds(workshop, Run("mci"))),
        "GLM": ("GLM", [milliseconds(workshop, slow)[0] * boxes / part]),
        "MC-GLM, k = 10, finite differences": (
            "MC-GLM",
            milliseconds(workshop, published("paper")),
        ),
        "MC-GLM, k = 10, exact derivatives": ("", milliseconds(workshop, Run("mcglm", "paper"))),
        "exact": ("", milliseconds(workshop, Run("exact", "paper"))),
    }
    plain = float(np.median(warm(workshop.plain_times())))
    rows: list[tuple[Any, ...]] = [("plain detector", None, plain, 1.0)]
    for name, (column, each) in times.items():
        ms = float(np.median(each))
        rows.append((name, paper.RUNTIME.get(column), ms, ms / plain))
    notes = (
        f"Head posterior, {boxes:.1f} boxes a frame (the paper: 97.3), {workshop.setting.device}; medians, the plain detector included.",
        f"GLM was timed on {part} boxes of one frame and extrapolated to all: it costs the same for every box.",
    )
    return Table(
        "runtime",
        "Run time",
        ("method", "ms, paper", "ms", "times the plain detector"),
        rows,
        notes,
    )


def tables(workshop: Workshop) -> list[Table]:
    """All tables of the paper."""
    made: list[Table] = []
    for form in FORMS:
        made += quality(workshop, form)
    made.append(runtime(workshop))
    ablations: tuple[Callable[[Workshop, Form], Table], ...] = (depth, share, epsilon, samples)
    made += [ablation(workshop, form) for ablation in ablations for form in FORMS]
    return made


def _rows(found: Mapping[str, Records], figures: paper.Figures) -> list[tuple[Any, ...]]:
    rows = []
    for name, part in found.items():
        now = measured(part)
        for error in ERRORS:
            cells: list[Any] = [name, error]
            for metric in METRICS:
                printed = figures[name][metric][error] if name in figures else None
                cells += [
                    printed,
                    known(now[error][metric]["value"]),
                    known(now[error][metric]["chance"]),
                ]
            rows.append((*cells, known(now[error]["AUROC"]["value"])))
    return rows


def _off(rows: Records, exact: Records) -> float:
    """The median relative Frobenius distance of the covariances."""
    assert rows.covariance is not None
    assert exact.covariance is not None
    size = np.linalg.norm(exact.covariance, axis=(1, 2))
    return float(
        np.median(
            np.linalg.norm(rows.covariance - exact.covariance, axis=(1, 2))
            / np.maximum(size, 1e-300)
        )
    )
