"""Names and numbers of a hostile file of detections, in the report, in figures and in pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np
import pytest
import torch
from PIL import Image

from boxcov import Detections
from boxcov._files.plain_text import short_name
from boxcov.export import rerun
from boxcov.report import figures, frame_plot
from boxcov.report.canvas import draw_image
from boxcov.report.figures import write_figures
from boxcov.report.frame_plot import write_plot
from boxcov.report.page import MAX_GROUPS, page
from boxcov.report.study import Method, Study
from helpers.export_boxes import in_image, in_space, with_error_model

HOSTILE = "</script><img src=x onerror=alert(1)>$\\frac{1$\x1b[31m\u202e12 %\u2028\ud800\"'<!--"
LONG = "W" * 100_000


def study_of(found: Detections, title: str = "x") -> Study:
    count = int(found.frame.max()) + 1
    rows = [(found.frame == number).nonzero()[:3, 0] for number in range(count)]
    frames = [
        ([torch.zeros(9, 5)], [{"boxes": found.boxes[i] + 0.1, "labels": found.labels[i]}])
        for i in rows
    ]
    return Study.of(found, frames, title)


def named(name: str, found: Detections) -> Detections:
    """Return calibrated boxes of high score with hostile classes and settings."""
    found = with_error_model(replace(found, scores=torch.full_like(found.scores, 0.9)))
    settings = dict.fromkeys(("method", "detector", "posterior", "device"), name)
    classes = tuple(f"{name}{i}" for i in range(len(found.classes)))
    return replace(found, classes=classes, meta={**found.meta, **settings})


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from texts_in(entry)


def test_names_cannot_change_the_page() -> None:
    """No markup, and no character that turns the text after it, as a risk, the other way round."""
    study = replace(
        study_of(named(HOSTILE, in_space(20, frames=2)), title=HOSTILE),
        runtime=[{"method": HOSTILE, "device": HOSTILE, "ms": 2.0}],
    )
    html = page(study, replicates=2)
    html.encode()  # a file can hold it
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    texts = [*texts_in(json.loads(data)), html]
    for text in texts:
        harmful = [c for c in text.replace("\n", "") if category(c) in ("Cc", "Cf", "Cs", "Zl")]
        assert not harmful, text[:200]
    assert "<img" not in html
    assert any(r"\u202e12 %" in text for text in texts[:-1])  # the names are there


def test_long_names_do_not_fill_a_figure(tmp_path: Path) -> None:
    study = study_of(named(LONG, in_space(20, frames=1)))
    for path in write_figures(tmp_path, study):
        with Image.open(path) as picture:
            assert max(picture.size) < 5000, path
    found = named(LONG, in_image())
    write_plot(tmp_path / "x.png", found, np.zeros((64, 64, 3), np.uint8))
    draw_image(found, np.zeros((64, 64, 3), np.uint8))


def test_long_names_that_end_differently_stay_apart() -> None:
    first, second = (short_name(f"{LONG}: {end}") for end in ("regions", "Student-t"))
    assert first != second
    assert max(len(first), len(second)) <= 60


def test_labels_of_rerun_are_short_lines() -> None:
    for name in (HOSTILE, LONG):
        for label in rerun._look(named(name, in_image()))["labels"]:
            assert len(label) < 80
            assert label.isprintable()


def test_a_picture_shows_so_many_boxes_only(monkeypatch) -> None:
    monkeypatch.setattr(frame_plot, "MAX_BOXES", 30)
    found = in_space(1234)
    axes = found.plot()
    assert len(axes.lines) <= 3 * 30
    said = [text.get_text() for text in axes.texts]
    assert "the 30 boxes of the highest scores, of 1,234" in said
    assert f"{float(found.scores.max()):.2f}" in said
    study = study_of(replace(found, scores=found.scores.clamp(min=0.3)))
    (axes,) = figures._draw_scene(study, next(iter(study.scenes))).axes
    assert len(axes.lines) == 30
    assert "the 30 boxes of the highest scores, of 1,234" in [t.get_text() for t in axes.texts]


@pytest.mark.parametrize("value", [1e30, 1e38])
def test_huge_coordinates_are_drawn(tmp_path: Path, value: float) -> None:
    found = with_error_model(in_space(9))
    found = replace(found, boxes=torch.where(torch.arange(9)[:, None] % 2 == 0, value, found.boxes))
    write_plot(tmp_path / "x.png", found)
    assert "<h1>" in page(study_of(found), replicates=2)


def test_the_page_lists_the_classes_with_most_boxes() -> None:
    m, n = 3 * MAX_GROUPS, 2 * MAX_GROUPS
    labels = (torch.arange(m) * (torch.arange(m) < n)).long()  # 0 most often
    found = replace(
        in_space(m),
        labels=labels,
        classes=tuple(f"class {i}" for i in range(n)),
        scores=torch.full((m,), 0.9),
    )
    study = study_of(with_error_model(found))
    method = Method(study.methods[0].name, study.methods[0].records)
    html = page(replace(study, methods=[method]), replicates=2)
    assert '<th scope="row">class 0</th>' in html
    assert html.count('<th scope="row">class ') == MAX_GROUPS
