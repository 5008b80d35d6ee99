"""Names from files cannot control the terminal, a spreadsheet or a figure."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from boxcov import Detections
from boxcov._files.plain_text import printable
from boxcov.cli.evaluate import difference_table, quality_table
from boxcov.evaluate.summary import COLUMNS
from boxcov.export.tables import write_csv
from boxcov.pipeline.progress import ProgressBar
from boxcov.pipeline.terminal import say, say_json, say_table
from helpers.command_line import refuse
from helpers.studies import random_records

HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold]a[/nope]\u202eb\x9b31m\ud800"
SHOWN = r"\x1b]0;owned\x07\x1b[2J[bold]a[/nope]\u202eb\x9b31m\ud800"


def test_control_characters_are_escaped() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("a\nb\tc") == "a\nb\\tc"
    assert printable("a\nb\r", one_line=True) == r"a\nb\r"
    assert printable("Fußgänger, 歩行者, 1 σ") == "Fußgänger, 歩行者, 1 σ"


def test_texts_and_json_are_escaped(capsys) -> None:
    say(HOSTILE)
    say_json({"name": HOSTILE, "value": [float("nan"), float("inf"), 1.0]})
    first, second = capsys.readouterr().out.splitlines()
    assert first == SHOWN
    assert second.isascii()
    assert second.isprintable()
    assert second.endswith('"value": [null, null, 1.0]}')


def test_tables_show_names_as_they_are() -> None:
    """Brackets are no markup, in titles, heads and cells."""
    row = dict.fromkeys(COLUMNS)
    rows = [{"kind": "method", "method": HOSTILE, "boxes": 1, "paired": 1, **row}]
    rows.append({**rows[0], "kind": "difference", "method": f"{HOSTILE}, minus x"})
    for table in (quality_table(rows), difference_table(rows)):
        out = io.StringIO()
        say_table(table, out)
        assert "".join(out.getvalue().split()).count(SHOWN) == 1
        assert "\x1b" not in out.getvalue()


def test_terminals_without_a_character_show_its_code() -> None:
    made = "t = Table('size'); t.add_row('90° größe'); say('größe'); say_table(t)"
    code = f"from boxcov.pipeline.terminal import *; from rich.table import Table; {made}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    text = done.stdout.decode("ascii")
    assert done.returncode == 0, done.stderr
    assert text.startswith(r"gr\xf6\xdfe")
    assert r"90\xb0 gr\xf6\xdfe" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_progress_shows_names_as_they_are(kind) -> None:
    ticks = iter([0.0, 9.0, 20.0, 30.0])
    stream = kind()
    with ProgressBar(f"fit [red]{HOSTILE}", stream=stream, clock=lambda: next(ticks)) as progress:
        progress(1, 9, note="[/x]")
    text = stream.getvalue()
    assert "\x1b]0;" not in text
    assert r"[red]\x1b]0;owned" in text.replace("\n", "")


def test_errors_are_one_escaped_line(tmp_path) -> None:
    path = tmp_path / f"a\nb{HOSTILE[:-1]}[/red].safetensors"
    error = refuse("convert", path, f"--format csv --out {tmp_path / 'x.csv'}")
    assert error.count("\n") == 1
    assert printable(str(path), one_line=True) in error


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_names_are_no_formulas_in_csv(tmp_path: Path, name: str) -> None:
    zero = torch.zeros(1, dtype=torch.long)
    box = Detections(torch.tensor([[-1.5]]), torch.ones(1), zero, zero, (f"{name}x",), (name,))
    write_csv(tmp_path / "x.csv", box)
    import csv

    with (tmp_path / "x.csv").open(newline="", encoding="utf-8") as file:
        head, row = csv.reader(file)
    assert head == ["frame", "label", "class", "score", f"'{name}x"]
    assert row == ["0", "0", f"'{name}", "1", "-1.5"]  # numbers stay numbers


def test_figures_draw_names_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import numpy as np

    from boxcov.report.figures import write_figures
    from boxcov.report.frame_plot import write_plot
    from boxcov.report.study import Method, Study

    name = r"$\frac{1$" + HOSTILE
    study = Study(name, methods=[Method(name, random_records(0))])
    assert write_figures(tmp_path / "figures", study)
    zero = torch.zeros(1, dtype=torch.long)
    boxes, C = torch.tensor([[1.0, 1, 9, 9]]), torch.eye(4)[None]
    found = Detections(boxes, torch.ones(1), zero, zero, ("x1", "y1", "x2", "y2"), (name,), C)
    write_plot(tmp_path / "x.png", found, np.zeros((10, 10, 3), np.uint8))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupt_during_the_import_has_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    words = [sys.executable, "-c", "from boxcov.__main__ import main; main()"]
    path = {"PYTHONPATH": f"{tmp_path}:{':'.join(p for p in sys.path if p)}"}
    done = subprocess.run(words, env=path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_nobody_reads_the_output() -> None:
    code = (
        "from boxcov.cli import app\n"
        "from boxcov.pipeline.terminal import say\n"
        "import sys\n"
        "app.build_app = lambda: (lambda **_: [say('x' * 9999) for _ in range(99)])\n"
        "app.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.stderr is not None
        assert running.stderr.read() == ""
    assert running.returncode == 141
