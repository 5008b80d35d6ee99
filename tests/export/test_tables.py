from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from boxcov import BoxcovError
from boxcov.export import tables
from helpers.export_boxes import in_image, in_space, with_error_model


def test_the_table_contains_every_number_once(tmp_path: Path) -> None:
    found = in_space(frames=2)
    found = replace(found, score_variance=found.scores.double(), score_covariance=found.boxes)
    tables.write_csv(tmp_path / "boxes.csv", found)
    with (tmp_path / "boxes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found)
    for i, row in enumerate(rows):
        assert (row["frame"], row["class"]) == (str(i % 2), found.classes[i % 3])
        for a, first in enumerate(found.fields):
            assert float(row[first]) == pytest.approx(float(found.boxes[i, a]), rel=1e-8)
            assert float(row[f"var_{first}"]) == pytest.approx(
                float(found.covariance[i, a, a]), rel=1e-8
            )
            assert float(row[f"score_cov_{first}"]) == pytest.approx(
                float(found.boxes[i, a]), rel=1e-8
            )
            for b in range(a + 1, 9):
                assert float(row[f"cov_{first}_{found.fields[b]}"]) == pytest.approx(
                    float(found.covariance[i, a, b]), rel=1e-8
                )
                assert float(row[f"predictive_cov_{first}_{found.fields[b]}"]) == pytest.approx(
                    2 * float(found.covariance[i, a, b]), rel=1e-8
                )
        assert float(row["uncertainty"]) == pytest.approx(float(found.uncertainty[i]), rel=1e-8)
    assert len(rows[0]) == 4 + 9 + 1 + 45 + 45 + 1 + 9


def test_boxes_without_covariance_and_no_boxes(tmp_path: Path) -> None:
    found = replace(in_image(), covariance=None, predictive=None)
    assert list(tables.columns(found)) == [
        "frame",
        "label",
        "class",
        "score",
        "x1",
        "y1",
        "x2",
        "y2",
    ]
    tables.write_csv(tmp_path / "none.csv", in_image()[:0])
    assert len((tmp_path / "none.csv").read_text().splitlines()) == 1
    with pytest.raises(BoxcovError, match="the box field score has the name of a column"):
        tables.columns(replace(found, fields=("x1", "y1", "x2", "score")))


def test_calibrated_boxes_have_risk_scales_and_half_widths(tmp_path: Path) -> None:
    found = with_error_model(in_space(frames=2))
    tables.write_csv(tmp_path / "boxes.csv", found)
    with (tmp_path / "boxes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for i, row in enumerate(rows):
        for name in ("risk", "no_object", "misplaced", "flipped"):
            assert float(row[name]) == pytest.approx(float(getattr(found, name)[i]), rel=1e-8)
        for a, name in enumerate(found.fields):
            assert float(row[f"scale_{name}"]) == pytest.approx(float(found.scale[i, a]), rel=1e-8)
            assert float(row[f"half_width_90_{name}"]) == pytest.approx(
                float(found.region_widths[i, 3, a]), rel=1e-8
            )
    assert len(rows[0]) == 4 + 9 + 4 + 9 + 9 + 1 + 45 + 45
    image = list(tables.columns(with_error_model(in_image())))
    assert image[8:12] == ["risk", "no_object", "misplaced", "scale_x1"]


def test_pandas() -> None:
    pytest.importorskip("pandas")
    found = in_space(frames=2)
    table = found.to_pandas()
    assert table.shape == (5, len(tables.columns(found)))
    assert table.groupby("class").size().to_dict() == {"car": 2, "pedestrian": 2, "traffic_cone": 1}
    np.testing.assert_array_equal(table["cov_x_yaw"], found.covariance[:, 0, 6])
    assert table.attrs["boxcov"]["method"] == "exact"
    assert len(tables.to_pandas(found[:0])) == 0


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    found = in_space(frames=2)
    tables.write_parquet(tmp_path / "boxes.parquet", found)
    table = parquet.read_table(tmp_path / "boxes.parquet")
    for name, values in tables.columns(found).items():
        assert table[name].to_pylist() == list(values)
    about = json.loads(table.schema.metadata[b"boxcov"])
    assert about["fields"] == list(found.fields)
    assert about["meta"]["method"] == "exact"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("pandas", "pyarrow", "rerun"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BoxcovError, match="pandas is not installed: pip install pandas"):
        tables.to_pandas(in_space())
    with pytest.raises(BoxcovError, match="pyarrow is not installed: pip install pyarrow"):
        tables.write_parquet(tmp_path / "x.parquet", in_space())
    from boxcov.export.rerun import write_rrd

    with pytest.raises(BoxcovError, match="rerun is not installed: pip install rerun-sdk"):
        write_rrd(tmp_path / "x.rrd", in_space())
    assert list(tmp_path.iterdir()) == []
