"""The page in a real browser: it counts what Python counts."""

from __future__ import annotations

import numpy as np
import pytest

from boxcov.evaluate.quality import clipped_mean, partitions
from helpers.browser import BINARY, DRIVER, MISSING, Browser
from helpers.studies import FIELDS
from helpers.viewer_page import STUDY, centre_of, choose, counts, expected, threshold

pytestmark = pytest.mark.skipif(not (BINARY and DRIVER), reason=MISSING)
LEFT, RIGHT = "\ue012", "\ue014"  # arrow keys in the WebDriver protocol


@pytest.mark.parametrize("number", range(3))
def test_starts_at_the_papers_threshold(page: Browser, number: int) -> None:
    choose(page, "method", number)
    records = STUDY.methods[number].records
    for error in ("IoU", "l2"):
        choose(page, "error", error)
        assert (
            counts(page, "all") == partitions(records.iou, records.l2, records.uncertainty)[error]
        )
    assert threshold(page) == pytest.approx(clipped_mean(records.uncertainty), rel=1e-5)


@pytest.mark.parametrize("error", ["IoU", "l2"])
@pytest.mark.parametrize("number", range(3))
def test_the_slider_counts_like_python(page: Browser, number: int, error: str) -> None:
    choose(page, "method", number)
    choose(page, "error", error)
    records = STUDY.methods[number].records
    seen = set()
    for place in (0, 37, 250, 500, 801, 1000):
        choose(page, "slider", place)
        now = threshold(page)
        assert now == pytest.approx(np.quantile(records.uncertainty, place / 1000), rel=1e-5)
        assert counts(page, "all") == expected(records, error, now)
        assert counts(page, "shown") == expected(records, error, now, frame=0)
        seen.add(counts(page, "all"))
    assert len(seen) == 6


def test_slider_by_hand_and_typed_thresholds(page: Browser) -> None:
    records = STUDY.methods[0].records
    before = counts(page, "all")
    page.run("document.getElementById('slider').focus()")
    page.keys(*[LEFT] * 150)
    assert counts(page, "all") != before
    assert counts(page, "all") == expected(records, "IoU", threshold(page))
    one = float(
        records.uncertainty[5]
    )  # the box at the threshold itself is uncertain, as are its ties
    for typed in (repr(one), "0", "1e9"):
        choose(page, "threshold", typed)
        assert counts(page, "all") == expected(records, "IoU", float(typed))
    page.click("#mean")
    assert counts(page, "all") == before


def test_rates_follow_from_the_counts(page: Browser) -> None:
    records = STUDY.methods[0].records
    rates = partitions(records.iou, records.l2, records.uncertainty)["IoU"].metrics()
    shown = {
        name: page.text(f"#all-{key}")
        for name, key in (("AvU", "AvU"), ("P(A|C)", "PAC"), ("P(U|I)", "PUI"))
    }
    assert shown == {name: f"{rates[name]:.3f}" for name in shown}
    choose(page, "threshold", "0")
    assert page.text("#all-PAC") == "–"  # nothing is certain


def test_boxes_above_the_threshold_look_different(page: Browser) -> None:
    records = STUDY.methods[0].records
    choose(page, "slider", 400)
    dashed = page.run(
        "return [...document.querySelectorAll('.box.uncertain')]"
        ".map((box) => Number(box.dataset.row))"
    )
    here = np.flatnonzero((records.frame == 0) & (records.uncertainty >= threshold(page)))
    assert sorted(dashed) == here.tolist()
    assert 0 < len(dashed) < 16
    style = "return getComputedStyle(document.querySelector(arguments[0])).strokeDasharray"
    assert page.run(style, ".box.uncertain .outline") != page.run(
        style, ".box:not(.uncertain) .outline"
    )


def test_frames_step_by_button_and_key_and_list(page: Browser) -> None:
    def rows() -> list[int]:
        return page.run(
            "return [...document.querySelectorAll('.box')].map((box) => Number(box.dataset.row))"
        )

    assert rows() == list(range(16))
    page.click("#next")
    assert rows() == list(range(16, 32))
    page.run("document.activeElement.blur()")
    page.keys(RIGHT)
    assert rows() == list(range(32, 48))
    page.keys(LEFT, LEFT, LEFT)  # no further than the first
    assert rows() == list(range(16))
    choose(page, "scene", 3)
    assert rows() == list(range(48, 64))
    assert page.run("return document.getElementById('next').disabled")
    assert counts(page, "shown") == expected(
        STUDY.methods[0].records, "IoU", clipped_mean(STUDY.methods[0].records.uncertainty), frame=3
    )
    assert page.run("return document.querySelectorAll('.truth').length") == len(
        STUDY.scenes[3].truth
    )


def test_method_selector(page: Browser) -> None:
    assert page.text("#method-note") == "no sampling"
    assert page.run("return document.querySelectorAll('.sigma').length") == 2 * 16
    choose(page, "method", 2)
    assert page.text("#method-note") == "baseline"
    assert (
        page.run("return document.querySelectorAll('.sigma').length") == 0
    )  # it has no covariance
    numbers = page.run(
        "return [...document.querySelectorAll('#labels text')]"
        ".map((text) => Number(text.textContent))"
    )
    assert numbers == pytest.approx(STUDY.methods[2].records.uncertainty[:16], rel=0.06)


def test_hover_shows_the_covariance(page: Browser) -> None:
    records = STUDY.methods[0].records
    row = 7
    page.pointer(("move", *centre_of(page, row)))
    fields = page.run(
        "return [...document.querySelectorAll('.fields tbody tr')].map((line) => [...line.cells]"
        ".map((c) => c.textContent))"
    )
    deviations = np.sqrt(np.diagonal(records.covariance[row]))
    assert [line[0] for line in fields] == list(FIELDS)
    assert [float(line[1]) for line in fields] == pytest.approx(records.boxes[row], rel=0.006)
    assert [float(line[3]) for line in fields] == pytest.approx(deviations, rel=0.006)
    table = page.run(
        "return [...document.querySelectorAll('.correlations tr')].map((line) => [...line.cells]"
        ".map((c) => c.textContent))"
    )
    assert table[-1][1:] == list(FIELDS)
    for a, line in enumerate(table[:-1]):
        assert line[0] == FIELDS[a]
        shown = [float(cell.replace("−", "-")) for cell in line[1:]]
        assert shown == pytest.approx(
            records.covariance[row, a, : a + 1] / deviations[a] / deviations[: a + 1], abs=0.0051
        )
    title = page.run("return document.querySelector('.correlations tr:nth-child(3) td').title")
    assert title.startswith("cov(x, z) = ")
    assert float(title.split("= ")[1].replace("−", "-")) == pytest.approx(
        records.covariance[row, 0, 2], rel=0.006, abs=1e-4
    )
    assert records.classes[records.labels[row]] in page.text("#details h3")


def test_the_ellipse_shows_the_position_covariance(page: Browser) -> None:
    covariance = STUDY.methods[0].records.covariance[:16, :2, :2]
    axes = page.run(
        "return [...document.querySelectorAll('.sigma1')].map((e) =>"
        "[Number(e.getAttribute('rx')), Number(e.getAttribute('ry')), "
        "Number(/rotate\\((.*)\\)/.exec(e.getAttribute('transform'))[1])])"
    )
    for matrix, (long, short, angle) in zip(covariance, axes):
        turn = np.deg2rad(angle)
        R = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        np.testing.assert_allclose(
            R @ np.diag([long**2, short**2]) @ R.T, matrix, rtol=1e-3, atol=1e-4 * np.trace(matrix)
        )


def test_zoom_and_pan(page: Browser) -> None:
    def place() -> list[float]:
        text = page.run("return document.getElementById('world').getAttribute('transform')")
        return [float(value) for value in text.removeprefix("matrix(").removesuffix(")").split(" ")]

    middle = page.run(
        "stage.scrollIntoView({block: 'center'}); "
        "const a = document.getElementById('stage').getBoundingClientRect();"
        "return [a.left + a.width / 2, a.top + a.height / 2]"
    )
    start = place()
    page.wheel(*middle, down=-300)
    near = place()
    assert near[0] > 1.3 * start[0]
    corner = (middle[0] - 200, middle[1] + 200)
    page.pointer(("move", *corner), "down", ("move", corner[0] + 50, corner[1] - 20), "up")
    moved = place()
    assert [moved[4] - near[4], moved[5] - near[5]] == pytest.approx([50, -20], abs=1.5)
    page.click("#zoom-all")
    assert place() == pytest.approx(start)
    page.click("#zoom-out")
    assert place()[0] < start[0]


def test_points_are_drawn_and_can_be_hidden(page: Browser) -> None:
    ink = (
        "const c = document.getElementById('points'); "
        "const copy = new OffscreenCanvas(c.width, c.height).getContext('2d');"
        "copy.drawImage(c, 0, 0); const d = copy.getImageData(0, 0, c.width, c.height).data;"
        "let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n"
    )
    with_points = page.run(ink)
    page.click("#show-points")
    assert 0 < page.run(ink) < with_points  # the range rings stay
    page.click("#show-truth")
    assert page.run("return getComputedStyle(document.querySelector('.truth')).display") == "none"


def test_click_pins_a_box(page: Browser) -> None:
    page.pointer(("move", *centre_of(page, 2)), "down", "up")
    title = page.text("#details")
    page.pointer(("move", *centre_of(page, 9)))
    assert page.text("#details") == title
    choose(page, "slider", 0)  # all uncertain: the details of the pinned box follow
    assert page.text("#details .kind")[1] == "U"
    x, y = centre_of(page, 2)
    page.pointer(("move", x, y), "down", ("move", x + 30, y + 30), "up")  # a drag is not a click
    assert page.run("return document.querySelectorAll('.pinned.box').length") == 1
    page.pointer(("move", *centre_of(page, 2)), "down", "up")
    assert page.run("return document.querySelectorAll('.pinned.box').length") == 0


def test_dark_and_paper(page: Browser) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    page.command(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    try:
        assert page.run(colour) != light
        page.run("window.dispatchEvent(new Event('beforeprint'))")
        assert page.run(colour) == light  # paper is white
        assert page.run(
            "return [...document.querySelectorAll('details')].every((part) => part.open)"
        )
        page.run("window.dispatchEvent(new Event('afterprint'))")
        assert page.run("return document.querySelectorAll('details:not([open])').length") == 2
        assert page.paper().startswith(b"%PDF")
    finally:
        page.command("Emulation.setEmulatedMedia", features=[])
