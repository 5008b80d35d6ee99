"""Tables of the page, and the numbers of its viewer."""

from __future__ import annotations

import numpy as np

from boxcov.report.study import thin_points
from boxcov.report.tables import format_rate, html_table
from boxcov.report.viewer import Blobs


def test_cells_are_escaped() -> None:
    cell = "<td>&lt;b&gt;<small>0 to 1</small></td>"
    assert cell in html_table([], [["", ("<b>", "0 to 1")]])


def test_rates_have_two_decimals_unless_they_are_large() -> None:
    assert [format_rate(v) for v in (0.615, -3.14159, 12345.6)] == ["0.61", "-3.14", "12,346"]


def test_equal_arrays_are_stored_once() -> None:
    blobs = Blobs()
    arrays = (np.zeros(3), np.ones(3), np.zeros(3))
    assert [blobs.add(array, "<f4") for array in arrays] == [0, 1, 0]


def test_points_are_thinned_evenly() -> None:
    points = np.arange(20.0).reshape(10, 2)
    assert thin_points(points, 3)[:, 0].tolist() == [0.0, 8.0, 18.0]
