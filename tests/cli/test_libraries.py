"""Models of torchvision and Ultralytics on the command line; skipped where they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import helpers.torchvision_cases  # noqa: F401  (skips without torchvision)
from boxcov import Detections
from boxcov.data import coco
from boxcov.pipeline.detectors import load_detector
from helpers.coco_cases import coco_root, edited
from helpers.command_line import boxcov, refuse, succeed

SSD = "ssdlite320_mobilenet_v3_large"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = coco_root(tmp_path_factory.mktemp("data") / "set")
    names = [{"id": i + 1, "name": name} for i, name in enumerate(coco.CLASSES)]
    edited(root, lambda content: content.update(categories=names))
    return root


@pytest.fixture(scope="module", params=["torchvision", "ultralytics"])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if request.param == "torchvision":
            from torchvision.models import get_model

            model = get_model(SSD, weights=None, weights_backbone=None)
            for level in model.head.classification_head.module_list:
                level[-1].bias.view(-1, 91)[:, 1] += 6  # everything is a person
            torch.save(model.state_dict(), folder / "w.pth")
            return f"--detector torchvision:{SSD}:{folder}/w.pth"
        ultralytics = pytest.importorskip("ultralytics")
        whole = ultralytics.YOLO("yolov8n.yaml", verbose=False)
        for level in whole.model.model[-1].cv3:
            level[-1].bias.fill_(1.0)
        whole.model.names = dict(enumerate(coco.CLASSES))
        whole.save(folder / "y.pt")
        return f"--detector ultralytics:{folder}/y.pt"


@pytest.mark.filterwarnings("ignore::boxcov.errors.BoxcovWarning")  # three objects train few cells
def test_fit_and_predict(words: str, root: Path, tmp_path: Path) -> None:
    data = f"--data coco:{root}@64 --split val2017"
    succeed(f"fit {words} {data} --count 2 --n-data 100 --out {tmp_path}/p.safetensors")
    done = succeed(
        f"predict {words} {data} --count 1 --posterior {tmp_path}/p.safetensors --json "
        f"--out {tmp_path}/found.safetensors"
    )
    assert done.report["frames"] == 1
    found = Detections.load(tmp_path / "found.safetensors")
    detector = load_detector(words.removeprefix("--detector "))
    plain = detector.detect(coco.frames(root, "val2017", 64)[0][0])
    assert len(found) == len(plain) > 0
    assert torch.equal(found.boxes, plain.boxes)
    assert bool((found.uncertainty > 0).any())


def test_a_name_that_does_not_exist() -> None:
    done = boxcov("check --detector torchvison:ssd --data coco:nowhere")
    assert done.code != 0
    assert "did you mean 'torchvision'?" in done.err
    error = refuse("check --detector torchvision:retinanet_resnet5 --data coco:nowhere")
    assert "did you mean 'retinanet_resnet50_fpn'?" in error
