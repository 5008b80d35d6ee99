"""``boxcov evaluate``: the quality of the covariances of one or more files of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from boxcov.cli.command import Output
from boxcov.pipeline.options import EvaluateCommand
from boxcov.pipeline.terminal import new_table

Row = Mapping[str, Any]


def evaluate(options: EvaluateCommand) -> Output | None:
    """Compare predictions with the objects of their frames.

    Prints the metrics of each file next to baselines and the chance level, then a verdict.
    """
    from boxcov.pipeline.evaluate import run
    from boxcov.pipeline.progress import ProgressBar
    from boxcov.report.verdict import first_method, headline, sentences

    with ProgressBar("reading frames") as progress:
        result = run(options, progress)
    if result is None:  # another rank prints
        return None
    (study, rows), out = result, None if options.out is None else str(options.out)
    parts = [quality_table(rows)]
    if any(row["ENCE"] is not None for row in rows):
        parts.append(covariance_table(rows))
    if any(row["kind"] == "difference" for row in rows):
        parts.append(difference_table(rows))
    if (method := first_method(study)) is not None:
        parts.append(f"{method.name}: {' '.join(sentences(headline(method.records)))}")
    if out is not None:
        parts.append(f"report: {out}")
    return Output({"about": dict(study.about), "rows": rows, "out": out}, parts)


def quality_table(rows: Sequence[Row]) -> Any:
    """Return a table with one column per method and two lines per metric: value and chance."""
    methods = [row for row in rows if row["kind"] not in ("chance", "difference")]
    chance = [row for row in rows if row["kind"] == "chance"]
    names = [str(row["method"]) for row in methods]
    table = new_table("quality of the uncertainties, with 95 % intervals over frames", "", *names)
    for name in ("boxes", "paired"):
        table.add_row(name, *(str(row[name]) for row in methods))
    _add_metrics(table, methods, chance)
    return table


def covariance_table(rows: Sequence[Row]) -> Any:
    """Return how well the covariances and the error model describe the errors of paired boxes."""
    from boxcov.evaluate.summary import COVARIANCE_METRICS, ERROR_DISTRIBUTIONS

    columns = {
        f"{row['method']}: {words}": cells
        for row in rows
        for words, names in ERROR_DISTRIBUTIONS.items()
        if any(cells := [row[name] for name in names])
    }
    table = new_table("errors of paired boxes under each distribution", "", *columns)
    for label, *cells in zip(COVARIANCE_METRICS, *columns.values()):
        table.add_row(label.replace("%", " %"), *(_format_cell(cell) for cell in cells))
    return table


def difference_table(rows: Sequence[Row]) -> Any:
    """Return a table of what the covariance adds to the baselines, with one column for each."""
    differences = [row for row in rows if row["kind"] == "difference"]
    names = [str(row["method"]).partition(", minus ")[0] for row in differences]
    table = new_table("what the covariance adds, with 95 % intervals of the difference", "", *names)
    _add_metrics(table, differences)
    return table


def _add_metrics(table: Any, rows: Sequence[Row], chance: Sequence[Row] = ()) -> None:
    from boxcov.evaluate.summary import MEASURE_COLUMNS

    for name in MEASURE_COLUMNS:
        for label, shown, style in ((name, rows, None), ("  chance", chance, "dim")):
            if any(row[name] is not None for row in shown):
                table.add_row(label, *(_format_cell(row[name]) for row in shown), style=style)


def _format_cell(cell: Mapping[str, float | None] | None) -> str:
    """Return a value with its interval; a dash if the value is not finite."""
    if cell is None:
        return ""
    if cell["value"] is None:
        return "-"
    low, high = cell["low"], cell["high"]
    if low is None or high is None:
        return f"{cell['value']:.3g}"
    # + 0.0: no -0.00
    value, low, high = (round(number, 2) + 0.0 for number in (cell["value"], low, high))
    return f"{value:.2f} {_short(low)}{' to ' if low < 0 else '-'}{_short(high)}"


def _short(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"
