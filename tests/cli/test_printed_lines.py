"""Lines that the commands print: words and rounded numbers of a report."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from boxcov.cli import calibrate, command, demo, evaluate, predict, train
from boxcov.pipeline import bench, stream
from boxcov.pipeline.options.option import Interval


def test_calibrate_says_whether_the_risk_is_better() -> None:
    row = {"share": 0.5, "AUROC": 0.97, "baseline": 0.95, "low": 0.01, "high": 0.03}

    def verdict(**other: float) -> str:
        held_out = {"boxes": 1000, "rows": {"risk": {**row, **other}}}
        return calibrate._verdict({"held_out": held_out})

    assert verdict() == "risk finds bad boxes better than 1 - score: AUROC 0.970 against 0.950"
    assert verdict(low=-0.01).startswith("risk is not shown to find bad boxes better")
    assert verdict(low=-0.03, high=-0.01).startswith("risk finds bad boxes worse than 1 - score")
    assert verdict(share=0.999).startswith("1 of 1000 boxes are good: too few to judge the risk")
    assert verdict(share=0.009).startswith("9 of 1000 boxes are bad: too few to judge the risk")


def test_calibrate_says_what_regions_hold() -> None:
    shares = {"held_out": {"regions": {"0.5": 0.512, "0.9": 0.9}}}
    line = "regions of 50 / 90 % hold 51.2 / 90.0 % of the errors"
    assert calibrate._regions(shares) == line


@pytest.mark.parametrize(
    ("low", "value", "high", "text"),
    [
        (0.6, 0.7123, 1.0, "0.71 .60-1.00"),
        (-0.01, 0.02, 0.05, "0.02 -.01 to .05"),
        (-0.004, -0.001, 0.004, "0.00 .00-.00"),
    ],
)
def test_evaluate_shows_intervals(low: float, value: float, high: float, text: str) -> None:
    assert evaluate._format_cell({"value": value, "low": low, "high": high}) == text


def test_predict_says_how_many_boxes_have_a_low_risk() -> None:
    line = predict._describe_risk({"risk": 0.0712, "low_risk": 60, "boxes": 80})
    assert line == "risk: median 7.1 %, below 20 % for 60 of 80 boxes"


def test_demo_says_how_many_are_bad() -> None:
    assert demo._bad_among({"boxes": 40, "bad": 0.05}) == "5 % of 40"


def test_train_shows_precision_by_class() -> None:
    precisions = {"car": {2.0: 0.5}, "bus": {2.0: float("nan")}}
    lines = train._format({"a": {"mAP": 0.5, "AP": precisions}}).splitlines()
    rows = [["car", "0.50"], ["bus", "-"], ["mean", "0.50"]]
    assert [line.split() for line in lines[1:]] == rows
    assert len({len(line) for line in lines}) == 1


def test_bench_has_aligned_columns() -> None:
    row = {"depth": "head", "boxes": 9, "samples": None, "peak_mib": None, "note": ""}
    row |= {"ms": 3.2, "low": 3.0, "high": 4.0, "ratio": 1.5}
    long = {"method": "exact and error model, tf32, compiled", "note": "per frame"}
    table = bench.format_table([{**row, "method": "exact"}, {**row, **long}])
    head, short, noted = table.splitlines()
    assert short == f"exact{'head':>39}{9:>7}{'-':>9}  3.2 (3.0 to 4.0)   1.50{'-':>10}"
    assert len(head) == len(short)
    assert noted.endswith("  per frame")
    assert len(noted) == len(short) + len("  per frame")


def test_stream_rounds_and_has_no_infinity() -> None:
    values = np.array([[0.123456789, 987654.321], [np.inf, 1e-7]])
    assert stream._round(values, 5) == [[0.12346, 987650.0], [None, 0.0]]


def test_help_names_values_and_limits() -> None:
    kinds = (float | None, list[int], bool, Literal["jvp", "fd"])
    assert [command._metavar(kind) for kind in kinds] == ["NUMBER", "N", "", "jvp|fd"]
    assert command._limits(Interval("(0, 1]")) == "Above 0 and at most 1."
    assert command._limits(Interval("[1, inf)")) == ""


def test_values_are_numbers_or_words() -> None:
    number, either = command._parser(int | None), command._parser(float | Literal["auto"])
    assert number is not None
    assert either is not None
    assert (number("7"), either("auto"), command._parser(str)) == (7, "auto", None)
