from __future__ import annotations

import io

from boxcov.pipeline.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(ticks: list[float], done: list[int], total: int | None, stream: io.StringIO) -> str:
    clock = iter(ticks)
    with ProgressBar("working", stream=stream, clock=lambda: next(clock)) as progress:
        for number in done:
            progress(number, total, "loss 0.5")
    return stream.getvalue()


def test_short_work_prints_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        assert printed([0.0, 0.5, 1.0, 1.9], [1, 2, 3], 3, stream) == ""


def test_log_has_a_line_every_few_seconds() -> None:
    lines = printed(
        [float(t) for t in range(14)], list(range(1, 14)), 100, io.StringIO()
    ).splitlines()
    assert lines == [
        "working: 2 of 100 frames, loss 0.5, 1 per second, 0:01:38 left",
        "working: 7 of 100 frames, loss 0.5, 1 per second, 0:01:33 left",
        "working: 12 of 100 frames, loss 0.5, 1 per second, 0:01:28 left",
    ]


def test_rate_ignores_items_before_a_resume() -> None:
    lines = printed([0.0, 0.1, 10.1], [500, 505], 510, io.StringIO())
    assert lines == "working: 505 of 510 frames, loss 0.5, 2 s each, 0:00:10 left\n"


def test_unknown_total_has_no_remaining_time() -> None:
    assert (
        printed([0.0, 1.0, 11.0], [1, 11], None, io.StringIO())
        == "working: 11 frames, loss 0.5, 1 per second\n"
    )


def test_a_terminal_shows_one_line_and_removes_it() -> None:
    shown = printed([0.0, 1.0, 11.0, 12.0], [1, 11, 12], 20, Terminal())
    _, first, second, last = shown.split("\r\x1b[K")
    line = "working: 11 of 20 frames, loss 0.5, 1 per second, 0:00:09 left"
    assert first == f"[######......] {line}"
    assert second.startswith("[#######.....] working: 12 of 20 frames")
    assert last == ""
    assert "\n" not in shown


def test_rates_have_no_exponent() -> None:
    line = printed([0.0, 1.0, 11.0], [0, 1500], 3000, io.StringIO())
    assert line == "working: 1500 of 3000 frames, loss 0.5, 150 per second, 0:00:10 left\n"
    line = printed([0.0, 1.0, 401.0], [0, 2], 3, io.StringIO())
    assert line == "working: 2 of 3 frames, loss 0.5, 200 s each, 0:03:20 left\n"
