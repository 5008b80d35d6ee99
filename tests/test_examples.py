"""The examples run in quick settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from boxcov import BoxcovError, Detections
from boxcov.data.poses import BOX_FIELDS

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def calibrated_car(half: torch.Tensor) -> Detections:
    """A parked car with these half widths (9,)."""
    box = torch.tensor([[6.0, 20, 0, 2, 4.5, 1.6, 1.4, 0, 0]])
    about = {"dof": [4.0] * 9, "levels": [0.99], "thresholds": [0.4, 0.5], "threshold": 0.4}
    one = torch.zeros(1, dtype=torch.long)
    return Detections(
        *(box, torch.ones(1), one, one, BOX_FIELDS, ("car",), torch.eye(9)[None]),
        no_object=torch.zeros(1),
        iou_below=torch.zeros(1, 2),
        scale=torch.ones(1, 9),
        region_widths=half[None, None],
        meta={"error_model": {**about, "estimator": "exact", "frames": 1}},
    )


def test_tracking_draws_the_tracks(tmp_path: Path) -> None:
    pytest.importorskip("stonesoup", reason="stonesoup is not installed")
    printed = run("tracking.py", "--seconds", "1", "--out", str(tmp_path / "tracks.png"))
    assert "tracks" in printed.splitlines()[1]
    assert (tmp_path / "tracks.png").stat().st_size > 10_000


def test_margin_counts_collisions() -> None:
    printed = run("margin.py", "--passes", "5").splitlines()
    assert int(printed[0].split()[0]) >= 5
    assert [line.split("  ")[0] for line in printed[1:]] == [
        *("region(0.99)", "0.5 m", "1 m", "2 m", "constant, as few collisions"),
    ]


def test_margins_cover_boxes_of_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import margin

    generator = torch.Generator().manual_seed(0)
    half = torch.tensor([0.3, 9, 9, 0.2, 0.4, 9, 0.1, 9, 9])
    found = calibrated_car(half)
    box = found.boxes
    planned = margin.edge(box) - margin.region_margin(found)
    others = box + half * (2 * torch.rand(2000, 9, generator=generator) - 1)
    assert bool((margin.edge(others) >= planned - 1e-5).all())
    assert float(margin.edge(others).min() - planned) < 0.1  # and no wider than needed


def test_margins_of_frames_without_vehicles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty frame, one box only, and a detector that does not know buses."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import margin

    one = calibrated_car(0.5 * torch.ones(9))
    target = {"boxes": one.boxes.clone(), "labels": one.labels}
    none = margin.sight(one[:0], target)
    assert [len(column) for column in none] == [0, 0, 0]
    with pytest.raises(BoxcovError, match="no parked vehicle was reported"):
        margin.outcomes([none])
    found = margin.outcomes([none, margin.sight(one, target)])
    assert [row["collisions"] for row in found.values()] == [0.0] * 5
    unlabelled = {"boxes": torch.zeros(0, 9), "labels": torch.zeros(0).long()}
    assert len(margin.sight(one, unlabelled)[0]) == 0
