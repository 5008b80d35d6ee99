"""``boxcov rank``: order frames and boxes, those to label or check first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.concatenation import join_frames
from boxcov.data.coco.sequence import Coco
from boxcov.detections import Detections
from boxcov.errors import BoxcovError, counted, import_package
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.label_order import Aggregate, box_values, frame_values
from boxcov.evaluate.wrong_labels import disagreement
from boxcov.export.tables import write_columns
from boxcov.outlines import background_of
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frame_files import Frame
from boxcov.pipeline.frames import (
    Progress,
    check_labels,
    frame_count,
    frame_names,
    frames_of_detections,
    load_in_background,
    numbered,
    silent,
)
from boxcov.pipeline.options import DataOptions, PredictedData, RankCommand
from boxcov.pipeline.paths import check_output, holds_output
from boxcov.pipeline.predict import build_predictor, open_frames

Array = NDArray[Any]
AGGREGATES: dict[str, Aggregate] = {"risk": "sum", "epistemic": "mean", "disagreement": "max"}
SHOWN = 5  # frames of the summary


@dataclass(frozen=True)
class Pool:
    """The boxes of all frames, their names, and their labels if they were asked for."""

    found: Detections
    names: list[str]
    truth: GroundTruth | None = None
    sizes: tuple[tuple[float, float] | None, ...] = ()  # width and height of images


@holds_output
def run(options: RankCommand, progress: Progress = silent) -> dict[str, Any]:
    """Write the frames in order, and the boxes if asked for; return the first frames."""
    if options.boxes is not None:
        check_output(options.boxes, options.force)
    name = options.fiftyone
    if name is not None and import_package("fiftyone").dataset_exists(name) and not options.force:
        raise BoxcovError(
            f"the FiftyOne dataset {name} exists: give another name, or --force to replace it"
        )
    pool = _predict(options, progress) if options.predictions is None else _read(options)
    aggregate = options.aggregate or AGGREGATES[options.by]
    rows = box_table(pool, options.by)
    frames = frame_table(pool, rows, aggregate)
    write_columns(options.out, frames)
    written = [str(options.out)]
    if options.boxes is not None:
        order = _falling(rows["value"])
        shown = {**rows, "frame": np.array(pool.names, dtype=object)[rows["frame"]]}
        write_columns(options.boxes, {name: column[order] for name, column in shown.items()})
        written.append(str(options.boxes))
    if options.fiftyone is not None:
        _make_dataset(options.fiftyone, pool, frames, options.force)
        written.append(f"the FiftyOne dataset {options.fiftyone}")
    shown_rows = zip(*(column[:SHOWN].tolist() for column in frames.values()))
    first = [dict(zip(frames, row)) for row in shown_rows]
    about = {"by": options.by, "aggregate": aggregate, "frames": len(pool.names)}
    return {**about, "written": written, "first": first}


def box_table(pool: Pool, by: str) -> dict[str, Any]:
    """Return a row for each box, and for each label without one: its frame, value and place."""
    found = pool.found
    arrays = found.numpy()
    classes = np.array([*found.classes, ""], dtype=object)
    if by == "disagreement":
        assert pool.truth is not None
        rows = disagreement(found, pool.truth)
        of_label = _rows_of(pool.truth.columns(found.fields), rows.label)
        place = np.where((rows.box >= 0)[:, None], _rows_of(arrays["boxes"], rows.box), of_label)
        table = {"frame": rows.frame, "value": rows.value, "kind": rows.kind}
        table["class"] = classes[_rows_of(arrays["labels"], rows.box, -1)]
        table["label"] = classes[_rows_of(pool.truth.labels, rows.label, -1)]
        table["scores"] = _rows_of(arrays["scores"], rows.box, np.nan)
    else:
        value = box_values(found, "risk" if by == "risk" else "epistemic")
        table = {"frame": arrays["frame"], "value": value, "class": classes[arrays["labels"]]}
        table |= {name: arrays[name] for name in ("scores", "risk") if name in arrays}
        place = arrays["boxes"]
    return table | {name: place[:, i] for i, name in enumerate(found.fields)}


def _rows_of(values: Array, rows: Array, missing: float = 0) -> Array:
    """Return rows of an array, and ``missing`` where the number is -1."""
    return np.concatenate([values, np.full((1, *values.shape[1:]), missing, values.dtype)])[rows]


def frame_table(pool: Pool, rows: dict[str, Any], aggregate: Aggregate) -> dict[str, Any]:
    """Return a row for each frame in falling order of its value, with its first box."""
    count = len(pool.names)
    values = frame_values(rows["value"], rows["frame"], count, aggregate)
    order = _falling(values)
    first = np.full(count, "none", dtype=object)
    for row in _falling(rows["value"])[::-1]:  # the last one written is the highest
        kind = f"{rows['kind'][row]}: " if "kind" in rows else ""
        name = rows["class"][row] or rows["label"][row]
        first[rows["frame"][row]] = f"{kind}{name} {rows['value'][row]:.3g}"
    boxes = np.bincount(pool.found.numpy()["frame"], minlength=count)
    table = {"rank": np.arange(1, count + 1), "frame": np.array(pool.names, dtype=object)[order]}
    return table | {"value": values[order], "boxes": boxes[order], "first": first[order]}


def _falling(values: Array) -> Array:
    return np.argsort(-np.asarray(values, dtype=float), kind="stable")


def _predict(options: RankCommand, progress: Progress) -> Pool:
    """Run the detector over the frames."""
    detector = load_detector(options, options.device)
    estimator = options.estimator.for_detector(options.detector)
    model = build_predictor(detector, estimator, options.source.seed)
    _check_error_model(options, model.error_model is not None, str(estimator.posterior))
    frames, _ = open_frames(options, options.device, detector)
    if options.by == "disagreement":
        check_labels(frames, options.source)
    found, targets, sizes = [], [], []
    loaded = load_in_background(frames, options.workers, options.device, options.source.seed)
    for number, (inputs, target) in enumerate(loaded):
        boxes, is_file = model(inputs).to("cpu"), isinstance(target, Frame)
        found.append(target.in_file(boxes) if is_file else boxes)
        targets.append((None, target))
        seen = target.background if is_file else background_of(inputs)
        size = seen.shape[1::-1] if seen is not None and seen.ndim == 3 else None
        sizes.append(frames.extent(number) if isinstance(frames, Coco) else size)
        progress(number + 1, len(frames))
    names = frame_names(frames) or numbered(len(found))
    truth = GroundTruth.from_frames(targets) if options.by == "disagreement" else None
    return Pool(join_frames(found), names, truth, tuple(sizes))


def _read(options: RankCommand) -> Pool:
    """Read boxes of boxcov predict, and the labels of their frames if they are needed."""
    path = options.predictions
    assert path is not None
    found = Detections.load(path)
    _check_error_model(options, found.no_object is not None, str(path))
    if options.fiftyone is not None and "x1" in found.fields:
        raise BoxcovError(
            f"{path}: holds boxes of images, but not the sizes of the images, which --fiftyone "
            "needs: give --source or --data instead of --predictions"
        )
    count, truth = frame_count(found), None
    if options.by == "disagreement":
        given = options.source
        where = (given.data, given.split, given.count) if given != DataOptions() else ()
        frames = frames_of_detections(path, found, PredictedData(*where))
        count, truth = len(frames), GroundTruth.from_frames(frames)
    names = found.meta.get("names") or numbered(count)
    if len(names) != count:
        raise BoxcovError(
            f"{path}: has names of {counted(len(names), 'frame')} and boxes of {count}: write it "
            "again with boxcov predict"
        )
    return Pool(found, names, truth)


def _check_error_model(options: RankCommand, is_there: bool, where: str) -> None:
    if options.by != "epistemic" and not is_there:
        raise BoxcovError(
            f"{where}: has no error model, which --by {options.by} needs: calibrate it with boxcov "
            "calibrate, or rank --by epistemic"
        )


def _make_dataset(name: str, pool: Pool, frames: dict[str, Any], force: bool) -> None:
    """Make a FiftyOne dataset with one sample per frame, in order."""
    fo = import_package("fiftyone")
    sizes = pool.sizes or (None,) * len(pool.names)
    labels = [boxes.to_fiftyone(size) for boxes, size in zip(pool.found.frames(len(sizes)), sizes)]
    by_name = dict(zip(pool.names, labels))
    # FiftyOne deletes others when the last process that uses it ends
    dataset = fo.Dataset(name, persistent=True, overwrite=force)
    for frame, rank, value in zip(frames["frame"], frames["rank"], frames["value"]):
        sample = fo.Sample(filepath=frame)
        sample["boxcov_rank"], sample["boxcov_value"] = int(rank), float(value)
        sample["boxcov"] = by_name[frame]
        dataset.add_sample(sample)
