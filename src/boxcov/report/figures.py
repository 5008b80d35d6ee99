"""PNG figures for papers: the plots of the page and bird's-eye pictures, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from boxcov.evaluate.quality import ERRORS, METRICS, clipped_mean
from boxcov.files import made_folder, replacing
from boxcov.report.bev import draw_scene
from boxcov.report.payload import PLANE
from boxcov.report.series import Bar, Line, reliability_lines, runtime_bars, threshold_lines
from boxcov.report.study import Study

# the page's colours on white, in the same order
COLOURS = ("#2a78d6", "#e0592a", "#159c6c", "#b87f00", "#d4588c", "#0a7a0a", "#4a3aa7", "#c93a3a")
DASHES = ("-", "--", ":")
SCENES = 3  # pictures at most
SCORE = 0.3  # of a box in a picture: those below it would cover the others


def write_figures(folder: str | Path, study: Study) -> list[Path]:
    """The figures that the study has something for, as PNG files in ``folder``, which is made if it is not there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in write_figures(folder, Study("Speed", runtime=[{"method": "exact", "ms": 2.0}]))]
    ['runtime.png']
    """
    folder = made_folder(Path(folder))
    made = [(name, figure) for name, figure in _figures(study) if figure is not None]
    return [_saved(folder / f"{name}.png", figure) for name, figure in made]


def _figures(study: Study) -> list[tuple[str, Any]]:
    named = [
        ("curves", _curves(study)),
        ("reliability", _reliability(study)),
        ("runtime", _runtime(study)),
    ]
    return [
        *named,
        *((f"bev-{frame}", _scene(study, frame)) for frame in sorted(study.scenes)[:SCENES]),
    ]


def _saved(path: Path, figure: Any) -> Path:
    from matplotlib import pyplot as plt

    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=200, bbox_inches="tight", format="png")
    plt.close(figure)
    return path


def _axes(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")


def _curves(study: Study) -> Any:
    if not any(len(method.records) for method in study.methods):
        return None
    figure, axes = _axes(len(ERRORS), len(METRICS), 9.0, 5.4)
    lines = threshold_lines(study)
    for row, error in zip(axes, ERRORS):
        for ax, metric in zip(row, METRICS):
            _draw_lines(ax, lines[metric, error])
            ax.set_title(f"{metric}, {_error_name(error)}", fontsize=10)
            ax.set_ylim(-0.02, 1.02)
    for ax in axes[-1]:
        ax.set_xlabel("threshold (quantile of u)")
    _legend(figure, axes[0][0])
    return figure


def _reliability(study: Study) -> Any:
    panels = reliability_lines(study)
    if not panels:
        return None
    figure, axes = _axes(1, len(panels), 3.6 * len(panels), 3.7)
    for ax, (title, lines) in zip(axes[0], panels.items()):
        ax.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=":", label="ideal")
        _draw_lines(ax, lines)
        ax.set_title(title, fontsize=10)
        ax.set(
            xlabel="nominal coverage",
            ylabel="observed coverage",
            xlim=(0, 1),
            ylim=(0, 1),
            aspect="equal",
        )
    _legend(figure, axes[0][0])
    return figure


def _runtime(study: Study) -> Any:
    devices = runtime_bars(study)
    if not devices:
        return None
    figure, axes = _axes(
        len(devices), 1, 6.5, 0.8 + sum(0.5 + 0.28 * len(bars) for bars in devices.values())
    )
    for ax, (device, bars) in zip(axes[:, 0], devices.items()):
        _draw_bars(ax, bars)
        ax.set_title(device, fontsize=10, loc="left")
    axes[-1][0].set_xlabel("milliseconds a frame")
    return figure


def _scene(study: Study, frame: int) -> Any:
    """The first method with covariances, else the first; the paper's threshold."""
    if not study.methods or not all(name in study.fields for name in PLANE):
        return None
    method = next(
        (method for method in study.methods if method.records.covariance is not None),
        study.methods[0],
    )
    figure, axes = _axes(1, 1, 6.5, 6.8)
    records = method.records
    shown = records[(records.frame == frame) & (records.scores >= SCORE)]
    draw_scene(axes[0][0], study.scenes[frame], shown, clipped_mean(records.uncertainty))
    title = f"{study.scenes[frame].name}: {method.name}, scores from {SCORE}. Green: objects; numbers: u"
    axes[0][0].set_title(title.replace("$", r"\$"), fontsize=9)
    return figure


def _draw_lines(ax: Any, lines: Sequence[Line]) -> None:
    for line in lines:
        ax.plot(
            line.x,
            line.y,
            label=_plain(line.name),
            marker="o" if line.marks else None,
            markersize=3,
            **_style(line.style),
        )
    ax.grid(color="#e4e4e4", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_bars(ax: Any, bars: Sequence[Bar]) -> None:
    values = [0.0 if np.isnan(bar.value) else bar.value for bar in bars]
    drawn = ax.barh(
        range(len(bars)),
        values,
        height=0.65,
        color=[COLOURS[bar.style % len(COLOURS)] for bar in bars],
    )
    ax.bar_label(drawn, [_plain(bar.text) for bar in bars], padding=4, fontsize=8)
    ax.set_yticks(range(len(bars)), [_plain(bar.name) for bar in bars], fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.22)
    ax.spines[["top", "right"]].set_visible(False)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
        "linewidth": 1.6,
    }


def _plain(name: str) -> str:
    return (
        name.replace("$", r"\$").lstrip("_") or " "
    )  # matplotlib reads $ as mathematics, and hides names that begin with _


def _error_name(error: str) -> str:
    return r"$\ell_2$" if error == "l2" else error


def _legend(figure: Any, ax: Any) -> None:
    figure.legend(
        *ax.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
