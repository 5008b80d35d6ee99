"""boxcov monitor through the command line, on generated lines and files."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from boxcov import Detections, Monitor
from helpers.command_line import boxcov, refuse, succeed

FIELDS = ("x", "y")


def text(counts: list[int]) -> str:
    """Lines of boxcov stream with these numbers of boxes."""
    rows = [
        {"frame": f"{i}.bin", "fields": FIELDS, "boxes": [[0.0, 0.0]] * n, "scores": [0.5] * n}
        for i, n in enumerate(counts)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def usual(tmp_path: Path) -> Path:
    (tmp_path / "usual.jsonl").write_text(text([20 + i % 9 for i in range(40)]))
    return tmp_path / "usual.jsonl"


def test_lines_have_verdicts_and_reasons(usual: Path, tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text(text([24, 2]))
    done = succeed(f"monitor {tmp_path / 'new.jsonl'} --usual {usual}")
    first, second = done.lines
    assert (first["frame"], first["alarm"], first["reasons"]) == ("0.bin", False, [])
    assert second["alarm"]
    assert second["reasons"][0] == "fewer boxes than usual: 2, usually 20 to 28"
    assert "2 frames, 1 alarm, 0 changes, 0 unreadable" in done.err


def test_stdin_and_a_saved_monitor_give_the_same(usual: Path, tmp_path: Path) -> None:
    new = text([24, 2, 60])
    outs = []
    for words in (
        f"--usual {usual} --save {tmp_path / 'm.json'}",
        f"--usual {tmp_path / 'm.json'}",
    ):
        with mock.patch.object(sys, "stdin", io.StringIO(new)):
            outs.append(boxcov(f"monitor - {words}").out)
    assert outs[0] == outs[1]
    assert len(outs[0].splitlines()) == 3


@pytest.mark.parametrize("form", ["json", "prometheus"])
def test_ctrl_c_prints_the_totals_until_then(usual: Path, form: str) -> None:
    class Stopped(io.StringIO):
        def readline(self, size: int = -1) -> str:
            if line := super().readline(size):
                return line
            raise KeyboardInterrupt

    with mock.patch.object(sys, "stdin", Stopped(text([24, 2]))):
        done = boxcov(f"monitor - --usual {usual} --format {form}")
    assert done.code == 130
    assert "2 frames, 1 alarm, 0 changes, 0 unreadable" in done.err
    assert ("boxcov_monitor_alarms_total 1" in done.out) == (form == "prometheus")


def test_stdin_that_is_not_text_is_one_line(usual: Path) -> None:
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8")):
        assert "stdin: not JSON lines of boxcov stream" in refuse(f"monitor - --usual {usual}")


def test_a_file_of_boxes_counts_empty_frames(usual: Path, tmp_path: Path) -> None:
    zeros = torch.zeros(24, dtype=torch.long)
    found = Detections(
        *(torch.zeros(24, 2), torch.full((24,), 0.5), zeros, zeros, FIELDS, ("car",)),
        meta={"frames": 2},
    )
    found.save(tmp_path / "boxes.safetensors")
    done = boxcov(f"monitor {tmp_path / 'boxes.safetensors'} --usual {usual}")
    assert [one["alarm"] for one in done.lines] == [False, True]


def test_boxes_of_another_posterior_are_refused(tmp_path: Path) -> None:
    rows = torch.zeros(20, dtype=torch.long)
    for name, posterior in (("usual", "1a"), ("same", "1a"), ("other", "2b")):
        meta = {"method": "exact", "samples": None, "posterior_sha256": posterior}
        boxes = (torch.zeros(20, 2), torch.ones(20) / 2, rows, torch.arange(20), FIELDS, ("car",))
        Detections(*boxes, meta=meta).save(tmp_path / f"{name}.safetensors")
    usual = f"--usual {tmp_path / 'usual.safetensors'}"
    succeed(f"monitor {tmp_path / 'same.safetensors'} {usual}")
    done = boxcov(f"monitor {tmp_path / 'other.safetensors'} {usual}")
    assert (done.code, done.out) == (1, "")
    assert "posterior_sha256 is 2b, that of the usual frames in" in done.err
    assert "is 1a: predict both with the same detector, posterior and method" in done.err


def test_an_unreadable_frame_is_an_alarm(usual: Path, tmp_path: Path) -> None:
    error = json.dumps({"frame": "9.bin", "error": "no such file"})
    (tmp_path / "new.jsonl").write_text(f"{error}\n{text([24])}")
    done = boxcov(f"monitor {tmp_path / 'new.jsonl'} --usual {usual}")
    first, second = done.lines
    assert first == {"frame": "9.bin", "alarm": True, "reasons": ["no boxes: no such file"]}
    assert not second["alarm"]


def test_usual_frames_that_cannot_be_read_are_named(usual: Path, tmp_path: Path) -> None:
    line = json.dumps({"frame": "a.bin", "error": "a.bin: not points"}) + "\n"
    (tmp_path / "bad.jsonl").write_text(2 * line)
    error = refuse(f"monitor {usual} --usual {tmp_path / 'bad.jsonl'}")
    assert "none of the 2 frames could be read, the first one because of a.bin: not p" in error


def test_fields_without_labels_are_null(tmp_path: Path) -> None:
    line = {"fields": ["x", "vx"], "boxes": [[0.0, 0.0]], "scores": [0.5], "no_object": [0.5]}
    line |= {"frame": "a", "std": [[0.1, 0.2]], "predictive_std": [[0.3, None]]}
    (tmp_path / "usual.jsonl").write_text((json.dumps(line) + "\n") * 20)
    done = succeed(f"monitor {tmp_path / 'usual.jsonl'} --usual {tmp_path / 'usual.jsonl'}")
    assert not any(one["alarm"] for one in done.lines)


def test_prometheus_text_holds_the_totals(usual: Path, tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text(text([24, 2]))
    words = f"monitor {tmp_path / 'new.jsonl'} --usual {usual} --format prometheus"
    done = boxcov(words)
    assert "# TYPE boxcov_monitor_alarms_total counter\nboxcov_monitor_alarms_total 1" in done.out
    assert "# TYPE boxcov_monitor_p_value gauge" in done.out
    assert boxcov(f"{words} --out {tmp_path / 'boxcov.prom'}").out == ""
    assert (tmp_path / "boxcov.prom").read_text() == done.out
    (tmp_path / "new.jsonl").write_text("")
    succeed(f"{words} --out {tmp_path / 'boxcov.prom'}")
    assert "boxcov_monitor_alarms_total 0\n" in (tmp_path / "boxcov.prom").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", "new.jsonl, line 1: not a line of boxcov stream"),
        ('{"frame": "a", "boxes": []}\n', "line 1: not a line of boxcov stream"),
        ('{"frame": "a", "fields": ["x"], "boxes": [[0]], "scores": [NaN]}\n', "are not finite"),
        ('{"frame": "a", "fields": ["x"], "boxes": [[0]], "scores": [1, 2]}\n', "cannot reshape"),
    ],
)
def test_other_lines_are_refused(usual: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "new.jsonl").write_text(content)
    assert message in refuse(f"monitor {tmp_path / 'new.jsonl'} --usual {usual}")


def test_a_saved_monitor_keeps_its_limits(usual: Path, tmp_path: Path) -> None:
    new, saved = tmp_path / "new.jsonl", tmp_path / "m.json"
    new.write_text(text([24]))
    words = f"monitor {new} --usual {usual} --false-alarm-rate 0.2 --run-length 50 --save {saved}"
    succeed(words)
    for words, expected in (("", (0.2, 50)), ("--run-length 70", (0.2, 70))):
        again = tmp_path / "again.json"
        succeed(f"monitor {new} --usual {saved} --save {again} {words}".strip())
        kept = Monitor.load(again)
        assert (kept.false_alarm_rate, kept.run_length) == expected


def test_bad_options_are_refused(usual: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.jsonl"
    new.write_text(text([24]))
    assert (
        "--out is for --format prometheus" in boxcov(f"monitor {new} --usual {usual} --out x").err
    )
    assert "must name a .json file" in boxcov(f"monitor {new} --usual {usual} --save x.txt").err
    assert "FRAMES and --usual are both stdin" in boxcov("monitor - --usual -").err
    rare = boxcov(f"monitor {new} --usual {usual} --false-alarm-rate 0.001")
    assert f"{usual}: 40 usual frames are too few" in rare.err
    assert "no such file" in boxcov(f"monitor {tmp_path / 'none.jsonl'} --usual {usual}").err
