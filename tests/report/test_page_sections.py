"""The sections of the report in a real browser: order, charts, tables, units, folded settings."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from boxcov.report.charts import risk_bins
from boxcov.report.page import page as page_html
from boxcov.report.study import Study
from helpers.browser import BINARY, DRIVER, MISSING, Browser
from helpers.studies import random_study
from helpers.viewer_page import STUDY

pytestmark = pytest.mark.skipif(not (BINARY and DRIVER), reason=MISSING)


def top_of(page: Browser, selector: str) -> float:
    script = "return document.querySelector(arguments[0]).getBoundingClientRect().top + scrollY"
    return page.run(script, selector)


def test_verdict_and_viewer_come_first_settings_last(page: Browser) -> None:
    order = ["#verdict", "#viewer", "#quality", "#calibration", "#curves", "#runtime", "#settings"]
    tops = [top_of(page, name) for name in order]
    assert tops == sorted(tops)
    assert top_of(page, "#stage") < 300  # pixels
    assert page.text("#verdict").count("ranks a bad box above a good one") == 1
    tiles = page.run("return document.querySelectorAll('#verdict .tiles b').length")
    assert tiles == 3
    assert not page.run("return document.querySelector('#settings details').open")
    assert not page.run("return document.querySelector('#settings .about').checkVisibility()")


def test_first_screen_shows_no_sum_of_units(page: Browser) -> None:
    text = page.text("#verdict") + page.text("#viewer")
    assert "m²" not in text
    assert "rad" not in text.replace("gradient", "")
    assert "trace" not in text


def marks(page: Browser, title: str) -> np.ndarray:
    """The markers of the first line of a chart, in shares of its axes."""
    found = page.run(
        "const svg = document.querySelector(`svg[aria-label='${arguments[0]}']`);"
        "const at = (e, name) => Number(e.getAttribute(name));"
        "return [...svg.querySelector('.series').querySelectorAll('.mark')]"
        ".map((e) => [at(e, 'cx'), at(e, 'cy')])",
        title,
    )
    x, y = np.array(found).T
    return np.stack([(x - 44) / 276, 1 - (y - 28) / 172])


def test_the_reliability_diagram_is_drawn(page: Browser) -> None:
    drawn = marks(page, "Risk: predicted and observed")
    expected = np.stack(risk_bins(STUDY.methods[0].records))
    np.testing.assert_allclose(drawn, expected, atol=0.001)


def test_coverage_is_drawn_and_listed_by_class_and_range(page: Browser) -> None:
    levels, shares = marks(page, "Errors inside the calibrated regions")
    records = STUDY.methods[0].records
    errors = np.abs(records.as_axes().errors)[records.paired]
    regions = records.regions[records.paired]
    np.testing.assert_allclose(levels, [0.5, 0.9, 0.95], atol=0.001)
    expected = [(errors <= regions[:, k]).mean() for k in range(3)]
    np.testing.assert_allclose(shares, expected, atol=0.001)
    rows = page.run(
        "return [...document.querySelectorAll('#calibration tbody tr')]"
        ".map((line) => [...line.cells].map((c) => c.textContent))"
    )
    first = {row[0]: row[1:] for row in reversed(rows)}
    cars = records[records.labels == 0]
    assert first["car"][0] == str(len(cars))
    inside = (np.abs(cars.as_axes().errors) <= cars.regions[:, 1])[cars.paired].mean()
    assert first["car"][6] == f"{100 * inside:.0f} %"
    assert any(name.endswith(" m") for name in first)  # ranges


def test_the_cost_has_a_row_per_method(page: Browser) -> None:
    rows = page.run(
        "return [...document.querySelectorAll('#runtime tbody tr')].map((r) =>"
        " [r.cells[0].textContent, r.cells[4].textContent])"
    )
    assert rows == [["plain", "10"], ["exact", "14"], ["sampled", "60"]]


def test_the_gate_chart_ends_at_all_boxes(page: Browser) -> None:
    assert "lowest risk first" in page.text("#quality .legend")
    paths = page.run(
        "return [...document.querySelector(\"svg[aria-label='Bad boxes behind a gate']\")"
        ".querySelectorAll('.series path')].map((p) => p.getAttribute('d').split('L').pop())"
    )
    ends = {tuple(float(v) for v in end.split(",")) for end in paths}
    assert len(ends) == 1  # all boxes kept: the same share, whatever the order
    y = 1 - (ends.pop()[1] - 28) / 172
    assert y == pytest.approx(STUDY.methods[0].records.bad.mean(), abs=0.001)


def test_two_hundred_frames_open_fast(browser: Browser, tmp_path: Path) -> None:
    study = random_study(frames=201, each=60, points=1000)
    study = Study("Many", methods=study.methods[:1], scenes=study.scenes)
    path = tmp_path / "report.html"
    path.write_text(page_html(study, replicates=1), encoding="utf-8")
    began = perf_counter()
    browser.open(path)
    assert perf_counter() - began < 10  # 1 s on an idle machine
    blocked = browser.run(
        "return performance.getEntriesByType('navigation')[0].domComplete"  # milliseconds
    )
    assert blocked < 8000
    assert browser.text("#count").endswith("of 60 boxes")
