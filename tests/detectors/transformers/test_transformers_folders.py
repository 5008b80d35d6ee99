"""Transformers models from folders: images, the command line, invalid folders."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from boxcov import BoxcovError, BoxcovWarning
from boxcov.data import coco
from boxcov.detectors.transformers import QueryDetector, load, wrap
from boxcov.pipeline import fit as fitting
from boxcov.pipeline import predict as prediction
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.options import DataOptions, EstimatorOptions, FitCommand, PredictCommand
from helpers.coco_cases import coco_root
from helpers.transformers_cases import MODELS, PROCESSORS, made, pixels, yolos


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def detector(name: str) -> QueryDetector:
    return made(name)


@pytest.fixture(scope="module")
def folder(name: str, detector: QueryDetector, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(name)
    detector.model.save_pretrained(path)
    size = (
        {"height": 64, "width": 96}
        if name.startswith("rt")
        else {"shortest_edge": 64, "longest_edge": 96}
    )
    getattr(transformers, PROCESSORS[name])(size=size).save_pretrained(path)
    return path


def test_a_folder_gives_the_model_and_its_image_processor(
    name: str, detector: QueryDetector, folder: Path
) -> None:
    loaded = load(folder, threshold=detector.threshold)
    assert not loaded.training
    image = torch.randint(
        0, 256, (1, 3, 40, 70), generator=torch.Generator().manual_seed(0)
    ).float()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    given = processor(images=image[0].flip(0).permute(1, 2, 0).byte().numpy(), return_tensors="pt")
    with torch.no_grad():
        out = detector.model(**given)
    theirs = processor.post_process_object_detection(
        out, threshold=detector.threshold, target_sizes=[(40, 70)]
    )[0]
    found = loaded.detect(image)
    known = theirs["labels"] > 0
    assert len(found) > 1
    assert torch.equal(found.boxes, theirs["boxes"][known])
    plain = load(folder, images=False, threshold=detector.threshold)
    assert torch.equal(plain.detect(pixels()).boxes, detector.detect(pixels()).boxes)
    with pytest.raises(BoxcovError, match="this detector has an image processor"):
        loaded({"pixel_values": pixels()})


def test_from_a_fit_to_coco_s_results(folder: Path, tmp_path: Path) -> None:
    root = coco_root(tmp_path / "set")
    source = DataOptions(f"coco:{root}@whole", "val2017")
    words = f"transformers:{folder}"
    posterior = tmp_path / "p.safetensors"
    fitting.run(FitCommand(out=posterior, detector=words, source=source, n_data=100))
    estimator = EstimatorOptions("exact", posterior)
    for format, out in (("coco", "found.json"), ("native", "found.safetensors")):
        options = PredictCommand(
            out=tmp_path / out, detector=words, source=source, estimator=estimator, format=format
        )
        report = prediction.run(options)
    assert report["frames"] == 3
    frames = coco.frames(root, size=None)
    assert [x.shape[2:] for x, _ in frames] == [(50, 100), (80, 40), (64, 64)]
    assert frames[0][1][0]["boxes"].tolist()[0] == [10, 5, 30, 35]
    entries = json.loads((tmp_path / "found.json").read_text())
    first = load_detector(words).detect(frames[0][0])
    box = next(entry["bbox"] for entry in entries if entry["image_id"] == 11)
    torch.testing.assert_close(torch.tensor(box[:2]), first.boxes[0, :2], rtol=1e-5, atol=1e-4)


def test_the_example_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "guide" / "libraries.md").read_text()
    code = re.search(r"## transformers: .*?```py\n(.*?)```", page, re.DOTALL)[1]
    yolos().save_pretrained(tmp_path / "detr-resnet-50")
    transformers.YolosImageProcessorPil(
        size={"shortest_edge": 64, "longest_edge": 96}
    ).save_pretrained(tmp_path / "detr-resnet-50")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"model": yolos()}
    exec(code, scope)
    frames = coco.frames(coco_root(tmp_path / "COCO"), size=None)
    loaded = scope["transformers"].load("detr-resnet-50")
    for detector, inputs in ((loaded, frames[0][0]), (scope["detector"], pixels())):
        assert detector.detect(inputs).boxes.shape[1] == 4


def test_invalid_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sound"
    yolos().save_pretrained(folder)

    def changed(change: Any) -> Path:
        path = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, path)
        change(path)
        return path

    def edited(path: Path, **entries: Any) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **entries}))

    weights = "model.safetensors"
    cases = [
        (changed(lambda p: (p / "config.json").unlink()), "config.json: no such file"),
        (
            changed(lambda p: (p / "config.json").write_text("{")),
            "config.json: not a JSON file",
        ),
        (
            changed(lambda p: edited(p, architectures=["LlamaForCausalLM"])),
            r"its architectures are \['LlamaForCausalLM'\]; supported are Detr",
        ),
        (changed(lambda p: edited(p, architectures=None)), "its architectures are None"),
        (changed(lambda p: edited(p, architectures=[["X"]])), r"its architectures are \[\['X'\]\]"),
        (
            changed(lambda p: (p / weights).rename(p / "pytorch_model.bin")),
            "no safetensors file; pickled weights are not read",
        ),
        (
            changed(lambda p: (p / weights).write_bytes((p / weights).read_bytes()[:2000])),
            "not a valid .* folder",
        ),
        (
            changed(
                lambda p: edited(p, id2label={str(i): str(i) for i in range(9)}, label2id=None)
            ),
            "not a valid|do not match",
        ),
        (
            changed(lambda p: (p / "preprocessor_config.json").write_text("[]")),
            "not a valid .* folder",
        ),
    ]
    for path, message in cases:
        with pytest.raises(BoxcovError, match=message) as error:
            load(path)
        assert str(path) in str(error.value)


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    yolos().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["bbox_predictor.layers.0.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BoxcovError, match=r"1 missing: bbox_predictor\.layers\.0\.weight"):
        load(tmp_path)


def test_layers_that_the_config_does_not_have_are_named(tmp_path: Path) -> None:
    made("detr").model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["decoder_layers"] > 1
    (tmp_path / "config.json").write_text(json.dumps({**config, "decoder_layers": 1}))
    with pytest.raises(BoxcovError, match=r"do not match config\.json\. \d+ surplus: .*decoder"):
        load(tmp_path)


def test_a_folder_without_an_image_processor_is_warned_about(tmp_path: Path) -> None:
    yolos().save_pretrained(tmp_path)
    with pytest.warns(BoxcovWarning, match="no preprocessor_config.json, so images are prepared"):
        load(tmp_path)
    load(tmp_path, images=False)


def test_without_transformers_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yolos().save_pretrained(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(
        BoxcovError, match="transformers is not installed: pip install transformers"
    ):
        load(tmp_path)


def test_a_model_of_another_kind() -> None:
    with pytest.raises(BoxcovError, match="a SimpleNamespace is not supported: use Detr"):
        wrap(SimpleNamespace())
