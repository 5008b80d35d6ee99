"""``boxcov evaluate``: from files of predictions to a study, its table and its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from boxcov._torch.distributed import World, join_process_group
from boxcov.data.loader import load_items
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.method_table import table
from boxcov.pipeline.block_store import BlockStore
from boxcov.pipeline.frames import (
    Progress,
    load_in_background,
    load_labelled_frames,
    source_of_detections,
)
from boxcov.pipeline.options import DataOptions, EvaluateCommand
from boxcov.pipeline.paths import blocks_folder, holds_output
from boxcov.report.page import write
from boxcov.report.study import METHOD_META, Scene, Study, methods_of, scenes_of
from boxcov.version import __version__


@dataclass(frozen=True)
class Evaluation:
    """The study and the rows of its quality table."""

    study: Study
    rows: list[dict[str, Any]]


@holds_output
def run(options: EvaluateCommand, progress: Progress | None = None) -> Evaluation | None:
    """Compare predictions with the objects of their frames; write the report if there is an output.

    With an output, the objects of finished blocks of frames are stored next to it until the report
    is written. Under torchrun the ranks share the blocks, and all but rank 0 return None.
    """
    with join_process_group("cpu") as (world, _):
        store = _block_store(options.out, world)
        if store is not None:
            _read_objects(store, options, world, progress)
        if world.rank:
            return None
        study = build_study(options, progress, store)
    rows = quality_rows(study, options.replicates, options.seed)
    if options.out is not None and store is not None:
        write(options.out, study)
        store.remove()
    return Evaluation(study, rows)


def quality_rows(study: Study, replicates: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """Return the rows of the quality table, see ``boxcov.evaluate.summary.table``."""
    return table({method.name: method.records for method in study.methods}, replicates, seed)


def _block_store(out: Path | None, world: World) -> BlockStore[GroundTruth] | None:
    if out is not None:
        return BlockStore(
            blocks_folder(out), lambda path, part, meta: part.save(path, meta), GroundTruth.load
        )
    if not world.is_single:
        raise BoxcovError("several processes exchange files next to the report: give --out FILE")
    return None


def _read_objects(
    store: BlockStore[GroundTruth],
    options: EvaluateCommand,
    world: World,
    progress: Progress | None,
) -> None:
    """Read the objects of this rank's share of the frames into ``store``."""
    store.refuse_leftovers(options.resume, world)
    files = [Detections.load(path) for path in options.predictions]
    source = _common_source(options, files)
    frames = _load_frames(source, files[0])

    def read_block(numbers: range, items: Iterator[Any]) -> GroundTruth:
        targets = []
        for number, (_, target) in zip(numbers, items):
            targets.append((None, target))
            if progress is not None:
                progress(number + 1, len(frames))
        return GroundTruth.from_frames(targets)

    meta = {"source": asdict(source), "frames": len(frames), "boxcov": __version__}
    loaded = load_in_background(frames, options.workers, "cpu", source.seed)
    store.fill(loaded, meta, read_block, world, progress)


def build_study(
    options: EvaluateCommand,
    progress: Progress | None = None,
    store: BlockStore[GroundTruth] | None = None,
) -> Study:
    """Return the matched records of each file, with the first frames as scenes.

    store: the objects of all frames; without it they are read here.
    """
    names = _method_names(options.predictions)
    files = [Detections.load(path) for path in options.predictions]
    source, first = _common_source(options, files), files[0]
    truth, scenes = _read_frames(options, source, first, store, progress)
    methods = []
    for path, name, found in zip(options.predictions, names, files):
        try:
            methods += methods_of(name, found, truth, options.uncertainty)
        except BoxcovError as error:
            raise BoxcovError(f"{path}: {error}") from None
    about = {
        "data": " ".join(part for part in (source.data, source.split) if part),
        "frames": truth.frames,
        "objects": len(truth.labels),
        "u": options.uncertainty,
        **_only(first.meta, ("detector", "posterior", "boxcov", "torch")),
        **{name: _only(found.meta, METHOD_META) for name, found in zip(names, files)},
    }
    runtime = [
        _runtime_row(name, found)
        for name, found in zip(names, files)
        if found.meta.get("milliseconds")
    ]
    return Study(f"Uncertainty of boxes: {about['data']}", about, methods, scenes, runtime)


def _only(meta: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: meta[name] for name in names if name in meta}


def _method_names(paths: Sequence[Path]) -> list[str]:
    """Return the stems of the files, or the whole paths if stems repeat."""
    stems = [path.stem for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    if len(set(map(str, paths))) < len(paths):
        raise BoxcovError("the same file is given twice")
    return [str(path) for path in paths]


def _common_source(options: EvaluateCommand, files: Sequence[Detections]) -> DataOptions:
    """Return the frames that all files were computed on."""
    paths = options.predictions
    sources = [
        source_of_detections(path, found.meta, options.source) for path, found in zip(paths, files)
    ]
    for path, source in zip(paths, sources):
        if source != sources[0]:
            raise BoxcovError(
                f"{path}: predictions of other frames than {paths[0]}: evaluate them separately"
            )
    return sources[0]


def _load_frames(source: DataOptions, found: Detections) -> Sequence[Any]:
    frames = load_labelled_frames(source, "cpu", found.classes)
    last = int(found.frame.max()) + 1 if len(found) else 0
    expected = found.meta.get("frames", max(last, len(frames)))
    if expected != len(frames):
        raise BoxcovError(
            f"{source.data}: has {len(frames)} frames, but the predictions have {expected}: "
            "these are not the same frames"
        )
    return frames


def _read_frames(
    options: EvaluateCommand,
    source: DataOptions,
    found: Detections,
    store: BlockStore[GroundTruth] | None,
    progress: Progress | None,
) -> tuple[GroundTruth, dict[int, Scene]]:
    """Return the objects of all frames, and the first frames as scenes for the report."""
    frames = _load_frames(source, found)
    wanted = range(len(frames) if store is None else min(options.scenes, len(frames)))
    targets, shown = [], {}
    loaded = load_in_background(frames, options.workers, "cpu", source.seed)
    for number, (inputs, target) in zip(wanted, load_items(loaded, wanted)):
        targets.append((None, target))
        if number < options.scenes:
            shown[number] = inputs
        if progress is not None and store is None:
            progress(number + 1, len(frames))
    truth = (
        GroundTruth.from_frames(targets)
        if store is None
        else GroundTruth.concatenate([part for part, _ in store.read_all(len(frames))])
    )
    return truth, scenes_of(shown, truth, found.fields)


def _runtime_row(name: str, found: Detections) -> dict[str, Any]:
    """Return the median milliseconds per frame, without the first frame, which warms up."""
    spent = found.meta["milliseconds"]
    row = {
        "method": name,
        "device": found.meta.get("device", ""),
        "boxes": round(len(found) / len(spent)),
        "ms": median(spent[1:] or spent),
    }
    return row if found.meta.get("samples") is None else {**row, "samples": found.meta["samples"]}
