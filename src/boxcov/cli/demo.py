"""``boxcov demo``: calibrated boxes of the detector and the simulated frames inside the package."""

from __future__ import annotations

from typing import Any

from boxcov.cli.command import Output
from boxcov.pipeline.options import DemoCommand


def demo(options: DemoCommand) -> Output:
    """Show what the risk and the regions of boxes are worth, and write a report.

    No download, no GPU, no fit: the trained CenterPoint, its posterior and its error model are part
    of the package, and the LiDAR frames are simulated. `boxcov reproduce` compares all methods.
    """
    from boxcov.pipeline import demo as pipeline
    from boxcov.pipeline.progress import Steps

    with Steps() as step:
        scenarios = pipeline.run(options, step)
    reports = {name: str(options.out / name / "report.html") for name in scenarios}
    numbers = {name: {**scenarios[name], "report": path} for name, path in reports.items()}
    lines = [f"{name}, {pipeline.SCENARIOS[name]}: {path}" for name, path in reports.items()]
    title = f"{pipeline.DETECTOR} with its posterior and error model, on simulated LiDAR frames"
    return Output(numbers, [title, _table(scenarios), *lines])


def _table(scenarios: dict[str, dict[str, Any]]) -> Any:
    """Return one column per scenario: what was predicted, and what was observed."""
    from rich.table import Table

    from boxcov.pipeline.demo import HIGH, LOW, WIDTHS
    from boxcov.report.verdict import display_unit

    table, all_numbers = Table("", *scenarios), list(scenarios.values())
    table.add_row("boxes", *(str(n["boxes"]) for n in all_numbers))
    table.add_row("bad boxes: no object, or IoU < 0.4", *(_percent(n["bad"]) for n in all_numbers))
    table.add_row("  predicted by the risk", *(_percent(n["risk"]) for n in all_numbers))
    risks = {f"up to {100 * LOW:.0f} %": "low risk", f"from {100 * HIGH:.0f} %": "high risk"}
    for label, name in risks.items():
        table.add_row(f"  bad among risks {label}", *(_bad_among(n[name]) for n in all_numbers))
    table.add_row("AUROC of the risk", *(f"{n['AUROC']:.3f}" for n in all_numbers))
    scores = [f"{n['AUROC of 1 - score']:.3f}" for n in all_numbers]
    table.add_row("  of 1 - score", *scores, end_section=True)
    for level in all_numbers[0]["inside"]:
        label = f"errors inside the {100 * float(level):.0f} % regions"
        table.add_row(label, *(_percent(n["inside"][level]) for n in all_numbers))
    for field in WIDTHS:
        unit = display_unit(field)[0]
        widths = [f"{n['half width'][field]:.2g} {unit}" for n in all_numbers]
        is_last = field == WIDTHS[-1]
        table.add_row(f"  90 % half width of {field}, median", *widths, end_section=is_last)
    table.add_row("cost, in plain frames", *(f"{n['cost']:.1f}" for n in all_numbers))
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _bad_among(count: dict[str, Any]) -> str:
    return f"{_percent(count['bad'])} of {count['boxes']}"
