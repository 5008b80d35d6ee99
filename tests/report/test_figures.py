from __future__ import annotations

from pathlib import Path

import numpy as np

from boxcov.report.figures import write_figures
from boxcov.report.study import Method, Scene, Study
from helpers.studies import random_records, random_study


def size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_figures_are_written(tmp_path: Path) -> None:
    made = write_figures(tmp_path / "new" / "folder", random_study(frames=6))
    assert [path.name for path in made] == [
        "curves.png",
        "calibration.png",
        "runtime.png",
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
