"""boxcov rank with FiftyOne itself; skipped where it or its database is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boxcov import join_frames
from helpers.command_line import boxcov, succeed
from helpers.export_boxes import in_space, with_error_model

NAME = "boxcov-test"


@pytest.fixture
def fiftyone() -> Iterator[Any]:
    fo = pytest.importorskip("fiftyone", reason="fiftyone is not installed")
    try:
        fo.list_datasets()
    except Exception as error:
        pytest.skip(f"FiftyOne has no database: {error}")
    yield fo
    if fo.dataset_exists(NAME):
        fo.delete_dataset(NAME)


def test_a_dataset_holds_frames_boxes_and_risks(fiftyone: Any, tmp_path: Path) -> None:
    """A frame without boxes is a sample, too."""
    found = with_error_model(in_space(frames=1))
    path = tmp_path / "boxes.safetensors"
    join_frames([found, found[:1], found[:0]]).save(path)
    words = f"rank --predictions {path} --fiftyone {NAME}"
    succeed(f"{words} --out {tmp_path / 'a.csv'}")
    again = boxcov(f"{words} --out {tmp_path / 'b.csv'}")
    assert f"the FiftyOne dataset {NAME} exists" in again.err
    succeed(f"{words} --out {tmp_path / 'b.csv'} --force")
    dataset = fiftyone.load_dataset(NAME)
    assert dataset.persistent
    samples = list(dataset.sort_by("boxcov_value", reverse=True))
    assert [sample.boxcov_rank for sample in samples] == [1, 2, 3]
    assert [len(sample.boxcov.detections) for sample in samples] == [len(found), 1, 0]
    risks = [box.risk for box in samples[0].boxcov.detections]
    assert risks == pytest.approx(found.risk.tolist())
    bad = dataset.filter_labels("boxcov", fiftyone.ViewField("risk") > 2)
    assert bad.count("boxcov.detections") == 0
