"""The monitor: false-alarm rates by simulation, changes, reasons, files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Detections, Monitor, join_frames
from boxcov.monitor import _bet, frame_numbers

FIELDS = ("x", "y")


def line(rng: np.random.Generator, boxes: float = 20.0, score: float = 0.7) -> dict:
    """A frame as boxcov stream writes it, with a random number of boxes."""
    m = int(rng.poisson(boxes))
    scores = (score + 0.1 * rng.standard_normal(m)).clip(0.1, 0.99)
    spread = np.exp(rng.standard_normal((m, 2)))
    return {
        "fields": list(FIELDS),
        "boxes": rng.standard_normal((m, 2)).tolist(),
        "scores": scores.tolist(),
        "no_object": (1 - scores).tolist(),
        "covariance": (spread[:, :, None] * np.eye(2)).tolist(),
        "predictive": (2 * spread[:, :, None] * np.eye(2)).tolist(),
    }


def usual(rng: np.random.Generator, count: int = 60) -> list[dict]:
    return [line(rng) for _ in range(count)]


def found(boxes: int) -> Detections:
    zeros = torch.zeros(boxes, dtype=torch.long)
    return Detections(torch.ones(boxes, 2), torch.full((boxes,), 0.5), zeros, zeros, FIELDS, ("a",))


@pytest.mark.parametrize("rate", [0.1, 0.25])
def test_false_alarms_keep_the_rate(rate: float) -> None:
    """Over usual sets and frames together, also with tied frames; 600 draws have an error 0.018."""
    rng = np.random.default_rng(0)
    pool = usual(rng, 400)
    alarms = []
    for _ in range(600):
        rows = [pool[i] for i in rng.choice(len(pool), 20, replace=False)]
        alarms.append(Monitor(rows[1:], rate)(rows[0]).alarm)
    assert rate - 0.09 < np.mean(alarms) < rate + 0.04


def test_ties_never_raise_the_alarm_rate() -> None:
    same = [found(3)] * 20
    verdict = Monitor(same)(found(3))
    assert verdict.p_value == 1.0
    assert not verdict.alarm


def test_false_changes_keep_the_run_length() -> None:
    rng = np.random.default_rng(1)
    pool = usual(rng, 500)
    lengths = []
    for _ in range(50):
        rows = [pool[i] for i in rng.permutation(len(pool))]
        monitor = Monitor(rows[:30], run_length=15)
        verdicts = (monitor(row).change for row in rows[30:150])
        lengths.append(next((t for t, change in enumerate(verdicts, 1) if change), 120))
    # cut at 120 frames, so the true mean is larger
    assert np.mean(lengths) > 15


def test_a_lasting_change_is_found_within_frames() -> None:
    rng = np.random.default_rng(2)
    monitor = Monitor(usual(rng, 100), run_length=1000)
    assert not any(monitor(line(rng)).change for _ in range(20))
    changed = [monitor(line(rng, boxes=4.0)) for _ in range(8)]
    assert any(verdict.change for verdict in changed)
    first = next(verdict for verdict in changed if verdict.change)
    assert first.evidence >= 1000
    assert first.reasons[0].startswith(("fewer boxes than usual: ", "fewer objects than usual: "))


def test_a_small_change_is_found_in_the_long_run() -> None:
    """No single frame is unusual: the mean of the certainty is lower by 1.3 deviations."""
    rng = np.random.default_rng(8)
    monitor = Monitor(usual(rng, 200), run_length=1000)
    verdicts = [monitor(line(rng, score=0.67)) for _ in range(100)]
    first = next(i for i, verdict in enumerate(verdicts) if verdict.change)
    assert np.mean([verdict.alarm for verdict in verdicts[:first]]) < 0.4
    assert verdicts[first].reasons[0].startswith("objects less certain than usual")


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ({"boxes": 80.0}, "more boxes than usual"),
        ({"score": 0.2}, "objects less certain than usual"),
    ],
)
def test_reasons_say_what_is_unusual(frame: dict, reason: str) -> None:
    rng = np.random.default_rng(3)
    verdict = Monitor(usual(rng))(line(rng, **frame))
    assert verdict.alarm
    assert any(words.startswith(reason) for words in verdict.reasons)


def test_reasons_do_not_depend_on_the_order_of_the_numbers() -> None:
    rng = np.random.default_rng(7)
    columns = {name: rng.normal(size=60) for name in ("certainty", "boxes", "width", "objects")}
    verdict = Monitor(columns).judge({**dict.fromkeys(columns, 0.0), "certainty": -9.0})
    assert verdict.reasons[0].startswith("objects less certain than usual: -9.00")


def test_larger_variances_are_unlike_usual_boxes() -> None:
    rng = np.random.default_rng(4)
    monitor = Monitor(usual(rng))
    odd = line(rng)
    odd["covariance"] = (50 * np.array(odd["covariance"])).tolist()
    verdict = monitor(odd)
    assert verdict.alarm
    assert verdict.reasons[0] == "boxes unlike the usual boxes"


def test_the_order_of_usual_frames_is_irrelevant() -> None:
    rng = np.random.default_rng(5)
    rows, new = usual(rng), line(rng, boxes=12.0)
    one, two = Monitor(rows)(new), Monitor(rows[::-1])(new)
    assert one.p_value == two.p_value
    assert one.evidence == pytest.approx(two.evidence)


def test_a_frame_without_boxes_has_a_verdict() -> None:
    rng = np.random.default_rng(6)
    verdict = Monitor(usual(rng))(line(rng, boxes=0.0))
    assert verdict.alarm
    assert verdict.reasons[0].startswith("fewer boxes than usual: 0,")
    assert not Monitor([found(0)] * 20)(found(0)).alarm


def test_one_box_in_every_frame() -> None:
    monitor = Monitor([found(1)] * 20)
    assert not monitor(found(1)).alarm
    verdict = monitor(found(2))
    assert verdict.alarm
    assert verdict.reasons[0] == "more boxes than usual: 2, usually 1 to 1"
    assert np.isfinite(verdict.evidence)


def test_fields_without_labels_do_not_count() -> None:
    """Where calibration frames showed no velocities, their variances are NaN in every frame."""
    rng = np.random.default_rng(9)
    rows = usual(rng)
    for row in rows:
        row["predictive"] = np.array(row["predictive"]).reshape(-1, 2, 2)
        row["predictive"][:, 1] = row["predictive"][:, :, 1] = np.nan
    first, *rest = rows
    assert Monitor(rest)(first).p_value > 0.05
    first["scores"] = [float("nan")] * len(first["scores"])
    with pytest.raises(BoxcovError, match="scores are not finite"):
        Monitor(rest)(first)


def test_detections_and_their_line_give_equal_numbers() -> None:
    torch.manual_seed(0)
    zeros = torch.zeros(4, dtype=torch.long)
    one = Detections(
        *(torch.rand(4, 2), torch.rand(4), zeros, zeros, FIELDS, ("a",)),
        covariance=torch.diag_embed(torch.rand(4, 2)),
    )
    arrays = one.numpy()
    written = {name: arrays[name].tolist() for name in ("boxes", "scores", "covariance")}
    assert frame_numbers(json.loads(json.dumps({"fields": FIELDS, **written}))) == pytest.approx(
        frame_numbers(one)
    )


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    rows = [found(n) for n in range(1, 30)]
    with pytest.raises(BoxcovError, match=r"18 usual frames are too few .*: give at least 19"):
        Monitor(rows[:18])
    whole = join_frames(rows)
    with pytest.raises(
        BoxcovError, match=r"usual holds .* each frame: give detections\.frames\(\)"
    ):
        Monitor(whole)  # type: ignore[arg-type]
    with pytest.raises(BoxcovError, match="the monitor: boxes of several frames, expected one"):
        Monitor(rows)(whole)
    with pytest.raises(BoxcovError, match="false_alarm_rate must lie between 0 and 1, got 2"):
        Monitor(rows, 2)
    with pytest.raises(BoxcovError, match="run_length must be above 1 frame, got 0"):
        Monitor(rows, run_length=0)
    with pytest.raises(BoxcovError, match=r"differ in covariance x, .* same method and posterior"):
        Monitor(rows)(line(np.random.default_rng(0)))
    with pytest.raises(BoxcovError, match="usual frames differ in what they hold"):
        Monitor([*rows, line(np.random.default_rng(0))])
    with pytest.raises(BoxcovError, match=r"this frame could not be read: 3\.bin: no such file"):
        Monitor(rows)({"frame": "3.bin", "error": "3.bin: no such file"})
    (tmp_path / "m.json").write_text('{"boxcov": 2}')
    with pytest.raises(BoxcovError, match=r"m\.json: not a file of a boxcov monitor"):
        Monitor.load(tmp_path / "m.json")


def test_a_file_gives_the_same_verdict(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    rows = [*usual(rng), line(rng, boxes=0.0)]  # a frame without boxes has no means
    monitor, new = Monitor(rows, 0.1, 50), line(rng, boxes=14.0)
    monitor.save(tmp_path / "m.json")
    again = Monitor.load(tmp_path / "m.json")
    assert repr(again) == repr(monitor)
    assert again(new) == monitor(new)


def test_bets_are_fair_and_large_for_small_p_values() -> None:
    assert _bet(1.0) == 0.5
    assert round(_bet(0.01), 2) == 4.45
    p = (np.arange(200_000) + 0.5) / 200_000
    assert abs(np.mean([_bet(one) for one in p]) - 1) < 0.1
