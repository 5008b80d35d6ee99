"""The page in a real browser: filters, list, details, regions, keys and links."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.browser import BINARY, DRIVER, MISSING, Browser
from helpers.studies import FIELDS
from helpers.viewer_page import STUDY, centre_of, choose, listed_boxes, shown_boxes, still

pytestmark = pytest.mark.skipif(not (BINARY and DRIVER), reason=MISSING)
LEFT, RIGHT, DOWN, ESCAPE, ENTER = "\ue012", "\ue014", "\ue015", "\ue00c", "\ue007"
FIRST = STUDY.methods[0].records[:16]  # of frame 0


def view(page: Browser) -> list[float]:
    """Return scale and offset of the drawing."""
    text = page.run("return document.getElementById('world').getAttribute('transform')")
    return [float(value) for value in text.removeprefix("matrix(").removesuffix(")").split(" ")]


def pinned(page: Browser) -> list[int]:
    return page.run(
        "return [...document.querySelectorAll('.box.pinned')].map((b) => Number(b.dataset.box))"
    )


def details(page: Browser) -> dict[str, list[str]]:
    """Return the cells of the details by field."""
    lines = page.run(
        "return [...document.querySelectorAll('.fields tr')].map((line) => [...line.cells]"
        ".map((c) => c.textContent))"
    )
    return {line[0]: line[1:] for line in lines}


def test_filters_by_score_class_and_risk(page: Browser) -> None:
    assert shown_boxes(page) == list(range(16))
    choose(page, "score-filter", 50)
    expected = FIRST.scores.astype("<f4") >= 0.5
    assert shown_boxes(page) == np.flatnonzero(expected).tolist()
    choose(page, "value-filter", 40)
    expected &= FIRST.risk.astype("<f4") >= 0.4
    assert shown_boxes(page) == np.flatnonzero(expected).tolist()
    choose(page, "class-filter", 1)
    expected &= FIRST.labels == 1
    assert shown_boxes(page) == np.flatnonzero(expected).tolist()
    assert page.text("#count") == f"{int(expected.sum())} of 16 boxes"
    assert sorted(listed_boxes(page)) == shown_boxes(page)


def test_filter_of_an_uncalibrated_method_takes_the_top(page: Browser) -> None:
    choose(page, "method", 1)
    choose(page, "value-filter", 75)  # the top quarter
    variances = np.diagonal(STUDY.methods[1].records.covariance[:16], axis1=1, axis2=2)
    order = np.argsort(-variances[:, :2].sum(1), kind="stable")
    assert listed_boxes(page) == order[:4].tolist()
    assert page.text("#list .value-name") == "σ of the position"
    assert page.text("#list .value").endswith(" m")


def test_the_list_is_sorted_and_flies_to_a_box(page: Browser) -> None:
    order = np.argsort(-FIRST.risk.astype("<f4"), kind="stable").tolist()
    assert listed_boxes(page) == order
    before = view(page)
    page.click(f"#list tr[data-box='{order[2]}']")
    assert pinned(page) == [order[2]]
    assert view(page)[0] > 1.5 * before[0]
    centre = centre_of(page, order[2])
    stage = page.run(
        "const a = document.getElementById('stage').getBoundingClientRect();"
        "return [a.left + a.width / 2, a.top + a.height / 2]"
    )
    assert centre == pytest.approx(stage, abs=2)
    page.click("#zoom-all")
    assert view(page) == pytest.approx(before)
    assert pinned(page) == []


def test_details_show_fields_in_their_units(page: Browser) -> None:
    box = int(np.flatnonzero(FIRST.paired)[0])
    page.click(f"#list tr[data-box='{box}']")
    cells = details(page)
    assert cells.pop("field") == ["value", "σ", "90 % ±", "error", "unit"]
    errors = FIRST.as_axes().errors[box]
    deviations = np.sqrt(np.diagonal(FIRST.predictive[box]))
    for a, name in enumerate(FIELDS):
        factor = np.degrees(1) if name == "yaw" else 1
        *numbers, unit = cells["yaw (axis)" if name == "yaw" else name]
        expected = [FIRST.boxes[box, a], deviations[a], FIRST.regions[box, 1, a], errors[a]]
        assert [float(text) for text in numbers] == pytest.approx(
            [factor * value for value in expected], rel=0.006, abs=1e-3
        )
        assert unit == {"yaw": "°", "vx": "m/s", "vy": "m/s"}.get(name, "m")
    outside = page.run("return document.querySelectorAll('.fields .outside').length")
    assert outside == int((np.abs(errors) > FIRST.regions[box, 1]).sum())
    facts = page.text("#details dl")
    assert f"{100 * FIRST.risk[box]:.0f} %" in facts.replace("\n", " ")


def test_hover_shows_the_covariance(page: Browser) -> None:
    box = 7
    page.pointer(("move", *centre_of(page, box)))
    page.run("document.querySelector('#details details').open = true")
    table = page.run(
        "return [...document.querySelectorAll('.correlations tr')].map((line) => [...line.cells]"
        ".map((c) => c.textContent))"
    )
    matrix = FIRST.covariance[box]
    deviations = np.sqrt(np.diagonal(matrix))
    assert table[-1][1:] == list(FIELDS)
    for a, line in enumerate(table[:-1]):
        name, sigma, unit = line[0].split(" ")
        assert name == FIELDS[a]
        factor = np.degrees(1) if unit == "°" else 1
        assert float(sigma) == pytest.approx(factor * deviations[a], rel=0.06)
        shown = [float(cell.replace("−", "-")) for cell in line[1:]]
        expected = matrix[a, : a + 1] / deviations[a] / deviations[: a + 1]
        assert shown == pytest.approx(expected, abs=0.0051)


def test_regions_are_drawn_at_a_visible_size(page: Browser) -> None:
    factor, widths = page.run(
        "const all = [...document.querySelectorAll('rect.region')];"
        "const at = (e, name) => Number(e.getAttribute(name));"
        "return [Number(/scale\\((.*?)\\)/.exec(all[0].getAttribute('transform'))[1]),"
        "all.map((e) => [at(e, 'width') / 2, at(e, 'height') / 2])]"
    )
    np.testing.assert_allclose(widths, FIRST.regions[:, 1, :2], rtol=1e-6)
    assert factor * view(page)[0] * np.median(np.max(widths, 1)) >= 9  # pixels
    note = page.text("#magnified")
    assert note == (f", drawn {factor:g} × larger" if factor > 1 else "")
    page.click(f"#list tr[data-box='{listed_boxes(page)[0]}']")
    page.run("for (let i = 0; i < 6; i++) document.getElementById('zoom-in').click()")
    assert page.text("#magnified") == ""  # from near they have their own size


def test_the_ellipse_shows_the_position_covariance(page: Browser) -> None:
    choose(page, "method", 1)
    covariance = STUDY.methods[1].records.covariance[:16, :2, :2]
    axes = page.run(
        "return [...document.querySelectorAll('ellipse.region')].map((e) =>"
        "[Number(e.getAttribute('rx')), Number(e.getAttribute('ry')), Number(e.dataset.turn)])"
    )
    for matrix, (long, short, angle) in zip(covariance, axes):
        turn = np.deg2rad(angle)
        R = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        shape = R @ np.diag([long**2, short**2]) @ R.T / (-2 * np.log(0.1))  # chi-square, 90 %
        np.testing.assert_allclose(shape, matrix, rtol=1e-3, atol=1e-4 * np.trace(matrix))


def test_frames_step_by_button_and_key_and_list(page: Browser) -> None:
    def values() -> list[str]:
        return page.run(
            "return [...document.querySelectorAll('#labels text')].map((t) => t.textContent)"
        )

    def risks(frame: int) -> list[float]:
        records = STUDY.methods[0].records
        return (100 * records.risk[records.frame == frame]).tolist()

    def shown() -> list[float]:
        return [float(text.removesuffix(" %")) for text in values()]

    assert shown() == pytest.approx(risks(0), abs=0.51)
    page.click("#next")
    assert shown() == pytest.approx(risks(1), abs=0.51)
    page.run("document.activeElement.blur()")
    page.keys(RIGHT)
    assert shown() == pytest.approx(risks(2), abs=0.51)
    page.keys(LEFT, LEFT, LEFT)  # no further than the first
    assert shown() == pytest.approx(risks(0), abs=0.51)
    choose(page, "scene", 3)
    assert page.run("return document.getElementById('next').disabled")
    truths = page.run("return document.querySelectorAll('.truth').length")
    assert truths == len(STUDY.scenes[3].truth)


def test_keys_walk_through_the_boxes(page: Browser) -> None:
    order = listed_boxes(page)
    before = view(page)
    page.keys("j", "j", "k", "j")
    assert pinned(page) == [order[1]]
    page.keys(ESCAPE)
    assert pinned(page) == []
    assert view(page) == pytest.approx(before)
    page.keys(DOWN)  # scrolls the page: the viewer has no focus
    assert pinned(page) == []
    page.run(f"document.querySelector('.box[data-box=\"{order[3]}\"]').focus()")
    page.keys(ENTER)
    assert pinned(page) == [order[3]]
    page.keys(DOWN)
    assert pinned(page) == [order[4]]


def test_the_address_names_frame_and_box(page: Browser) -> None:
    page.click("#next")
    box = listed_boxes(page)[1]
    page.click(f"#list tr[data-box='{box}']")
    assert page.run("return location.hash") == f"#frame=1&box={box}"
    text = page.text("#details")
    page.run("location.hash = '#frame=0'")
    page.run("location.hash = arguments[0]", f"#frame=1&box={box}")
    page.run("return new Promise((done) => setTimeout(done, 50))")
    assert page.text("#details") == text
    assert pinned(page) == [box]
    choose(page, "score-filter", 95)
    assert pinned(page) == []
    page.run("location.hash = arguments[0]", f"#frame=2&box={box}")  # named, so shown
    page.run("return new Promise((done) => setTimeout(done, 50))")
    assert pinned(page) == [box]
    page.run("location.hash = '#quality'")  # a section, not a frame
    page.run("return new Promise((done) => setTimeout(done, 50))")
    assert pinned(page) == [box]


def test_zoom_and_pan(page: Browser) -> None:
    middle = page.run(
        "stage.scrollIntoView({block: 'center'}); "
        "const a = document.getElementById('stage').getBoundingClientRect();"
        "return [a.left + a.width / 2, a.top + a.height / 2]"
    )
    start = view(page)
    page.wheel(*middle, down=-300)
    near = view(page)
    assert near[0] > 1.3 * start[0]
    corner = (middle[0] - 200, middle[1] + 200)
    page.pointer(("move", *corner), "down", ("move", corner[0] + 50, corner[1] - 20), "up")
    moved = view(page)
    assert [moved[4] - near[4], moved[5] - near[5]] == pytest.approx([50, -20], abs=1.5)
    page.click("#zoom-all")
    assert view(page) == pytest.approx(start)
    page.click("#zoom-out")
    assert view(page)[0] < start[0]


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
    x, y = centre_of(page, 2)
    page.pointer(("move", x, y), "down", ("move", x + 30, y + 30), "up")  # a drag is not a click
    assert pinned(page) == [2]
    page.pointer(("move", *centre_of(page, 2)), "down", "up")
    assert pinned(page) == []


def test_dark_and_paper(page: Browser) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    still(page, prefers_color_scheme="dark")
    try:
        assert page.run(colour) != light
        page.run("window.dispatchEvent(new Event('beforeprint'))")
        assert page.run(colour) == light  # paper is white
        assert page.run(
            "return [...document.querySelectorAll('details')].every((part) => part.open)"
        )
        page.run("window.dispatchEvent(new Event('afterprint'))")
        assert page.run("return document.querySelectorAll('details:not([open])').length") == 1
        assert page.paper().startswith(b"%PDF")
    finally:
        page.command("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows_and_the_viewer_is_in_sight(page: Browser, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.command("Emulation.setDeviceMetricsOverride", **size)
    try:
        page.run("for (const part of document.querySelectorAll('details')) part.open = true")
        assert page.run("return document.documentElement.scrollWidth") <= width
        top, bottom = page.run(
            "const a = document.getElementById('stage').getBoundingClientRect();"
            "return [a.top, a.bottom]"
        )
        assert 0 < top < 450
        assert bottom <= (900 if width > 500 else 1000)
        assert page.run("return document.getElementById('verdict').innerText") != ""
    finally:
        page.command("Emulation.clearDeviceMetricsOverride")
