from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from boxcov import evaluate
from boxcov.errors import BoxcovError
from boxcov.report.charts import kept_bad, risk_bins
from boxcov.report.figures import write_figures
from boxcov.report.study import Method, Scene, Study
from helpers.studies import calibrated_records, random_records, random_study


def size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_figures_are_written(tmp_path: Path) -> None:
    made = write_figures(tmp_path / "new" / "folder", random_study(frames=6))
    assert [path.name for path in made] == [
        "curves.png",
        "calibration.png",
        "bev-0.png",
        "bev-1.png",
        "bev-2.png",
    ]
    assert all(min(size(path)) > 300 for path in made)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(
        path.name for path in made
    )


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    assert write_figures(tmp_path, Study("Nothing")) == []
    empty = Scene("empty", np.zeros((0, 2)), np.zeros((0, 9)), np.zeros(0, int))
    bare = Study(
        "Bare",
        methods=[Method("_hidden $x$", random_records(0, covariance=False)[:0])],
        scenes={7: empty},
    )
    assert [path.name for path in write_figures(tmp_path, bare)] == ["bev-7.png"]
    plain = Study(
        "Plain",
        methods=[Method("$\\frac{", random_records(0, covariance=False))],
        scenes={0: empty},
    )
    assert [path.name for path in write_figures(tmp_path, plain)] == ["curves.png", "bev-0.png"]
    images = Study(
        "Images",
        methods=[Method("m", random_records(0, fields=("x1", "y1", "x2", "y2")))],
        scenes={0: empty},
    )
    assert [path.name for path in write_figures(tmp_path, images)] == [
        "curves.png",
        "calibration.png",
    ]


def test_one_call_draws_the_chart_of_the_report() -> None:
    from matplotlib import pyplot as plt

    records = calibrated_records(3)
    axes = evaluate.plot_reliability(records)
    predicted, observed = risk_bins(records)
    drawn = {line.get_label(): line.get_data() for line in axes.lines}
    np.testing.assert_array_equal(drawn["boxes"], [predicted, observed])
    assert set(drawn) == {"ideal", "boxes"}
    _, (left, right) = plt.subplots(1, 2)
    assert evaluate.plot_coverage({"a": records, "b": calibrated_records(4)}, left) is left
    names = [text.get_text() for text in left.get_legend().get_texts()]
    assert names == ["ideal", "a: regions", "a: Student-t", "b: regions", "b: Student-t"]
    evaluate.plot_risk(records, right)
    x, y = right.lines[0].get_data()
    assert y[-1] == pytest.approx(records.bad.mean())
    assert x[-1] == 1
    plt.close("all")


def test_a_gate_keeps_the_lowest_risk_first() -> None:
    records = calibrated_records(3)
    kept, bad = kept_bad(records)
    for share, rate in zip(kept, bad):
        limit = np.sort(records.risk)[round(share * len(records)) - 1]
        assert rate == pytest.approx(records.bad[records.risk <= limit].mean())


def test_a_plot_without_a_risk_is_refused() -> None:
    with pytest.raises(BoxcovError, match="these records have no risk: predict with a calibrated"):
        evaluate.plot_reliability(random_records(0))
