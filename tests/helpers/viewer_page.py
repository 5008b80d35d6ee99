"""The report's page in a browser: the study it shows, and readers of its content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def shown_boxes(page: Browser) -> list[int]:
    """Return the boxes of the frame that pass the filters, as drawn."""
    return sorted(
        page.run(
            "return [...document.querySelectorAll('.box:not(.hidden)')]"
            ".map((box) => Number(box.dataset.box))"
        )
    )


def listed_boxes(page: Browser) -> list[int]:
    """Return the boxes of the list, from the top."""
    return page.run(
        "return [...document.querySelectorAll('#list tbody tr')].map((r) => Number(r.dataset.box))"
    )


def still(browser: Browser, **features: str) -> None:
    """Fly to boxes at once; further features, such as the colour scheme, by name."""
    wanted = {"prefers-reduced-motion": "reduce", **features}
    media = [{"name": name.replace("_", "-"), "value": value} for name, value in wanted.items()]
    browser.command("Emulation.setEmulatedMedia", features=media)


def choose(page: Browser, control: str, value: str | int) -> None:
    page.run(
        "const [id, value] = arguments; const control = document.getElementById(id); "
        "control.value = value;"
        "control.dispatchEvent(new Event('input')); control.dispatchEvent(new Event('change'));",
        control,
        value,
    )


def centre_of(page: Browser, box: int) -> tuple[float, float]:
    where = page.run(
        "const box = document.querySelector(`.box[data-box='${arguments[0]}'] .outline`); "
        "box.scrollIntoView({block: 'center'});"
        "box.parentNode.parentNode.append(box.parentNode);"  # on top of its neighbours
        "const area = box.getBoundingClientRect(); "
        "return [area.left + area.width / 2, area.top + area.height / 2]",
        box,
    )
    return where[0], where[1]
