"""torchvision's detectors by name, with the weights of a file; skipped without torchvision."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import helpers.torchvision_cases  # noqa: F401  (skips without torchvision)
from boxcov import BoxcovError, BoxcovWarning
from boxcov.data.coco import CLASSES
from boxcov.detectors.torchvision import RetinaNet, checkpoints, load
from boxcov.pipeline.detectors import load_detector, match_source
from boxcov.pipeline.options import DataOptions

SSD = "ssdlite320_mobilenet_v3_large"
pytestmark = pytest.mark.filterwarnings("ignore:.*does not name the classes of its 91 outputs")


def saved(name: str, path: Path, classes: int = 91) -> dict[str, Tensor]:
    from torchvision.models import get_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_model(name, weights=None, weights_backbone=None, num_classes=classes).eval()
    torch.save(model.state_dict(), path)
    return model.state_dict()


def test_weights_of_a_file(tmp_path: Path) -> None:
    state = saved(SSD, tmp_path / "w.pth")
    detector = load_detector(f"torchvision:{SSD}:{tmp_path}/w.pth")
    assert detector.classes == CLASSES
    assert not detector.training
    assert all(torch.equal(t, state[k]) for k, t in detector.model.state_dict().items())
    image = torch.randint(0, 256, (1, 3, 64, 64)).float()
    with torch.no_grad():
        theirs = detector.model([image[0].flip(0) / 255])[0]
    found = detector.detect(image)
    assert set(map(tuple, found.boxes.tolist())) <= set(map(tuple, theirs["boxes"].tolist()))


@pytest.mark.filterwarnings("error::boxcov.errors.BoxcovWarning")
def test_91_outputs_without_names_are_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(SSD, tmp_path / "w.pth")
    with pytest.warns(BoxcovWarning, match=r"w\.pth: .* 91 outputs.* classes="):
        assert load(f"{SSD}:{tmp_path}/w.pth").classes == CLASSES
    assert load(f"{SSD}:{tmp_path}/w.pth", classes={"cow": 5}).classes == ("cow",)
    monkeypatch.setattr(checkpoints, "_published_name", lambda *given: SSD)
    assert load(f"{SSD}:{tmp_path}/w.pth").classes == CLASSES


def test_images_keep_their_size(tmp_path: Path) -> None:
    saved(SSD, tmp_path / "w.pth")
    detector = load(f"{SSD}:{tmp_path}/w.pth")
    assert match_source(DataOptions("coco:ROOT"), detector).data == "coco:ROOT@whole"
    assert match_source(DataOptions("coco:ROOT@640"), detector).data == "coco:ROOT@640"


def test_the_number_of_classes_is_that_of_the_weights(tmp_path: Path) -> None:
    saved(SSD, tmp_path / "w.pth", classes=4)
    assert load(f"{SSD}:{tmp_path}/w.pth").classes == ("1", "2", "3")


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BoxcovError, match=r"'retinanet_resnet5' \(did you mean 'retinanet_resn"):
        load("retinanet_resnet5")
    with pytest.raises(BoxcovError, match=r"no\.pth: no such file; give the weights of a ssdlite"):
        load(f"{SSD}:{tmp_path}/no.pth")
    saved(SSD, tmp_path / "w.pth")
    with pytest.raises(BoxcovError, match=r"weights do not fit a fcos_resnet50_fpn. .* missing"):
        load(f"fcos_resnet50_fpn:{tmp_path}/w.pth")


def test_published_weights_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    monkeypatch.setattr("torch.hub.get_dir", lambda: "nowhere")
    monkeypatch.setattr("os.makedirs", lambda *given, **more: None)
    with pytest.raises(BoxcovError, match=rf"no network.*bring the file https.* torchvision:{SSD}"):
        load(SSD)


def test_eps_of_frozen_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state dict does not hold it, and torchvision's published weights have another."""
    path, name = tmp_path / "w.pth", "retinanet_resnet50_fpn"
    state = saved(name, path)
    frozen = {k: t for k, t in state.items() if not k.endswith("num_batches_tracked")}
    torch.save(frozen, path)
    with pytest.warns(BoxcovWarning, match="does not say eps of its frozen norms: 1e-5 is used"):
        detector = load(f"{name}:{path}")
    assert isinstance(detector, RetinaNet)
    assert detector.model.backbone.body.bn1.eps == 1e-5
    monkeypatch.setattr(checkpoints, "_published_name", lambda *given: name)
    assert load(f"{name}:{path}").model.backbone.body.bn1.eps == 0


def test_weights_of_a_network_with_the_same_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two differ in the size of their images, which the weights do not tell."""
    path, name = tmp_path / "w.pth", "fasterrcnn_mobilenet_v3_large_fpn"
    saved(name, path)
    load(f"{name}:{path}")  # weights of one's own
    monkeypatch.setattr(checkpoints, "_published_name", lambda *given: f"{name[:-3]}320_fpn")
    with pytest.raises(BoxcovError, match=r"torchvision's weights of .*_320_fpn: give torchvision"):
        load(f"{name}:{path}")


def test_the_network_of_a_published_file(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(b"weights")
    start = hashlib.sha256(b"weights").hexdigest()[:8]
    urls = {
        "a": ["https://x/a-00000000.pth"],
        "b": ["https://x/b-1.pth", f"https://x/b-{start}.pth"],
    }
    published = {n: [SimpleNamespace(url=url) for url in each] for n, each in urls.items()}
    assert checkpoints._published_name(path, published) == "b"
    path.write_bytes(b"others")
    assert checkpoints._published_name(path, published) is None
