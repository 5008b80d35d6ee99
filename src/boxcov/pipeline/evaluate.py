"""``boxcov evaluate``: from files of predictions to a study, its table and its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from warnings import warn

from boxcov._files.input_file import reading
from boxcov._torch.distributed import World, join_process_group
from boxcov.data.loader import load_items
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.evaluate.summary import table
from boxcov.pipeline.block_store import BlockStore
from boxcov.pipeline.frames import (
    Progress,
    check_frame_count,
    load_in_background,
    load_labelled_frames,
    silent,
    source_of_detections,
    warn_of_fewer_frames,
)
from boxcov.pipeline.options import DataOptions, EvaluateCommand
from boxcov.pipeline.paths import holds_output
from boxcov.report.page import write
from boxcov.report.study import Study
from boxcov.version import __version__

_FEW = 20  # boxes or objects: too few to tell whether they belong together


class _Files(NamedTuple):
    """Files of predictions by the name of their method, and the frames that all are about."""

    found: dict[str, Detections]
    source: DataOptions
    frames: Sequence[Any]


@holds_output
def run(
    options: EvaluateCommand, progress: Progress = silent
) -> tuple[Study, list[dict[str, Any]]] | None:
    """Compare predictions with the objects of their frames; return the study and its table.

    With an output, a report is written there; until then the objects of finished blocks of frames
    are stored next to it. Under torchrun the ranks share the blocks; all but rank 0 return None.
    """
    with join_process_group("cpu") as (world, _):
        if options.out is None and not world.is_single:
            raise BoxcovError(
                "several processes exchange files next to the report: give --out FILE"
            )
        store: BlockStore[GroundTruth] | None = None
        if options.out is not None:
            store = BlockStore(options.out, GroundTruth.save, GroundTruth.load)
            store.refuse_leftovers(options.resume, world)
            if options.resume and not options.force:
                store.refuse_finished(world)
        files = _load_files(options)
        truth = _read_objects(files, store, world, progress)
    if truth is None:
        return None
    study = _build_study(options, files, truth)
    if options.source.data is not None:
        _warn_of_other_frames(options, files, truth)
    records = {method.name: method.records for method in study.methods}
    rows = table(records, options.replicates, options.seed)
    if options.out is not None and store is not None:
        write(options.out, study, rows=rows)
        store.remove()
    return study, rows


def _load_files(options: EvaluateCommand) -> _Files:
    names = _method_names(options.predictions)
    found = [Detections.load(path) for path in options.predictions]
    source = _common_source(options, found)
    frames = load_labelled_frames(source, "cpu", found[0].classes)
    warn_of_fewer_frames(frames, options.source.count, source.name)
    for path, one in zip(options.predictions, found):
        check_frame_count(path, one, frames, source)
    frames = load_in_background(frames, options.workers, "cpu", source.seed)
    return _Files(dict(zip(names, found)), source, frames)


def _warn_of_other_frames(options: EvaluateCommand, files: _Files, truth: GroundTruth) -> None:
    """Warn if boxes match objects of the given frames no more often than by chance.

    Chance is the number of matches if each frame has the boxes of the frame half a split away.
    """
    frames = truth.frames
    for path, found in zip(options.predictions, files.found.values()):
        records = match_detections(found, truth)
        paired, possible = int(records.paired.sum()), min(len(records), len(truth.labels))
        if possible < _FEW or 4 * paired > possible:
            continue
        other = replace(found, frame=(found.frame + frames // 2) % frames)
        by_chance = int(match_detections(other, truth).paired.sum()) if frames > 1 else 0
        if paired <= 2 * by_chance + possible // 20:
            warn(
                f"{path}: {paired} of {len(records)} boxes match one of the {len(truth.labels)} "
                f"objects of {files.source.name}, as few as by chance: the file may be of other "
                "frames. Give the --data, --split and --count that it was predicted on",
                BoxcovWarning,
                stacklevel=2,
            )


def _method_names(paths: Sequence[Path]) -> list[str]:
    """Return the stems of the files, or the whole paths if stems repeat."""
    stems = [path.stem for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    names = [str(path) for path in paths]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BoxcovError(f"{twice[0]}: the same file is given twice: remove one")
    return names


def _common_source(options: EvaluateCommand, files: Sequence[Detections]) -> DataOptions:
    """Return the frames that all files were computed on."""
    paths, given = options.predictions, options.source
    first = source_of_detections(paths[0], files[0].meta, given)
    for path, found in zip(paths, files):
        if source_of_detections(path, found.meta, given) != first:
            raise BoxcovError(
                f"{path}: predictions of other frames than {paths[0]}: evaluate them separately"
            )
    return first


def _read_objects(
    files: _Files, store: BlockStore[GroundTruth] | None, world: World, progress: Progress
) -> GroundTruth | None:
    """Return the objects of all frames; None for ranks that only read a share of them."""
    frames, count = files.frames, len(files.frames)

    def read(numbers: range, items: Iterator[Any]) -> GroundTruth:
        def shown() -> Iterator[Any]:
            for number, item in zip(numbers, items):
                yield item
                progress(number + 1, count)

        return GroundTruth.from_frames(shown())

    if store is None:
        return read(range(count), load_items(frames, range(count)))
    meta = {"source": asdict(files.source), "frames": count, "boxcov": __version__}
    store.fill(frames, meta, read, world, progress)
    if world.rank:
        return None
    return GroundTruth.concatenate([part for part, _ in store.read_all(count)])


def _build_study(options: EvaluateCommand, files: _Files, truth: GroundTruth) -> Study:
    """Return the study with the first frames as scenes."""
    shown = range(min(options.scenes, len(files.frames)))
    items = load_items(files.frames, shown)
    inputs = {number: inputs for number, (inputs, _) in zip(shown, items)}
    data = files.source.name
    with reading(", ".join(map(str, options.predictions)), "predictions"):
        study = Study.of_objects(files.found, truth, inputs, f"Uncertainty of boxes: {data}")
    return replace(study, about={"data": data, **study.about})
