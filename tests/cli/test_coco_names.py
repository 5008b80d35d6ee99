"""The command line on images: --detector yolox:FILE, --data coco:ROOT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from boxcov import Detections
from boxcov.data import coco
from boxcov.detectors.yolox import YOLOX, Config
from boxcov.errors import BoxcovError
from boxcov.pipeline import evaluate as evaluation
from boxcov.pipeline import fit as fitting
from boxcov.pipeline import predict as prediction
from boxcov.pipeline.records import records_of
from boxcov.pipeline.sources import Source, detector_named, frames_named, unseen_split
from helpers.coco_cases import coco_root, edited


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


@pytest.mark.filterwarnings(
    "ignore::boxcov.errors.BoxcovWarning"
)  # three objects do not reach all levels
def test_from_a_fit_to_coco_s_results(root: Path, weights: Path, tmp_path: Path) -> None:
    source = Source(f"coco:{root}@64", "val2017")
    fitting.run(tmp_path / "p.safetensors", f"yolox:{weights}", source, n_data=100)
    how = prediction.How("exact", tmp_path / "p.safetensors")
    for format, name in (("coco", "found.json"), ("native", "found.safetensors")):
        report = prediction.run(tmp_path / name, f"yolox:{weights}", how, source, format=format)
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
    assert records_of(native, frames).fields == ("x1", "y1", "x2", "y2")
    study = evaluation.study_of([tmp_path / "found.safetensors"], out=tmp_path / "page.html")
    assert [
        row["method"] for row in evaluation.rows_of(study, replicates=3) if row["kind"] == "method"
    ] == ["found"]


def test_words_for_images(root: Path, weights: Path) -> None:
    assert detector_named(f"yolox:{weights}").box_fields == ("x1", "y1", "x2", "y2")
    part = frames_named(f"coco:{root}", "val2017[1:]", classes=coco.CLASSES)
    assert (len(part), part[0][0].shape) == (2, (1, 3, 416, 416))
    assert unseen_split("coco:ROOT") == "val2017"
    with pytest.raises(BoxcovError, match="no detector 'yolox:': give centerpoint:small"):
        detector_named("yolox:")
    with pytest.raises(
        BoxcovError, match=r"coco:.*, split val2017: labels mean person, .*; the detector knows car"
    ):
        frames_named(f"coco:{root}", "val2017", classes=("car",))
    with pytest.raises(
        BoxcovError, match="give simulated:SCENARIO, nuscenes:ROOT, kitti:ROOT or coco:ROOT"
    ):
        frames_named("coco:")
