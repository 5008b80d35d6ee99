"""The page of unusual studies in a real browser."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from boxcov.report.page import page as page_html
from boxcov.report.study import Method, Scene, Study
from boxcov.report.viewer import MAX_BOXES, pack
from helpers.browser import BINARY, DRIVER, MISSING, Browser
from helpers.studies import calibrated_records, random_records, random_study
from helpers.viewer_page import centre_of, choose, listed_boxes, shown

pytestmark = pytest.mark.skipif(not (BINARY and DRIVER), reason=MISSING)
HOSTILE = "</script><b id='evil'>&amp;\"'<!--\u2028\u202e"
SHOWN = HOSTILE[:-2] + r"\u2028\u202e"


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
        assert page.run("return document.title") == SHOWN
        assert page.run("return document.querySelectorAll('#evil, b#evil').length") == 0
        method = "return document.getElementById('method').selectedOptions[0].textContent"
        assert page.run(method) == SHOWN
        choose(page, "score-filter", 0)
        page.pointer(
            (
                "move",
                *centre_of(
                    page, int(np.flatnonzero(hostile_study().methods[0].records.labels[:6] == 0)[0])
                ),
            )
        )
        assert (
            page.run("return document.querySelector('#details h3').firstChild.textContent") == SHOWN
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
def test_studies_with_missing_parts(browser: Browser, tmp_path: Path, name: str) -> None:
    study = empty_studies()[name]
    with shown(browser, tmp_path, study) as page:
        assert page.text("h1") == study.title
        with_stage = page.run("return document.getElementById('stage') !== null")
        assert with_stage == (name in ("no box", "no covariance"))
        if with_stage:
            assert page.text("#count").startswith("0 of 0" if name == "no box" else "")


def image_study() -> Study:
    records = calibrated_records(2, frames=1, each=3, fields=("x1", "y1", "x2", "y2"))
    records.boxes[:] = [[10, 20, 50, 40], [100, 100, 160, 220], [5, 5, 9, 9]]
    image = np.zeros((240, 320, 3), np.uint8)
    image[:, :, 0] = 200  # red
    scene = Scene("cat.png", np.zeros((0, 2)), records.boxes, records.labels, image)
    return Study("Images", methods=[Method("exact", records)], scenes={0: scene})


def test_boxes_of_images(browser: Browser, tmp_path: Path) -> None:
    study = image_study()
    records = study.methods[0].records
    with shown(browser, tmp_path, study) as page:
        choose(page, "score-filter", 0)
        shape = page.run(
            "const a = document.querySelector('.box[data-box=\"1\"] .outline').getBBox(); "
            "return [a.x, a.y, a.width, a.height]"
        )
        assert shape == pytest.approx([100, 100, 60, 120])
        band = page.run(
            "const a = document.querySelector('.box[data-box=\"1\"] .region').getBBox(); "
            "return [a.x, a.y, a.x + a.width, a.y + a.height]"
        )
        outer = records.boxes[1] + [-1, -1, 1, 1] * records.regions[1, 1]
        assert band == pytest.approx(outer, rel=1e-4)
        assert page.text("#magnified") == ""
        assert page.text(".k-tone") == "boxes: risk from low to high"
        image = page.run(
            "const a = document.querySelector('#world image');"
            "return [a.href.baseVal.slice(0, 22), a.width.baseVal.value, a.height.baseVal.value]"
        )
        assert image == ["data:image/jpeg;base64", 320, 240]
        page.click(f"#list tr[data-box='{listed_boxes(page)[0]}']")
        assert page.text(".fields .unit") == "px"


def test_two_hundred_frames_do_not_stall(browser: Browser, tmp_path: Path) -> None:
    study = random_study(frames=201, each=100, points=1000)
    study = Study("Many", methods=study.methods[:1], scenes=study.scenes)
    path = tmp_path / "report.html"
    path.write_text(page_html(study, replicates=1), encoding="utf-8")
    assert path.stat().st_size < 20e6
    browser.open(path)
    assert browser.run("return document.getElementById('scene').options.length") == 200
    milliseconds = browser.run(
        "const began = performance.now(); "
        "for (let i = 0; i < 20; i++) document.getElementById('next').click();"
        "return (performance.now() - began) / 20"
    )
    assert milliseconds < 400  # a tenth of it on an idle machine
    assert browser.complaints() == []


@pytest.mark.parametrize("make", [random_records, calibrated_records])
def test_a_crowded_frame_shows_its_highest_scores(browser: Browser, tmp_path: Path, make) -> None:
    records = make(1, frames=1, each=10_000)
    scene = Scene("crowd", np.zeros((3, 2)), records.boxes[:2], records.labels[:2])
    study = Study("Crowd", methods=[Method("exact", records)], scenes={0: scene})
    with shown(browser, tmp_path, study) as page:
        choose(page, "score-filter", 0)
        said = f"{MAX_BOXES} of {MAX_BOXES} boxes, the highest scores of 10,000"
        assert page.text("#count") == said
    data = pack(study)
    packed = data["blobs"][data["methods"][0]["shown"]["0"]["scores"]]
    lowest = np.frombuffer(base64.b64decode(packed), "<f4").min()
    assert lowest == pytest.approx(np.sort(records.scores)[-MAX_BOXES], abs=1e-6)
