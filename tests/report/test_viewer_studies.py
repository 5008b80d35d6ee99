"""The page of unusual studies in a real browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from boxcov.report.study import Method, Scene, Study
from helpers.browser import BINARY, DRIVER, MISSING, Browser
from helpers.studies import random_records
from helpers.viewer_page import centre_of, choose, counts, expected, shown, threshold

pytestmark = pytest.mark.skipif(not (BINARY and DRIVER), reason=MISSING)
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
def test_studies_with_missing_parts(browser: Browser, tmp_path: Path, name: str) -> None:
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
            "const a = document.querySelector('.box[data-row=\"1\"] .outline').getBBox(); "
            "return [a.x, a.y, a.width, a.height]"
        )
        assert shape == pytest.approx([100, 100, 60, 120])
        J = np.array([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]])
        rx, ry = page.run(
            "const e = document.querySelectorAll('.sigma1')[1]; "
            "return [e.getAttribute('rx'), e.getAttribute('ry')]"
        )
        assert [float(ry) ** 2, float(rx) ** 2] == pytest.approx(
            np.linalg.eigvalsh(J @ records.covariance[1] @ J.T), rel=1e-2
        )
