"""boxcov rank through the command line, on files of boxes and on simulated frames."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import Detections
from boxcov.data import simulated
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.pipeline import rank
from helpers.command_line import boxcov, refuse, succeed
from helpers.data_roots import kitti_root
from helpers.export_boxes import in_image, in_space, with_error_model


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    """Five calibrated boxes of three frames, none in the last one; the risk rises."""
    found = with_error_model(in_space(5, frames=2))
    risk = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.9])
    found = replace(
        found,
        scores=torch.ones(5),
        frame=torch.tensor([1, 1, 0, 0, 0]),
        no_object=risk,
        iou_below=torch.zeros_like(found.iou_below),  # type: ignore[arg-type]
        meta={**found.meta, "frames": 3},
    )
    found.save(tmp_path / "boxes.safetensors")
    return tmp_path / "boxes.safetensors"


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_frames_and_boxes_in_falling_order(boxes: Path, tmp_path: Path) -> None:
    words = f"--predictions {boxes} --out {tmp_path / 'f.csv'} --boxes {tmp_path / 'b.csv'}"
    succeed(f"rank {words}")
    frames, rows = table(tmp_path / "f.csv"), table(tmp_path / "b.csv")
    assert [row["frame"] for row in frames] == ["0", "1", "2"]
    assert [row["rank"] for row in frames] == ["1", "2", "3"]
    assert [float(row["value"]) for row in frames] == pytest.approx([1.6, 0.3, 0.0], abs=1e-6)
    assert [row["boxes"] for row in frames] == ["3", "2", "0"]
    assert frames[2]["first"] == "none"
    assert [float(row["value"]) for row in rows] == pytest.approx([0.9, 0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(("aggregate", "first"), [("sum", "0"), ("mean", "0"), ("max", "0")])
def test_json_says_how_frames_are_valued(
    boxes: Path, tmp_path: Path, aggregate: str, first: str
) -> None:
    words = f"--predictions {boxes} --aggregate {aggregate} --out {tmp_path / 'f.csv'}"
    report = json.loads(boxcov(f"rank {words} --json").out)
    expected = {"sum": 1.6, "mean": 1.6 / 3, "max": 0.9}[aggregate]
    assert report["first"][0]["frame"] == first
    assert report["first"][0]["value"] == pytest.approx(expected, abs=1e-6)
    assert (report["by"], report["aggregate"], report["frames"]) == ("risk", aggregate, 3)


def test_names_of_other_frames_are_refused(boxes: Path, tmp_path: Path) -> None:
    found = Detections.load(boxes)
    replace(found, meta={**found.meta, "names": ["a.png"]}).save(boxes)
    words = f"rank --predictions {boxes} --out {tmp_path / 'f.csv'}"
    assert "has names of 1 frame and boxes of 3" in refuse(words)


def test_epistemic_needs_no_error_model(tmp_path: Path) -> None:
    found = in_space(5, calibrated=False)
    found.save(tmp_path / "d.safetensors")
    words = f"--predictions {tmp_path / 'd.safetensors'} --out {tmp_path / 'f.csv'}"
    succeed(f"rank --by epistemic {words}")
    for by in ("risk", "disagreement"):
        error = refuse(f"rank --by {by} {words} --force")
        assert f"has no error model, which --by {by} needs" in error
        assert "boxcov calibrate" in error


def test_one_box_and_no_box(tmp_path: Path) -> None:
    for count in (0, 1):
        found = with_error_model(in_space(5))[:count]
        found = replace(found, meta={**found.meta, "frames": 1})
        found.save(tmp_path / f"{count}.safetensors")
        words = f"--predictions {tmp_path / f'{count}.safetensors'} --out {tmp_path / 'f.csv'}"
        for by in ("risk", "epistemic"):
            succeed(f"rank --by {by} {words} --force --boxes {tmp_path / 'b.csv'}")
            assert table(tmp_path / "f.csv")[0]["boxes"] == str(count)
            assert len(table(tmp_path / "b.csv")) == count


def test_disagreement_needs_labels(boxes: Path, tmp_path: Path) -> None:
    out = f"--out {tmp_path / 'f.csv'}"
    error = refuse(f"rank --by disagreement --source {tmp_path} {out}")
    assert "--source has none: give labelled frames with --data" in error
    words = f"rank --by disagreement --predictions {boxes} {out}"
    for data in ("", "--data simulated:clear"):  # the default, which nobody may have given
        error = refuse(words, *data.split())
        assert "does not state which frames it was computed on: give --data KIND:WHERE and" in error
    assert not (tmp_path / "f.csv").exists()
    error = refuse(f"{words} {data} --split test --count 1")  # as the message says
    assert "simulated:clear: the labels are car, truck" in error  # the boxes have other classes


def test_a_split_without_labels_is_refused(tmp_path: Path) -> None:
    root = kitti_root(tmp_path / "kitti")
    (root / "training").rename(root / "testing")
    shutil.rmtree(root / "testing" / "label_2")
    words = f"--by disagreement --data kitti:{root} --split testing --out {tmp_path / 'f.csv'}"
    error = refuse(f"rank {words}")
    assert "split testing: the frames have no labels, which this command needs" in error
    assert not (tmp_path / "f.csv").exists()


LABELS = """
import torch
def frames(split):
    empty = {"boxes": torch.zeros(0, 9), "labels": torch.zeros(0).long()}
    return [([torch.zeros(1, 5)], [empty])] * 3
"""


def test_labels_that_the_file_does_not_state_are_given(boxes: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LABELS)
    words = f"--by disagreement --predictions {boxes} --out {tmp_path / 'f.csv'}"
    succeed(f"rank {words} --data python:{tmp_path / 'mine.py'}:frames")
    assert [row["boxes"] for row in table(tmp_path / "f.csv")] == ["2", "3", "0"]
    few = f"--data python:{tmp_path / 'mine.py'}:frames --count 2 --force"
    error = refuse(f"rank {words} {few}")
    assert f"{boxes}: boxes of 3 frames, but python:" in error
    assert "mine.py:frames has 2: give the --data, --split and --count" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--source frames/", "--predictions holds boxes already: remove --source"),
        ("--method mcglm", "--predictions holds boxes already: remove --method"),
        ("--samples 4", "--predictions holds boxes already: remove --samples"),
        ("--data simulated:rain", "--predictions holds boxes already: remove --data"),
        ("--by disagreement --seed 3 --sweeps 2", "boxes already: remove --seed, --sweeps"),
    ],
)
def test_options_that_boxes_do_not_need(
    boxes: Path, tmp_path: Path, words: str, message: str
) -> None:
    assert message in refuse(f"rank --predictions {boxes} --out {tmp_path / 'f.csv'} {words}")


def test_source_takes_the_place_of_data(tmp_path: Path) -> None:
    error = refuse(f"rank --source frames --data kitti:ROOT --out {tmp_path / 'f.csv'}")
    assert "--source takes the place of --data and --split: remove them" in error


def test_labels_of_a_class_without_boxes(tmp_path: Path) -> None:
    """All boxes are cars, the only label is a cone; then there are no boxes, and no labels."""
    found = with_error_model(in_space(2))
    found.labels[:] = 0
    box, first = np.array([[40.0, 0, 0, 1, 1, 1, 0, 0, 0]]), np.zeros(1, int)
    cone = GroundTruth(box, np.array([2]), first, 1)
    rows = rank.box_table(rank.Pool(found, ["a"], cone), "disagreement")
    assert rows["kind"].tolist() == ["no box", "no label", "no label"]
    assert (rows["class"][0], rows["label"][0], rows["x"][0]) == ("", "traffic_cone", 40.0)
    frames = rank.frame_table(rank.Pool(found, ["a"], cone), rows, "max")
    assert frames["boxes"].tolist() == [2]  # the label without a box is none
    none = GroundTruth(np.zeros((0, 9)), np.zeros(0, int), np.zeros(0, int), 1)
    pool = rank.Pool(found[:0], ["a"], none)
    frames = rank.frame_table(pool, rank.box_table(pool, "disagreement"), "max")
    assert (frames["value"].tolist(), frames["first"].tolist()) == ([0.0], ["none"])


def test_outputs_are_not_replaced(boxes: Path, tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("mine")
    words = f"rank --predictions {boxes} --out {tmp_path / 'f.csv'} --boxes {tmp_path / 'b.csv'}"
    assert "b.csv: exists" in refuse(words)
    assert (tmp_path / "b.csv").read_text() == "mine"
    succeed(f"{words} --force")
    same = boxcov(f"rank --predictions {boxes} --out {tmp_path / 'x'} --boxes {tmp_path / 'x'}")
    assert "--boxes and --out are both" in same.err


def test_fiftyone_samples_in_order(boxes: Path, tmp_path: Path, samples: list[Any]) -> None:
    succeed(f"rank --predictions {boxes} --out {tmp_path / 'f.csv'} --fiftyone pool")
    assert [sample["filepath"] for sample in samples] == ["0", "1", "2"]
    assert [sample["boxcov_rank"] for sample in samples] == [1, 2, 3]
    assert [len(sample["boxcov"].detections) for sample in samples] == [3, 2, 0]


def test_a_fiftyone_dataset_is_replaced_on_demand_only(
    boxes: Path, tmp_path: Path, samples: list[Any]
) -> None:
    words = f"rank --predictions {boxes} --out {tmp_path / 'f.csv'} --fiftyone there"
    assert "the FiftyOne dataset there exists: give another name, or --force" in refuse(words)
    assert not (tmp_path / "f.csv").exists()
    succeed(f"{words} --force")
    assert len(samples) == 3


def test_sizes_of_images_are_needed(tmp_path: Path, samples: list[Any]) -> None:
    with_error_model(in_image()).save(tmp_path / "i.safetensors")
    words = f"--predictions {tmp_path / 'i.safetensors'} --out {tmp_path / 'f.csv'}"
    error = refuse(f"rank {words} --fiftyone pool")
    assert "i.safetensors: holds boxes of images, but not the sizes" in error
    assert not (tmp_path / "f.csv").exists()
    assert not samples


def test_wrong_label_of_simulated_frames_comes_first(tmp_path: Path) -> None:
    """The frames of a function, one of whose labels is too large."""
    (tmp_path / "wrong.py").write_text(
        "from boxcov.data import simulated\n"
        "def frames(split):\n"
        "    frames = list(simulated.frames(seed=1000, count=2))\n"
        "    boxes, labels = (frames[1][1][0][name] for name in ('boxes', 'labels'))\n"
        "    near = boxes[:, :2].norm(dim=1).where(labels == 0, 1e9).argmin()\n"
        "    boxes[near, 3:6] *= 1.6\n"
        "    return frames\n"
    )
    out, rows = tmp_path / "f.csv", tmp_path / "b.csv"
    words = f"--data python:{tmp_path / 'wrong.py'}:frames --out {out} --boxes {rows}"
    succeed(f"rank --by disagreement {words}")
    assert table(out)[0]["frame"] == "1"
    first = table(rows)[0]
    assert (first["frame"], first["kind"], first["class"]) == ("1", "size", "car")


def test_files_keep_their_names(tmp_path: Path, samples: list[Any]) -> None:
    frames = simulated.frames(seed=1000, count=2)
    (tmp_path / "in").mkdir()
    for name, (clouds, _) in zip("ab", frames):
        clouds[0].numpy().tofile(tmp_path / "in" / f"{name}.bin")
    words = f"--source {tmp_path / 'in'} --points plain --out {tmp_path / 'f.csv'}"
    succeed(f"rank {words} --fiftyone pool")
    files = {str(path) for path in (tmp_path / "in").iterdir()}
    assert {row["frame"] for row in table(tmp_path / "f.csv")} == files
    assert {sample["filepath"] for sample in samples} == files
