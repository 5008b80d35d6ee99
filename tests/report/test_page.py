from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from boxcov import ExactGLM, Posterior, evaluate, join_frames
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.errors import BoxcovError
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.quality import auroc
from boxcov.evaluate.summary import table as metric_table
from boxcov.report import page as module
from boxcov.report.page import write
from boxcov.report.study import Method, Scene, Study, scenes_of
from boxcov.report.verdict import Headline, sentences
from boxcov.report.viewer import MAX_POINTS, box_values, deviations_and_correlations, pack
from helpers.studies import calibrated_records, random_records, random_study

HOSTILE = "</script><b>&\"'$x_1$"
LABELS = torch.zeros(0, dtype=torch.long)
VOID = {"meta", "input", "br"}


def page(study: Study) -> str:
    return module.page(study, replicates=3)


class Reader(HTMLParser):
    """Tags that do not match are an error; tables are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.names.add(tag)
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        self.references += [
            given[name] for name in ("src", "href", "data", "action") if name in given
        ]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] in ("td", "th", "small") and self.rows:
            self.rows[-1][-1] += ("|" if self.open[-1] == "small" else "") + text


def read(study: Study) -> Reader:
    reader = Reader()
    reader.feed(page(study))
    reader.close()
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    return reader


def test_the_page_needs_no_network() -> None:
    text = page(random_study())
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bfetch\(|XMLHttp|import\(", text)
    assert "default-src 'none'" in text


def test_links_lead_to_sections() -> None:
    reader = read(random_study())
    assert all(reference.startswith("#") for reference in reader.references)
    assert {reference[1:] for reference in reader.references} == {
        "viewer",
        "quality",
        "calibration",
        "curves",
        "runtime",
        "settings",
    }
    assert {reference[1:] for reference in reader.references} <= set(reader.ids)


def test_the_table_shows_the_summary() -> None:
    study = random_study(seed=5)
    found = metric_table({method.name: method.records for method in study.methods}, replicates=3)[0]
    row = next(row for row in read(study).rows if row and row[0] == "exact" and len(row) == 13)
    cell = found["P(U|I) l2"]
    assert row[1:3] == [str(found["boxes"]), str(found["paired"])]
    assert row[8] == f"{cell['value']:.2f}|{cell['low']:.2f} – {cell['high']:.2f}"


def test_names_are_escaped_everywhere() -> None:
    records = random_records(0, classes=(HOSTILE, "car"))
    scene = Scene(HOSTILE, np.zeros((1, 2)), records.boxes[:1], np.zeros(1, int))
    runtime = [{"method": HOSTILE, "device": HOSTILE, "ms": 3.0, "samples": HOSTILE}]
    study = Study(
        HOSTILE,
        {HOSTILE: [HOSTILE, {HOSTILE: 1}]},
        [Method(HOSTILE, records, HOSTILE)],
        {0: scene},
        runtime,
    )
    text = page(study)
    assert HOSTILE not in text
    assert "<b>&" not in text
    assert text.count("</script>") == 2
    assert pack(study)["methods"][0]["note"] == HOSTILE
    read(study)


def test_page_of_twenty_frames_is_light() -> None:
    """97 boxes per frame, as CenterPoint on nuScenes: three methods share boxes, two do not."""
    study = random_study(frames=21, each=97, points=30_000)
    many = [random_records(seed, frames=21, each=97) for seed in range(5)]
    own = [
        replace(many[0], covariance=records.covariance, uncertainty=records.uncertainty)
        for records in many[:3]
    ]
    methods = [Method(f"method {i}", records) for i, records in enumerate(own + many[3:])]
    assert len(page(replace(study, methods=methods)).encode()) < 3_000_000


def test_the_embedded_data_are_json() -> None:
    study = random_study(seed=8)
    text = page(study)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data == pack(study)


def test_points_are_thinned_and_far_ones_left_out() -> None:
    points = np.array([[1.0, 2.0], [np.nan, 0.0], [1e6, 0.0], [-327.0, 5.0]])
    records = random_records(0)
    scenes = {
        i: Scene("x", np.tile(points, (30_000, 1)), np.zeros((0, 9)), np.zeros(0, int))
        for i in range(10)
    }
    data = pack(Study("x", methods=[Method("m", records)], scenes=scenes))
    kept = np.frombuffer(
        base64.b64decode(data["blobs"][data["scenes"][0]["points"]]), "<i2"
    ).reshape(-1, 2)
    assert len(kept) == MAX_POINTS // 10
    assert {tuple(point) for point in kept.tolist()} == {(100, 200), (-32700, 500)}
    assert data["scenes"][0]["pointsTotal"] == 120_000


def test_invalid_covariances_are_shown() -> None:
    odd = np.array(
        [
            [[0.0, 0.0], [0.0, 1.0]],
            [[-1.0, 0.0], [0.0, 1.0]],
            [[np.nan, 1.0], [1.0, 1.0]],
            [[1.0, 2.0], [2.0, 1.0]],
        ]
    )
    deviations, correlations = deviations_and_correlations(odd)
    np.testing.assert_array_equal(deviations, [[0, 1], [np.nan, 1], [np.nan, 1], [1, 1]])
    np.testing.assert_array_equal(correlations, [[0], [0], [0], [1]])
    records = replace(
        random_records(0, frames=1, each=4, fields=("x1", "y1", "x2", "y2")),
        covariance=np.full((4, 4, 4), np.nan),
    )
    read(
        Study(
            "Odd",
            methods=[Method("odd", records)],
            scenes={0: Scene("s", np.zeros((0, 2)), records.boxes, records.labels)},
        )
    )


def test_infinite_uncertainty() -> None:
    records = random_records(0, covariance=False)
    records.uncertainty[3] = np.inf
    assert "quality" in read(Study("x", methods=[Method("m", records)])).ids


def test_verdict_comes_first_with_three_numbers() -> None:
    study = random_study(seed=4)
    records = study.methods[0].records
    text = page(study)
    first = text[: text.index('<section id="viewer"')]
    bad = records.iou < 0.4
    assert f"<b>{auroc(bad, records.risk):.3f}</b>" in first
    assert f"1 − score {auroc(bad, 1 - records.scores):.3f}" in first
    assert first.count("<b>") == 3
    assert "The risk ranks a bad box above a good one in" in first
    bare = Study("Bare", methods=study.methods[1:2])
    assert "These boxes are uncalibrated: boxcov calibrate adds" in page(bare)


@pytest.mark.parametrize(
    ("paired", "share", "words"),
    [
        (500, 0.9, "as promised"),
        (500, 0.7, "too narrow"),
        (500, 0.97, "wider than promised"),
        (0, float("nan"), "there are no errors to judge"),
        (1, 0.86, "1 box with an object cannot tell whether they hold"),
        (20, 0.9, "20 boxes with an object cannot tell"),
        (100, 0.86, "100 boxes with an object cannot tell"),
        (20, 0.5, "too narrow"),
    ],
)
def test_verdict_judges_the_regions(paired: int, share: float, words: str) -> None:
    numbers = Headline(900, paired, 0.2, 0.2, 0.9, 0.8, 0.01, {0.5: share, 0.9: share, 0.95: share})
    assert words in sentences(numbers)[1]


@pytest.mark.parametrize(("bad", "words"), [(0.0, "No box is bad"), (1.0, "All boxes are bad")])
def test_verdict_without_a_ranking(bad: float, words: str) -> None:
    numbers = Headline(100, 50, bad, 0.2, float("nan"), float("nan"), 0.01, {0.9: 0.9})
    assert sentences(numbers)[0] == f"{words}: there is no ranking to judge."


def test_first_screen_has_no_sum_of_units() -> None:
    records = random_records(3)
    name, unit, values = box_values(records)
    variances = np.diagonal(records.covariance, axis1=1, axis2=2)
    assert (name, unit) == ("σ of the position", "m")
    np.testing.assert_allclose(values, np.sqrt(variances[:, 0] + variances[:, 1]))
    image = random_records(3, fields=("x1", "y1", "x2", "y2"))
    assert box_values(image)[:2] == ("σ of the sides", "px")
    assert box_values(calibrated_records(3))[0] == "risk"
    assert "rad" not in pack(Study("x", methods=[Method("m", records)]))["units"]


def test_coverage_by_class_and_range() -> None:
    study = random_study(seed=6)
    records = study.methods[0].records
    tables = [row for row in read(study).rows if len(row) == 9]
    rows = {row[0]: row for row in reversed(tables)}  # of the first method
    cars = records[records.labels == 0]
    assert rows["car"][1:4] == [
        str(len(cars)),
        f"{100 * (cars.iou < 0.4).mean():.0f} %",
        f"{100 * cars.risk.mean():.0f} %",
    ]
    near = records[records.range < 15]
    errors, paired = near.as_axes().errors, near.paired
    inside = (np.abs(errors) <= near.regions[:, 1])[paired].mean()
    assert rows["0 to 15 m"][7] == f"{100 * inside:.0f} %"


def test_one_call_writes_the_report(tmp_path) -> None:
    frames = simulated.frames(count=2, sweeps=1)
    detector = centerpoint.load("small")
    model = ExactGLM(detector, Posterior.load("small", detector))
    found = join_frames([model(inputs) for inputs, _ in frames])
    study = evaluate.report(tmp_path / "report.html", found, frames)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [method.name for method in study.methods] == ["exact", "exact: risk"]
    assert "The risk ranks a bad box above a good one in" in text
    assert len(study.scenes) == 2
    assert len(study.scenes[1].truth) == int((frames[1][1][0]["points"] > 0).sum())
    sure = found[found.scores > 0.3]
    other = evaluate.report(tmp_path / "two.html", {"a": sure, "b": sure}, frames)
    assert [method.name for method in other.methods] == ["a", "a: risk", "b", "b: risk"]


def test_images_of_torchvision_are_shown() -> None:
    truth = GroundTruth.from_frames([(None, [{"boxes": torch.zeros(0, 4), "labels": LABELS}])] * 2)
    red = torch.zeros(3, 4, 6)
    red[0] = 1.0
    scenes = scenes_of({0: [red], 1: red.flip(0)[None] * 255}, truth, ("x1", "y1", "x2", "y2"))
    assert scenes[0].image.shape == scenes[1].image.shape == (4, 6, 3)
    assert scenes[0].image[0, 0].tolist() == scenes[1].image[0, 0].tolist() == [255, 0, 0]


def test_a_study_is_described_in_one_line() -> None:
    study = random_study()
    assert repr(study) == "Study('A study': exact, sampled, 1 - score, 3 scenes)"


def test_boxes_of_unknown_fields_have_tables_only() -> None:
    fields = ("a", "b", "c")
    study = Study(
        "Odd",
        methods=[Method("m", random_records(0, fields=fields))],
        scenes={0: Scene("s", np.zeros((1, 2)), np.zeros((0, 3)), np.zeros(0))},
    )
    assert "stage" not in read(study).ids
    assert "quality" in read(study).ids


def test_inconsistent_studies_are_refused(tmp_path) -> None:
    records = random_records(0)
    with pytest.raises(BoxcovError, match="'twice' occurs 2 times"):
        Study("x", methods=[Method("twice", records), Method("twice", records)])
    with pytest.raises(BoxcovError, match="'image' has other box fields or classes than 'lidar'"):
        Study(
            "x",
            methods=[
                Method("lidar", records),
                Method("image", random_records(0, fields=("x1", "y1", "x2", "y2"))),
            ],
        )
    with pytest.raises(BoxcovError, match="'odd': 48 of 48 uncertainties are negative or NaN"):
        Study("x", methods=[Method("odd", records.with_uncertainty(np.full(48, np.nan)))])
    with pytest.raises(BoxcovError, match="'minus': 1 of 48"):
        Study(
            "x", methods=[Method("minus", records.with_uncertainty(np.array([-0.1] + [0.0] * 47)))]
        )
    with pytest.raises(BoxcovError, match="no detections to report on: give at least one method"):
        Study.of({}, [([], [{"boxes": np.zeros((0, 9)), "labels": []}])])
    with pytest.raises(BoxcovError, match="item 0 has targets of 2 frames: give one frame"):
        Study.of({}, [([], 2 * [{"boxes": np.zeros((0, 9)), "labels": []}])])
    with pytest.raises(BoxcovError, match="cannot be written"):
        write(tmp_path / "no" / "such" / "report.html", Study("x"))
