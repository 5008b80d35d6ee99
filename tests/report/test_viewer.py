"""The page in a real browser: what it counts is what Python counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from boxcov.evaluate.quality import accurate_iou, accurate_l2, clipped_mean, partition, partitions
from boxcov.evaluate.records import Records
from boxcov.report.page import write
from boxcov.report.study import Method, Scene, Study
from helpers.browser import BINARY, DRIVER, MISSING, Browser
from helpers.studies import FIELDS, random_records, random_study

pytestmark = pytest.mark.skipif(not (BINARY and DRIVER), reason=MISSING)
LEFT, RIGHT = "\ue012", "\ue014"  # arrow keys, as the protocol writes them
STUDY = random_study(seed=3, frames=5, each=16)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    window = Browser(tmp_path_factory.mktemp("profile"))
    yield window
    window.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "report.html"
    write(path, STUDY, replicates=2)
    return path


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Browser]:
    """The study's page, opened anew; a word of complaint on the console at any time is a failure."""
    browser.open(file)
    yield browser
    assert browser.complaints() == []


@contextmanager
def shown(browser: Browser, folder: Path, study: Study) -> Iterator[Browser]:
    """The page of another study."""
    write(folder / "report.html", study, replicates=2)
    browser.open(folder / "report.html")
    yield browser
    assert browser.complaints() == []


def counts(page: Browser, where: str) -> tuple[int, ...]:
    """AC, IC, AU, IU as the page shows them."""
    return tuple(int(page.text(f"#{where}-{kind}")) for kind in ("AC", "IC", "AU", "IU"))


def expected(
    records: Records, error: str, threshold: float, frame: int | None = None
) -> tuple[int, ...]:
    uncertain = ~(records.uncertainty < threshold)
    rows = np.ones(len(records), bool) if frame is None else records.frame == frame
    if error == "IoU":
        return partition(accurate_iou(records.iou)[rows], uncertain[rows])
    accurate = np.zeros(len(records), bool)
    accurate[records.paired] = accurate_l2(records.l2[records.paired])
    rows &= records.paired
    return partition(accurate[rows], uncertain[rows])


def choose(page: Browser, control: str, value: str | int) -> None:
    page.run(
        "const [id, value] = arguments; const control = document.getElementById(id); control.value = value;"
        "control.dispatchEvent(new Event('input')); control.dispatchEvent(new Event('change'));",
        control,
        value,
    )


def threshold(page: Browser) -> float:
    return float(page.run("return document.getElementById('threshold').value"))


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
def test_slider_counts_as_python_does(page: Browser, number: int, error: str) -> None:
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


def test_rates_are_those_of_the_counts(page: Browser) -> None:
    records = STUDY.methods[0].records
    told = partitions(records.iou, records.l2, records.uncertainty)["IoU"].metrics()
    shown = {
        name: page.text(f"#all-{key}")
        for name, key in (("AvU", "AvU"), ("P(A|C)", "PAC"), ("P(U|I)", "PUI"))
    }
    assert shown == {name: f"{told[name]:.3f}" for name in shown}
    choose(page, "threshold", "0")
    assert page.text("#all-PAC") == "–"  # nothing is certain


def test_boxes_above_the_threshold_look_different(page: Browser) -> None:
    records = STUDY.methods[0].records
    choose(page, "slider", 400)
    dashed = page.run(
        "return [...document.querySelectorAll('.box.uncertain')].map((box) => Number(box.dataset.row))"
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
        "return [...document.querySelectorAll('#labels text')].map((text) => Number(text.textContent))"
    )
    assert numbers == pytest.approx(STUDY.methods[2].records.uncertainty[:16], rel=0.06)


def centre_of(page: Browser, row: int) -> tuple[float, float]:
    where = page.run(
        "const box = document.querySelector(`.box[data-row='${arguments[0]}'] .outline`); box.scrollIntoView({block: 'center'});"
        "box.parentNode.parentNode.append(box.parentNode);"  # on top of its neighbours
        "const area = box.getBoundingClientRect(); return [area.left + area.width / 2, area.top + area.height / 2]",
        row,
    )
    return where[0], where[1]


def test_hover_shows_the_covariance(page: Browser) -> None:
    records = STUDY.methods[0].records
    row = 7
    page.pointer(("move", *centre_of(page, row)))
    fields = page.run(
        "return [...document.querySelectorAll('.fields tbody tr')].map((line) => [...line.cells].map((c) => c.textContent))"
    )
    deviations = np.sqrt(np.diagonal(records.covariance[row]))
    assert [line[0] for line in fields] == list(FIELDS)
    assert [float(line[1]) for line in fields] == pytest.approx(records.boxes[row], rel=0.006)
    assert [float(line[3]) for line in fields] == pytest.approx(deviations, rel=0.006)
    table = page.run(
        "return [...document.querySelectorAll('.correlations tr')].map((line) => [...line.cells].map((c) => c.textContent))"
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


def test_ellipse_is_the_positions(page: Browser) -> None:
    covariance = STUDY.methods[0].records.covariance[:16, :2, :2]
    axes = page.run(
        "return [...document.querySelectorAll('.sigma1')].map((e) =>"
        "[Number(e.getAttribute('rx')), Number(e.getAttribute('ry')), Number(/rotate\\((.*)\\)/.exec(e.getAttribute('transform'))[1])])"
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
        "stage.scrollIntoView({block: 'center'}); const a = document.getElementById('stage').getBoundingClientRect();"
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
        "const c = document.getElementById('points'); const copy = new OffscreenCanvas(c.width, c.height).getContext('2d');"
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
    choose(page, "slider", 0)  # all uncertain: the pinned box is told anew
    assert page.text("#details .kind")[1] == "U"
    x, y = centre_of(page, 2)
    page.pointer(("move", x, y), "down", ("move", x + 30, y + 30), "up")  # a drag is no click
    assert page.run("return document.querySelectorAll('.pinned.box').length") == 1
    page.pointer(("move", *centre_of(page, 2)), "down", "up")
    assert page.run("return document.querySelectorAll('.pinned.box').length") == 0


HOSTILE = "</script><b id='evil'>&amp;\"'<!--\u2028"


def hostile_study() -> Study:
    records = random_records(1, frames=2, each=6, classes=(HOSTILE, "car"))
    scene = Scene(HOSTILE, np.zeros((3, 2)), records.boxes[:2], np.array([0, 7]))
    return Study(
        HOSTILE,
        {HOSTILE: {HOSTILE: HOSTILE}},
        [Method(HOSTILE, records, HOSTILE)],
        {0: scene},
        [{"method": HOSTILE, "device": HOSTILE, "ms": 1.0}],
    )


def test_hostile_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    with shown(browser, tmp_path, hostile_study()) as page:
        assert page.run("return document.title") == HOSTILE
        assert page.run("return document.querySelectorAll('#evil, b#evil').length") == 0
        assert (
            page.run("return document.getElementById('method').selectedOptions[0].textContent")
            == HOSTILE
        )
        page.pointer(
            (
                "move",
                *centre_of(
                    page, int(np.flatnonzero(hostile_study().methods[0].records.labels == 0)[0])
                ),
            )
        )
        assert (
            page.run("return document.querySelector('#details h3').firstChild.textContent")
            == HOSTILE
        )
        assert page.run("return document.querySelectorAll('script').length") == 2


def empty_studies() -> dict[str, Study]:
    nothing = random_records(0)[:0]
    scene = Scene("empty", np.zeros((0, 2)), np.zeros((0, 9)), np.zeros(0, int))
    plain = random_records(0, covariance=False)
    return {
        "nothing": Study("Nothing"),
        "no box": Study("No box", methods=[Method("none", nothing)], scenes={0: scene}),
        "no covariance": Study("Plain", methods=[Method("plain", plain)], scenes={0: scene}),
        "no scene": Study("Blind", methods=[Method("exact", random_records(0))]),
        "scenes only": Study("Scenes", scenes={0: scene}),
    }


@pytest.mark.parametrize("name", empty_studies())
def test_studies_without_something(browser: Browser, tmp_path: Path, name: str) -> None:
    study = empty_studies()[name]
    with shown(browser, tmp_path, study) as page:
        assert page.text("h1") == study.title
        if name == "no scene":
            choose(page, "slider", 300)
            assert counts(page, "all") == expected(study.methods[0].records, "IoU", threshold(page))
        if name == "no box":
            assert counts(page, "all") == (0, 0, 0, 0)


def test_boxes_of_images(browser: Browser, tmp_path: Path) -> None:
    fields = ("x1", "y1", "x2", "y2")
    records = random_records(2, frames=1, each=3, fields=fields)
    records.boxes[:] = [[10, 20, 50, 40], [100, 100, 160, 220], [5, 5, 9, 9]]
    study = Study(
        "Images",
        methods=[Method("exact", records)],
        scenes={0: Scene("cat.png", np.zeros((0, 2)), records.boxes, records.labels)},
    )
    with shown(browser, tmp_path, study) as page:
        shape = page.run(
            "const a = document.querySelector('.box[data-row=\"1\"] .outline').getBBox(); return [a.x, a.y, a.width, a.height]"
        )
        assert shape == pytest.approx([100, 100, 60, 120])
        J = np.array([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]])
        rx, ry = page.run(
            "const e = document.querySelectorAll('.sigma1')[1]; return [e.getAttribute('rx'), e.getAttribute('ry')]"
        )
        assert [float(ry) ** 2, float(rx) ** 2] == pytest.approx(
            np.linalg.eigvalsh(J @ records.covariance[1] @ J.T), rel=1e-2
        )


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
