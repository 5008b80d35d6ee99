"""Numbers per frame that may recognise a distribution shift. Used by coco_shift.py, coco_report.py
and real_shift.py.

All of them are fitted on clean frames alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from boxcov.evaluate.quality import auroc

Array = np.ndarray


@dataclass(frozen=True)
class Frame:
    """m boxes of one frame."""

    scores: Array  # (m,)
    known: Array  # (m, c) known without a covariance: score logit, log sizes ...
    group: Array  # (m,) class or level, within which features are compared
    features: Array  # (m, F) features of the network at each box
    pooled: Array | None  # (P,) features of the whole frame
    variances: Mapping[str, Array]  # by part, (m, V): the fields and, last, the score logit
    trace: Mapping[str, Array]  # by part, (m,)

    def __len__(self) -> int:
        return len(self.scores)


Statistic = Callable[[Sequence[Frame]], Array]


def statistics(
    frames: Sequence[Frame], parts: Sequence[str], trained: Sequence[Frame] = ()
) -> dict[str, Statistic]:
    """Return, by name, functions that give each frame a number that should rise under a shift.

    They are fitted on ``frames``, which are clean. Features are compared with those of ``trained``,
    frames without a covariance, if there are any. A frame without boxes counts as the most
    unusual under every number.
    """
    made: dict[str, Statistic] = {
        "1 - score": lambda some: means(some, lambda f: 1 - f.scores),
        "fewer boxes": fewer,
    }
    made["1 - score, fewer boxes"] = standardized_sum(frames, made["1 - score"], fewer)
    boxed = Gaussians(trained or frames)
    made["features of boxes"] = lambda some: means(some, boxed.distance)
    if frames[0].pooled is not None:
        whole = Usual(np.stack([f.pooled for f in trained or frames]))
        made["features of the frame"] = lambda some: np.array(
            [whole.distance(f.pooled) for f in some]
        )
    for part in parts:
        made[f"{part}, trace"] = lambda some, part=part: means(some, lambda f: log(f.trace[part]))
        made[f"{part}, fields"] = lambda some, part=part: means(
            some, lambda f: log(f.variances[part][:, :-1]).mean(1)
        )
        made[f"{part}, logit"] = lambda some, part=part: means(
            some, lambda f: log(f.variances[part][:, -1])
        )
        if "dropout" not in part:
            both = made[f"{part}, fields"], made[f"{part}, logit"]
            made[f"{part}, fields, logit"] = standardized_sum(frames, *both)
            made[f"{part}, fields, 1 - score"] = standardized_sum(
                frames, both[0], made["1 - score"]
            )
            made[f"{part}, fields, logit, fewer boxes"] = standardized_sum(frames, *both, fewer)
            made[f"{part}, fields, logit, 1 - score, fewer boxes"] = standardized_sum(
                frames, *both, made["1 - score"], fewer
            )
    ours = [part for part in parts if "dropout" not in part]
    made["score and size, one class"] = OneClass(frames, (), True).distance
    for name, some in (*((part, (part,)) for part in ours), (" and ".join(ours), tuple(ours))):
        made[f"{name}, more than usual"] = OneClass(frames, some, False).excess
        made[f"{name}, one class"] = OneClass(frames, some, False).distance
    made[f"{' and '.join(ours)}, score and size, one class"] = OneClass(
        frames, tuple(ours), True
    ).distance
    return made


def standardized_sum(frames: Sequence[Frame], *numbers: Statistic) -> Statistic:
    """Return the sum of some numbers, each standardized by its mean and spread over ``frames``."""
    usual = [(number, number([f for f in frames if len(f)])) for number in numbers]

    def found(some: Sequence[Frame]) -> Array:
        total: Array = np.sum(
            [
                (number(some) - values.mean()) / max(float(values.std()), 1e-12)
                for number, values in usual
            ],
            0,
        )
        return total

    return found


def fewer(frames: Sequence[Frame]) -> Array:
    return np.array([-np.log(len(f)) if len(f) else np.inf for f in frames])


def means(frames: Sequence[Frame], number: Callable[[Frame], Array]) -> Array:
    return np.array([float(number(f).mean()) if len(f) else np.inf for f in frames])


def log(values: Array) -> Array:
    found: Array = np.log(np.maximum(np.asarray(values, dtype=float), 1e-30))
    return found


class Usual:
    """Mean and covariance of vectors (n, P); fewer vectors shrink it more to its diagonal."""

    def __init__(self, vectors: Array) -> None:
        n, P = vectors.shape
        self.mean = vectors.mean(0)
        S = np.atleast_2d(np.cov(vectors.T))
        share = min(1.0, P / n)
        diagonal = np.diag(np.maximum(S.diagonal(), 1e-9 * max(S.diagonal().max(), 1e-12)))
        self.precision = np.linalg.inv((1 - share) * S + share * diagonal)

    def distance(self, vector: Array) -> float:
        d = vector - self.mean
        return float(d @ self.precision @ d)


class Gaussians:
    """Mahalanobis distance of a box's features from its group's mean, with a common covariance."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        X, group = (
            np.concatenate([getattr(f, name) for f in frames]) for name in ("features", "group")
        )
        X = X.astype(float)
        self.all = X.mean(0)
        self.mean = {g: X[group == g].mean(0) for g in np.unique(group)}
        S = np.cov((X - np.stack([self.mean[g] for g in group])).T)
        self.precision = np.linalg.inv(S + 1e-3 * np.trace(S) / len(S) * np.eye(len(S)))

    def distance(self, frame: Frame) -> Array:
        d = frame.features.astype(float) - np.stack(
            [self.mean.get(g, self.all) for g in frame.group]
        )
        found: Array = np.einsum("ni,ij,nj->n", d, self.precision, d)
        return found


class OneClass:
    """How unusual the variances of a frame's boxes are, given their scores and sizes.

    A regression on clean frames predicts the log variances of a box from score and size. The mean
    residuals of a frame are standardized by their spread over clean frames, which depends on the
    number of boxes. ``excess`` is the mean of these numbers, ``distance`` their Mahalanobis
    distance. With ``scores``, the mean score logit, the mean log sizes and the number of boxes
    are added to the numbers.
    """

    def __init__(self, frames: Sequence[Frame], parts: Sequence[str], scores: bool) -> None:
        self.parts, self.scores = tuple(parts), scores
        some = [f for f in frames if len(f)]
        X, Y = (
            np.concatenate([_design(f) for f in some]),
            np.concatenate([self._log_variances(f) for f in some]),
        )
        self.slopes = (
            np.linalg.solve(X.T @ X + 1e-3 * len(X) * np.eye(X.shape[1]), X.T @ Y)
            if Y.shape[1]
            else np.zeros((X.shape[1], 0))
        )
        each = [self._residuals(f) for f in some]
        means_, m = np.stack([e.mean(0) for e in each]), np.array([len(e) for e in each])
        inside = np.concatenate([e - e.mean(0) for e in each])
        self.within = (inside**2).sum(0) / max(len(inside) - len(each), 1)
        self.mean = np.average(means_, axis=0, weights=m)
        strays = ((means_ - self.mean) ** 2).mean(0)
        self.between = np.maximum(strays - self.within * (1 / m).mean(), 0.05 * strays + 1e-12)
        vectors = np.stack([self._vector(f) for f in some])
        self.usual = Usual(vectors)

    def excess(self, frames: Sequence[Frame]) -> Array:
        return np.array([float(self._vector(f).mean()) if len(f) else np.inf for f in frames])

    def distance(self, frames: Sequence[Frame]) -> Array:
        return np.array(
            [self.usual.distance(self._vector(f)) if len(f) else np.inf for f in frames]
        )

    def _log_variances(self, frame: Frame) -> Array:
        return (
            np.concatenate([log(frame.variances[part]) for part in self.parts], 1)
            if self.parts
            else np.zeros((len(frame), 0))
        )

    def _residuals(self, frame: Frame) -> Array:
        R = self._log_variances(frame) - _design(frame) @ self.slopes
        return np.concatenate([R, frame.known], 1) if self.scores else R

    def _vector(self, frame: Frame) -> Array:
        z = (self._residuals(frame).mean(0) - self.mean) / np.sqrt(
            self.between + self.within / len(frame)
        )
        return np.append(z, np.log(len(frame))) if self.scores else z


def _design(frame: Frame) -> Array:
    return np.concatenate([np.ones((len(frame), 1)), frame.known, frame.known**2], 1)


def auroc_of_shift(clean: Array, shifted: Array) -> float:
    """Return the AUROC of separating shifted frames from clean ones by one number per frame."""
    is_shifted = np.repeat([False, True], [len(clean), len(shifted)])
    return auroc(is_shifted, np.concatenate([clean, shifted]))


def shift_auroc(
    clean: Array, shifted: Array, pairs: bool, replicates: int = 500
) -> tuple[float, float, float]:
    """Return ``auroc_of_shift`` with its 95 % bootstrap interval over frames.

    With ``pairs``, a clean and a shifted frame of the same scene are drawn as one.
    """
    rng = np.random.default_rng(0)
    values = []
    for _ in range(replicates):
        first = rng.integers(0, len(clean), len(clean))
        second = first if pairs else rng.integers(0, len(shifted), len(shifted))
        values.append(auroc_of_shift(clean[first], shifted[second]))
    low, high = np.quantile(values, (0.025, 0.975))
    return auroc_of_shift(clean, shifted), float(low), float(high)


def gain(
    clean: Mapping[str, Array],
    shifted: Mapping[str, Array],
    mine: str,
    other: str,
    replicates: int = 500,
) -> tuple[float, float, float]:
    """Return the AUROC of one number minus that of another, with its paired 95 % interval."""
    rng = np.random.default_rng(0)

    def value(name: str, rows: Array) -> float:
        return auroc_of_shift(clean[name][rows], shifted[name][rows])

    draws = [
        np.arange(len(clean[mine])),
        *(rng.integers(0, len(clean[mine]), len(clean[mine])) for _ in range(replicates)),
    ]
    values = [value(mine, rows) - value(other, rows) for rows in draws]
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return values[0], float(low), float(high)


def show(rows: Mapping[str, Mapping[str, tuple[float, float, float] | None]]) -> None:
    """Print one row per number and one column per shift."""
    columns = list(next(iter(rows.values())))
    print("\n| one number per frame |", " | ".join(columns), "|\n| --- |", " ---: |" * len(columns))
    for name, row in rows.items():
        form = "{:+.2f} ({:+.2f} to {:+.2f})" if " minus " in name else "{:.2f} ({:.2f} to {:.2f})"
        cells = ["" if row[c] is None else form.format(*row[c]) for c in columns]
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


def chart(
    path: Path, table: Mapping[str, Mapping[str, Any]], kinds: Sequence[str], names: Sequence[str]
) -> None:
    """Write a chart of the AUROC over the strength of each corruption."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for number, kind in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), number + 1)
        for name in names:
            strengths = [s for s in range(1, 6) if table[name].get(f"{kind} {s}") is not None]
            dotted = ":" if "features" in name or "dropout" in name else "--"
            style = "-" if name == "1 - score" else dotted
            axes.plot(
                strengths,
                [table[name][f"{kind} {s}"][0] for s in strengths],
                style,
                marker="o",
                markersize=3,
                label=name,
            )
        axes.axhline(0.5, color="grey", linewidth=0.5)
        axes.set(
            title=kind,
            ylim=(0.2, 1.02),
            xlabel="strength",
            ylabel="AUROC, corrupted or clean" if not number else "",
        )
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    figure.savefig(path, dpi=90)
