"""The report's page in a browser: the study it shows, and readers of its content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from boxcov.evaluate.quality import accurate_iou, accurate_l2, partition
from boxcov.evaluate.records import Records
from boxcov.report.page import write
from boxcov.report.study import Study
from helpers.browser import Browser
from helpers.studies import random_study

STUDY = random_study(seed=3, frames=5, each=16)


@contextmanager
def shown(browser: Browser, folder: Path, study: Study) -> Iterator[Browser]:
    """Open the page of another study."""
    write(folder / "report.html", study, replicates=2)
    browser.open(folder / "report.html")
    yield browser
    assert browser.complaints() == []


def counts(page: Browser, where: str) -> tuple[int, ...]:
    """Return AC, IC, AU and IU as the page shows them."""
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
        "const [id, value] = arguments; const control = document.getElementById(id); "
        "control.value = value;"
        "control.dispatchEvent(new Event('input')); control.dispatchEvent(new Event('change'));",
        control,
        value,
    )


def threshold(page: Browser) -> float:
    return float(page.run("return document.getElementById('threshold').value"))


def centre_of(page: Browser, row: int) -> tuple[float, float]:
    where = page.run(
        "const box = document.querySelector(`.box[data-row='${arguments[0]}'] .outline`); "
        "box.scrollIntoView({block: 'center'});"
        "box.parentNode.parentNode.append(box.parentNode);"  # on top of its neighbours
        "const area = box.getBoundingClientRect(); "
        "return [area.left + area.width / 2, area.top + area.height / 2]",
        row,
    )
    return where[0], where[1]
