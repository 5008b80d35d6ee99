"""The work of ``boxcov evaluate``: from files of predictions to a study, its table and its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from boxcov._torch.distributed import World
from boxcov.data.loader import load_items
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.evaluate.records import Records
from boxcov.evaluate.scalar_uncertainty import ScalarUncertainty, uncertainty_of
from boxcov.evaluate.summary import COLUMNS, table
from boxcov.files import remove_leftovers
from boxcov.pipeline.blocks import Parts, Progress, parts_of
from boxcov.pipeline.records import Truth, joined, records_of, truth_of
from boxcov.pipeline.sources import Source, ahead, check_folder, source_of
from boxcov.report.page import write
from boxcov.report.study import Method, Scene, Study
from boxcov.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["added", "blocks_of", "read_objects", "rows_of", "shown", "study_of", "write"]

_ALONE = World()
_TOLD = (
    "method",
    "samples",
    "derivative",
    "epsilon",
    "dropout",
    "depth",
    "form",
    "n_data",
    "prior_precision",
    "fisher",
    "seed",
)


def study_of(
    paths: Sequence[Path],
    data: str | None = None,
    out: Path | None = None,
    scenes: int = 6,
    uncertainty: ScalarUncertainty = "trace",
    parts: Parts[Truth] | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> Study:
    """The records of each file, named after it, with the frames that the files say they were made from, or those of ``data``.

    uncertainty: what is made of each covariance to be u, see ``boxcov.evaluate.scalar_uncertainty.uncertainty_of``.
    parts: where ``read_objects`` has put the objects of the frames; unless given, they are read here.
    """
    if out is not None:
        check_folder(out)
    files = dict(zip(_names(paths), (Detections.load(path) for path in paths)))
    source = _one_source(paths, list(files.values()), data)
    first = next(iter(files.values()))
    truth, looked_at = _frames(source, first, scenes, parts, workers, progress)
    methods = [
        _method(path, name, records_of(found, truth), found.meta, uncertainty)
        for path, (name, found) in zip(paths, files.items())
    ]
    empty = next((path for path, method in zip(paths, methods) if not len(method.records)), None)
    if empty is not None:
        raise BoxcovError(f"{empty}: holds no box scored above 0.1: there is nothing to evaluate")
    about = {
        "data": " ".join(str(part) for part in (source.data, source.split) if part),
        "frames": truth.frames,
        "objects": len(truth.labels),
        "u": uncertainty,
        **{
            key: first.meta[key]
            for key in ("detector", "posterior", "boxcov", "torch")
            if key in first.meta
        },
        **{
            name: {key: found.meta[key] for key in _TOLD if key in found.meta}
            for name, found in files.items()
        },
    }
    runtime = [
        _runtime(name, found) for name, found in files.items() if found.meta.get("milliseconds")
    ]
    return Study(f"Box covariances on {about['data']}", about, methods, looked_at, runtime)


def _method(
    path: Path, name: str, records: Records, meta: Mapping[str, Any], uncertainty: ScalarUncertainty
) -> Method:
    try:
        u = records.uncertainty if uncertainty == "trace" else uncertainty_of(records, uncertainty)
    except BoxcovError as error:
        raise BoxcovError(f"{path}: {error}") from None
    return Method(name, records.with_uncertainty(u), _note(meta))


def _names(paths: Sequence[Path]) -> list[str]:
    """Of the files, without what they share."""
    stems = [path.stem for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    if len(set(map(str, paths))) < len(paths):
        raise BoxcovError("the same file is given twice")
    return [str(path) for path in paths]


def _one_source(paths: Sequence[Path], files: Sequence[Detections], data: str | None) -> Source:
    sources = [source_of(path, found.meta, data) for path, found in zip(paths, files)]
    other = next((path for path, source in zip(paths, sources) if source != sources[0]), None)
    if other is not None:
        raise BoxcovError(
            f"{other}: predictions of other frames than {paths[0]}: evaluate them apart"
        )
    return sources[0]


def blocks_of(out: Path | None, ranks: World) -> Parts[Truth] | None:
    """Where the objects of the frames are kept until the page ``out`` is there; without a page nothing is."""
    if out is not None:
        check_folder(out)
        remove_leftovers(out)
        return Parts(parts_of(out), lambda path, part, about: part.save(path, about), Truth.load)
    if not ranks.is_single:
        raise BoxcovError(
            "over several processes the frames' objects meet beside the page: give --out FILE"
        )
    return None


def read_objects(
    parts: Parts[Truth],
    paths: Sequence[Path],
    data: str | None = None,
    ranks: World = _ALONE,
    resume: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> None:
    """Read the frames that the files were made from, this rank's share of them, and keep their objects in ``parts``."""
    parts.check(resume, ranks)
    files = [Detections.load(path) for path in paths]
    source = _one_source(paths, files, data)
    frames = _same_frames(source, files[0])

    def objects(numbers: range, items: Iterator[Any]) -> Truth:
        targets = []
        for number, (_, target) in zip(numbers, items):
            targets.append((None, target))
            if progress is not None:
                progress(number + 1, len(frames))
        return truth_of(targets)

    about = {"source": asdict(source), "frames": len(frames), "boxcov": __version__}
    parts.fill(ahead(frames, workers, "cpu", source.seed), about, objects, ranks, progress=progress)


def _same_frames(source: Source, found: Detections) -> Sequence[Any]:
    frames = source.frames("cpu", found.classes)
    expected = found.meta.get("frames", len(frames))
    if expected != len(frames):
        raise BoxcovError(
            f"{source.data}: {len(frames)} frames, and the predictions are of {expected}: these are not the frames they were made from"
        )
    return frames


def _frames(
    source: Source,
    found: Detections,
    scenes: int,
    parts: Parts[Truth] | None,
    workers: int,
    progress: Progress | None,
) -> tuple[Truth, dict[int, Scene]]:
    """The objects of all frames, and the first frames whole, as far as the boxes' own fields go."""
    frames = _same_frames(source, found)
    targets, kept = [], {}
    wanted = range(len(frames) if parts is None else min(scenes, len(frames)))
    for number, (inputs, target) in zip(
        wanted, load_items(ahead(frames, workers, "cpu", source.seed), wanted)
    ):
        targets.append((None, target))
        if number < scenes and isinstance(
            inputs, list
        ):  # clouds of points: there is no picture of an image yet
            kept[number] = inputs[0]
        if progress is not None and parts is None:
            progress(number + 1, len(frames))
    truth = (
        truth_of(targets) if parts is None else joined([part for part, _ in parts.all(len(frames))])
    )
    boxes = truth.columns(found.fields)
    return truth, {
        number: Scene(
            f"frame {number}",
            key_sweep(points),
            boxes[truth.frame == number],
            truth.labels[truth.frame == number],
        )
        for number, points in kept.items()
    }


def key_sweep(points: torch.Tensor) -> Any:
    """What the LiDAR saw in its last turn, x y z: older turns only smear the picture."""
    return points[points[:, 4] == 0, :3].numpy() if points.shape[1] > 4 else points[:, :3].numpy()


def _note(meta: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {meta[key]}" for key in _TOLD if meta.get(key) is not None)


def _runtime(name: str, found: Detections) -> dict[str, Any]:
    """The median over the frames but the first, which has to warm up."""
    spent = found.meta["milliseconds"]
    row = {
        "method": name,
        "device": found.meta.get("device", ""),
        "boxes": round(len(found) / len(spent)),
        "ms": median(spent[1:] or spent),
    }
    return row if found.meta.get("samples") is None else {**row, "samples": found.meta["samples"]}


def rows_of(study: Study, replicates: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """See ``boxcov.evaluate.summary.table``."""
    return table({method.name: method.records for method in study.methods}, replicates, seed)


def shown(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows as a table for a terminal: a column a method or baseline, a line a metric, and below it what chance gives."""
    from rich.table import Table

    columns, chance = (
        [row for row in rows if row["kind"] not in ("chance", "difference")],
        [row for row in rows if row["kind"] == "chance"],
    )
    title = "quality of the covariances, with 95 % intervals over frames"
    drawn = Table(
        "",
        *(str(row["method"]) for row in columns),
        title=title,
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("boxes", "paired"):
        drawn.add_row(name, *(str(row[name]) for row in columns))
    for name in COLUMNS:
        if any(row[name] is not None for row in columns):
            drawn.add_row(name, *(_cell(row[name]) for row in columns))
        if any(row[name] is not None for row in chance):
            drawn.add_row("  chance", *(_cell(row[name]) for row in chance), style="dim")
    return drawn


def added(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """What the covariances add to score + size: the differences, a line a metric; None without any."""
    from rich.table import Table

    columns = [row for row in rows if row["kind"] == "difference"]
    if not columns:
        return None
    title = "what the covariance adds to score + size, with 95 % intervals of the difference"
    names = (str(row["method"]).partition(", minus ")[0] for row in columns)
    drawn = Table("", *names, title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:
        if any(row[name] is not None for row in columns):
            drawn.add_row(name, *(_cell(row[name]) for row in columns))
    return drawn


def _cell(cell: Mapping[str, float | None] | None) -> str:
    """A number and the ends of its interval, in few characters; a dash where it is not finite.

    >>> _cell({"value": 0.7123, "low": 0.6, "high": 1.0}), _cell({"value": -1.5, "low": None, "high": None}), _cell(None)
    ('0.71 .60-1.00', '-1.5', '')
    >>> _cell({"value": 0.02, "low": -0.01, "high": 0.05})
    '0.02 -.01 to .05'
    """
    if cell is None:
        return ""
    if cell["value"] is None:
        return "-"
    low, high = cell["low"], cell["high"]
    if low is None or high is None:
        return f"{cell['value']:.3g}"
    return f"{cell['value']:.2f} {_short(low)}{' to ' if low < 0 else '-'}{_short(high)}"


def _short(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"
