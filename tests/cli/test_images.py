"""The command line on images: --detector yolox:FILE, --data coco:ROOT."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import Detections
from boxcov.data import coco
from boxcov.detectors.yolox import YOLOX, Config
from boxcov.errors import BoxcovError
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.pipeline import evaluate as evaluation
from boxcov.pipeline import fit as fitting
from boxcov.pipeline import predict as prediction
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.options import (
    DataOptions,
    EstimatorOptions,
    EvaluateCommand,
    FitCommand,
    PredictCommand,
)
from boxcov.pipeline.source import default_split
from helpers.coco_cases import SIZES, coco_root, edited
from helpers.command_line import boxcov, refuse, succeed

pytestmark = pytest.mark.filterwarnings("ignore:.*does not name its 80 classes")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = coco_root(tmp_path / "set")
    edited(
        root,
        lambda content: content.update(
            categories=[{"id": i + 1, "name": name} for i, name in enumerate(coco.CLASSES)]
        ),
    )
    return root


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    detector = YOLOX(Config(width=4, depth=1, depthwise=True))
    for layer in (*detector.head.cls_preds, *detector.head.obj_preds):
        layer.bias.data.fill_(1.0)
    torch.save({"model": detector.state_dict()}, tmp_path / "tiny.pth")
    return tmp_path / "tiny.pth"


@pytest.mark.parametrize("is_data", [False, True])
@pytest.mark.filterwarnings("ignore::boxcov.errors.BoxcovWarning")
def test_rank_gives_images_to_fiftyone(
    root: Path, weights: Path, tmp_path: Path, samples: list[Any], is_data: bool
) -> None:
    """Boxes are relative to the files, whose sizes differ from that of the network's input.

    Those of data are in pixels of the input.
    """
    posterior, boxes = tmp_path / "p.safetensors", tmp_path / "b.csv"
    source = DataOptions(f"coco:{root}@64", "val2017")
    detector = f"yolox:{weights}"
    fitting.run(FitCommand(out=posterior, detector=detector, source=source, n_data=100))
    folder = root / "val2017"
    where = f"--data {source.data} --split val2017" if is_data else f"--source {folder} --size 64"
    words = f"--detector {detector} --posterior {posterior} {where}"
    out = f"--out {tmp_path / 'f.csv'} --boxes {boxes} --fiftyone pool"
    succeed(f"rank --by epistemic {words} {out}")
    with boxes.open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    for sample in samples:
        assert Path(sample["filepath"]).parent == folder
        width, height = SIZES[int(Path(sample["filepath"]).stem)]
        if is_data:
            width, height = (64 / max(width, height) * side for side in (width, height))
        there = [one.bounding_box for one in sample["boxcov"].detections]
        own = [row for row in rows if row["frame"] == sample["filepath"]]
        expected = [
            (x1 / width, y1 / height, (x2 - x1) / width, (y2 - y1) / height)
            for x1, y1, x2, y2 in ([float(row[n]) for n in ("x1", "y1", "x2", "y2")] for row in own)
        ]
        # the table goes by value, the sample by score
        np.testing.assert_allclose(np.sort(expected, axis=0), np.sort(there, axis=0), atol=1e-4)


# three objects do not use all levels
@pytest.mark.filterwarnings("ignore::boxcov.errors.BoxcovWarning")
def test_fit_predict_and_evaluate_on_images(root: Path, weights: Path, tmp_path: Path) -> None:
    source, detector = DataOptions(f"coco:{root}@64", "val2017"), f"yolox:{weights}"
    posterior = tmp_path / "p.safetensors"
    fitting.run(FitCommand(out=posterior, detector=detector, source=source, n_data=100))
    estimator = EstimatorOptions("exact", posterior)
    for format, name in (("coco", "found.json"), ("native", "found.safetensors")):
        options = PredictCommand(
            out=tmp_path / name,
            detector=detector,
            source=source,
            estimator=estimator,
            format=format,
        )
        report = prediction.run(options)
    assert report["frames"] == 3
    frames = coco.frames(root, size=64)
    native = Detections.load(tmp_path / "found.safetensors")
    again = coco.read_results(tmp_path / "found.json", frames)
    assert sum(map(len, again)) == len(native) > 0
    torch.testing.assert_close(
        torch.cat([f.covariance for f in again]), native.covariance.double(), rtol=1e-4, atol=1e-6
    )
    assert (
        json.loads((tmp_path / "found.meta.json").read_text())["uncertainty"]["method"] == "exact"
    )
    assert match_detections(native, GroundTruth.from_frames(frames)).fields == (
        "x1",
        "y1",
        "x2",
        "y2",
    )
    _, rows = evaluation.run(
        EvaluateCommand(
            predictions=(tmp_path / "found.safetensors",), out=tmp_path / "page.html", replicates=3
        )
    )
    assert [row["method"] for row in rows if row["kind"] == "method"] == ["found"]


@pytest.mark.filterwarnings("ignore::boxcov.errors.BoxcovWarning")
def test_a_posterior_names_the_detector_that_is_missing(
    root: Path, weights: Path, tmp_path: Path
) -> None:
    posterior, detector = tmp_path / "p.safetensors", f"yolox:{weights}"
    source = DataOptions(f"coco:{root}@64", "val2017")
    fitting.run(FitCommand(out=posterior, detector=detector, source=source, n_data=100))
    data = f"--data {source.data} --split val2017"
    for command in (
        f"predict {data} --out {tmp_path / 'd.safetensors'}",
        f"rank {data} --out {tmp_path / 'd.csv'}",
        f"calibrate {data} --out {tmp_path / 'c.safetensors'}",
        f"stream --source {root / 'val2017'}",
        f"bench {data.split(' --split')[0]}",
        f"export --out {tmp_path / 'n.onnx'}",
    ):
        error = refuse(f"{command} --posterior {posterior}")
        assert error.splitlines()[-1] == (
            f"boxcov: {posterior}: a posterior of {detector}, and without --detector the detector "
            f"is centerpoint:small: give --detector {detector}"
        )


@pytest.mark.filterwarnings("always::boxcov.errors.BoxcovWarning")
def test_a_count_above_the_frames_is_warned_of(root: Path, weights: Path, tmp_path: Path) -> None:
    posterior, boxes = tmp_path / "p.safetensors", tmp_path / "d.safetensors"
    data, detector = f"--data coco:{root}@64 --split val2017", f"--detector yolox:{weights}"
    few = f"boxcov: coco:{root}@64 val2017: there are 3 frames, fewer than --count 9\n"
    nms = f"predict {detector} --method nms --out {boxes} --force"
    fit = f"fit {detector} --out {posterior} --force"
    for count in (3, 9):
        for command in (fit, nms, f"evaluate {boxes}"):
            error = succeed(f"{command} {data} --count {count}").err
            assert (few in error) == (count == 9)
    calibrate = f"calibrate {detector} --posterior {posterior} --out {posterior} --force {data}"
    assert few in boxcov(f"{calibrate} --count 9").err  # too few for its report
    done = succeed(f"{nms} --source {root / 'val2017'} --size 64 --count 9")
    assert f"boxcov: {root / 'val2017'}: there are 3 frames, fewer than --count 9\n" in done.err


def test_data_and_detector_names_for_images(root: Path, weights: Path) -> None:
    assert load_detector(f"yolox:{weights}").box_fields == ("x1", "y1", "x2", "y2")
    part = load_frames(DataOptions(f"coco:{root}", "val2017[1:]"), classes=coco.CLASSES)
    assert (len(part), part[0][0].shape) == (2, (1, 3, 416, 416))
    assert default_split("coco:ROOT", "predict") == "val2017"
    with pytest.raises(BoxcovError, match="no detector 'yolox:': give centerpoint:small"):
        load_detector("yolox:")
    with pytest.raises(
        BoxcovError,
        match=r"coco:.*, split val2017: the labels are person, .*; the detector has car",
    ):
        load_frames(DataOptions(f"coco:{root}", "val2017"), classes=("car",))
    with pytest.raises(
        BoxcovError, match="give simulated:SCENARIO, nuscenes:ROOT, kitti:ROOT, coco:ROOT, python"
    ):
        load_frames(DataOptions("coco:"))
