"""The frames that a posterior was fitted on, as its meta data name them."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest

from boxcov.pipeline.calibrate import _warn_of_fit_frames
from boxcov.pipeline.options import DataOptions

FITTED = {"data": "coco:photos@416", "split": "val2017[:40]", "seed": "0", "fraction": "0.5"}


@pytest.mark.parametrize(
    ("meta", "split", "warns"),
    [
        (FITTED, "val2017", True),
        (FITTED, "val2017[39:]", True),  # a share of 40 frames was drawn
        (FITTED, "val2017[40:]", False),
        (FITTED, "train2017", False),
        ({"data": "coco:photos@416"}, "train2017", True),  # the default split of a fit
        ({"data": "coco:others@416"}, "train2017", False),
        ({}, "train2017", False),  # fitted in Python
        ({**FITTED, "fraction": "0"}, "val2017", False),
        ({**FITTED, "split": "val2017[x"}, "val2017", False),
        ({**FITTED, "data": 7}, "val2017", False),
    ],
)
def test_frames_of_the_fit_are_known_by_its_meta_data(
    meta: dict[str, object], split: str, warns: bool
) -> None:
    fitted = mock.Mock(meta=meta, frames=20, fisher="empirical")
    source = DataOptions("coco:photos@416", split)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _warn_of_fit_frames(fitted, source, 50)
        _warn_of_fit_frames(mock.Mock(meta=meta, frames=20, fisher="identity"), source, 50)
    assert len(found) == warns
    if warns:
        assert "[:100]' to fit and " in str(found[0].message)
