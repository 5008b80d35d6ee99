"""What commands do with a file of detections that a stranger wrote, for ``helpers.fuzz``."""

from __future__ import annotations

import csv
from pathlib import Path
from unicodedata import category

import torch

from boxcov import BoxcovError, Detections
from boxcov._files.plain_text import printable
from boxcov.pipeline import convert
from boxcov.pipeline.options import ConvertCommand, MessageOptions
from boxcov.report.canvas import draw_from_above
from boxcov.report.page import page
from boxcov.report.study import Study
from helpers.command_line import boxcov

HARMFUL = ("Cc", "Cf", "Cs")  # control, direction, half a surrogate


def convert_to_messages(path: Path) -> None:
    """Convert a file of predictions to messages of a tracker."""
    out, message = path.parent / "converted.json", MessageOptions(covariance="epistemic")
    out.unlink(missing_ok=True)
    convert.run(ConvertCommand(detections=path, out=out, format="ros", message=message))


def print_names(path: Path) -> None:
    """Print a file's names and write them to a table, as the commands do."""
    out = path.parent / "table.csv"
    out.unlink(missing_ok=True)
    done = boxcov("convert", path, "--format csv --out", out)
    texts = [done.out, done.err]
    if done.code == 0:  # the same names, as a command shows them
        found = Detections.load(path)
        texts += map(printable, (*found.fields, *found.classes, found.meta, found))
        with out.open(newline="", encoding="utf-8") as file:
            head, *rows = csv.reader(file)
        names = [*head, *(row[head.index("class")] for row in rows)]
        assert not any(name.startswith(tuple("=+-@\t\r")) for name in names), names
    for text in texts:
        assert not any(category(c) in HARMFUL for c in text.replace("\n", "")), text
    assert done.err.count("\n") <= 1, done.err
    if done.code:
        raise BoxcovError(done.err)


def show_boxes(path: Path) -> None:
    """Show the boxes in a report and in pictures, as the commands do."""
    found = Detections.load(path)
    objects = {"boxes": torch.ones(1, 9), "labels": torch.zeros(1, dtype=torch.long)}
    frames = [([torch.zeros(3, 5)], [objects]) for _ in range(3)]
    try:
        html = page(Study.of(found, frames), replicates=1)
        for one in found.frames():
            draw_from_above(one, torch.zeros(3, 5).numpy())
    except BoxcovError as error:
        raise BoxcovError(f"{path}: {error}") from None
    assert not any(category(c) in HARMFUL for c in html.replace("\n", "")), html
    html.encode()
