from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from boxcov.data.coco.classes import CLASSES
from boxcov.detectors.yolox import SIZES, YOLOX, Config, load
from boxcov.errors import BoxcovError, BoxcovWarning
from helpers.yolox_cases import SMALL, images, nano, small


@pytest.mark.parametrize(
    ("name", "millions"),
    [("nano", 0.91), ("tiny", 5.06), ("s", 8.97), ("m", 25.33), ("l", 54.21), ("x", 99.07)],
)
def test_parameter_counts_equal_those_of_upstream(name: str, millions: float) -> None:
    with torch.device("meta"):
        detector = YOLOX(Config.named(name))
    assert round(sum(p.numel() for p in detector.parameters()) / 1e6, 2) == millions


def test_the_trained_nano_network_gives_what_its_onnx_file_gives() -> None:
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(nano() / "yolox_nano.onnx", options)
    detector = load(nano() / "yolox_nano_folded.safetensors")
    assert detector.classes == CLASSES
    for image in (
        images(1, 416, 416).float(),
        torch.linspace(0, 255, 3 * 416 * 416).reshape(1, 3, 416, 416).sin() * 100 + 114,
    ):
        expected = torch.from_numpy(
            session.run(None, {"images": image.numpy()})[0]
        )  # objectness and classes as probabilities
        with torch.no_grad():
            values = detector(image)["values"]
        torch.testing.assert_close(values[..., :4], expected[..., :4], rtol=0, atol=1e-4)
        torch.testing.assert_close(values[..., 4:].sigmoid(), expected[..., 4:], rtol=0, atol=1e-4)


def upstream_file(folder: Path, detector: nn.Module, pixels: float = 100.0, **more: object) -> Path:
    """Save a checkpoint; the first norm saw images with values of about ``pixels``."""
    norm = detector.backbone.backbone.stem.conv.bn
    if isinstance(norm, nn.BatchNorm2d):
        norm.running_var.mul_(pixels**2)
    path = folder / "yolox.pth"
    torch.save({"model": detector.state_dict(), **more}, path)
    return path


def test_a_network_for_normalised_images_is_seen(tmp_path: Path) -> None:
    path = upstream_file(tmp_path, small(), pixels=1.0)
    with pytest.warns(BoxcovWarning, match="trained on normalised images .* before 0.1.1"):
        load(path, classes=SMALL.classes)


@pytest.mark.parametrize("depthwise", [False, True])
def test_an_upstream_checkpoint_with_training_state(tmp_path: Path, depthwise: bool) -> None:
    detector = small(depthwise=depthwise, depth=2)
    optimiser = torch.optim.SGD(detector.parameters(), 0.1, momentum=0.9)
    path = upstream_file(
        tmp_path,
        detector,
        start_epoch=300,
        best_ap=np.float64(0.25),
        optimizer=optimiser.state_dict(),
    )
    loaded = load(path, classes=SMALL.classes, threshold=0.5, max_boxes=7).double()
    assert (
        loaded.config.width,
        loaded.config.depth,
        loaded.config.depthwise,
        loaded.config.norm,
    ) == (4, 2, depthwise, True)
    assert (loaded.config.threshold, loaded.config.max_boxes, loaded.training) == (0.5, 7, False)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(images())["values"], detector(images())["values"], rtol=1e-4, atol=1e-4
        )  # float32 in between


def folded(detector: YOLOX) -> dict[str, Tensor]:
    """The weights with each norm folded into the convolution before it, under short names."""
    state = detector.state_dict()
    out = {}
    for name, tensor in state.items():
        if ".bn." in name:
            continue
        norm = name.replace(".conv.weight", ".bn")
        if f"{norm}.weight" in state:
            scale = state[f"{norm}.weight"] / (state[f"{norm}.running_var"] + 1e-3).sqrt()
            out[name] = tensor * scale.reshape(-1, 1, 1, 1)
            out[name.replace(".weight", ".bias")] = (
                state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * scale
            )
        else:
            out[name] = tensor
    short = {
        "lateral_conv0": "lateral0",
        "C3_p4": "c3p4",
        "reduce_conv1": "reduce1",
        "C3_p3": "c3p3",
    }
    short |= {"bu_conv2": "bu2", "C3_n3": "c3n3", "bu_conv1": "bu1", "C3_n4": "c3n4"}

    def brief(name: str) -> str:
        words = (
            name.removeprefix("backbone.")
            .removeprefix("backbone.")
            .removeprefix("head.")
            .split(".")
        )
        return ".".join([short.get(words[0], words[0]), *words[1:]])

    return {brief(name): tensor for name, tensor in out.items()}


def test_folded_norms_give_the_same_network(tmp_path: Path) -> None:
    detector = small()
    save_file(folded(detector), tmp_path / "folded.safetensors")
    loaded = load(tmp_path / "folded.safetensors", classes=SMALL.classes).double()
    assert not loaded.config.norm
    assert not any(isinstance(module, nn.BatchNorm2d) for module in loaded.modules())
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(images())["values"], detector(images())["values"], rtol=1e-4, atol=1e-4
        )


def test_default_class_names(tmp_path: Path) -> None:
    path = upstream_file(tmp_path, small())
    assert load(path).classes == ("class 0", "class 1", "class 2")
    with pytest.raises(
        BoxcovError, match=r"yolox\.pth: a network for 3 classes, but 2 names were given"
    ):
        load(path, classes=["cat", "dog"])


def released_nano(folder: Path, name: str) -> Path:
    """Save a network of the size and the classes of the released YOLOX-Nano."""
    path = folder / f"{name}.pth"
    torch.save({"model": YOLOX(Config.named("nano")).state_dict()}, path)
    return path


def test_80_classes_without_names_are_warned_about(tmp_path: Path) -> None:
    """They may be any 80 classes, and the images of any size."""
    path = released_nano(tmp_path, "latest_ckpt")
    with pytest.warns(BoxcovWarning, match=r"latest_ckpt\.pth: .* 80 classes.* classes="):
        detector = load(path)
    assert (detector.classes, detector.trained_size) == (CLASSES, None)
    load(path, classes=CLASSES)  # given, so no guess


def test_the_released_file_is_known_by_its_name(tmp_path: Path) -> None:
    for name in ("yolox_nano", "yolox_nano_folded"):
        detector = load(released_nano(tmp_path, name))
        assert (detector.classes, detector.trained_size) == (CLASSES, 416)
    for name in ("yolox_s", "yolox_nano_mine"):  # another network, and perhaps another training
        with pytest.warns(BoxcovWarning, match="80 classes"):
            assert load(released_nano(tmp_path, name)).trained_size is None
    own = [f"thing {i}" for i in range(80)]
    assert load(released_nano(tmp_path, "yolox_nano"), classes=own).trained_size is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("head.reg_preds.1.weight"), "1 missing: head.reg_preds.1.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "1 surplus: extra"),
        (
            lambda state: state.update({"head.obj_preds.0.bias": torch.zeros(2)}),
            r"head.obj_preds.0.bias \(2,\) for \(1,\)",
        ),
        (
            lambda state: state.pop("backbone.backbone.stem.conv.conv.weight"),
            "no YOLOX that boxcov knows",
        ),
        (lambda state: state.pop("head.cls_preds.0.weight"), "no YOLOX that boxcov knows"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, damage, message: str) -> None:
    state = dict(small().state_dict())
    damage(state)
    torch.save({"model": state}, tmp_path / "broken.pth")
    with pytest.raises(BoxcovError, match=rf"broken\.pth: .*{message}"):
        load(tmp_path / "broken.pth")


def test_lying_counts_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    state = {name: tensor.float() for name, tensor in small().state_dict().items()}
    many = {f"backbone.C3_p4.m.{i}.conv1.conv.weight": torch.zeros(1) for i in range(15_000)}
    cases = {
        "classes": {"head.cls_preds.0.weight": torch.zeros(1 << 20, 1, 1, 1)},
        "none": {"head.cls_preds.0.weight": torch.zeros(10**9, 0, 1, 1)},
        "depth": many,
        "tensors": {f"x.{i}": torch.zeros(1) for i in range(20_001)},
    }
    for name, claims in cases.items():
        save_file({**state, **claims}, tmp_path / f"{name}.safetensors")
        with pytest.raises(BoxcovError, match=rf"{name}\.safetensors: .*(holds no|at most)"):
            load(tmp_path / f"{name}.safetensors")


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "text.pth").write_text("hello")
    torch.save({"model": {}}, tmp_path / "empty.pth")
    torch.save({"model": small()}, tmp_path / "whole.pth")  # a pickled module: code
    for name, message in (
        ("text", "not a checkpoint"),
        ("empty", "no weights found"),
        ("whole", "runs no code"),
        ("absent", "no such file"),
    ):
        with pytest.raises(BoxcovError, match=rf"{name}\.pth: .*{message}"):
            load(tmp_path / f"{name}.pth")


def test_names_and_settings_out_of_range() -> None:
    with pytest.raises(BoxcovError, match="no YOLOX 'huge': there are nano, tiny"):
        Config.named("huge")
    for changes in ({"threshold": 1.5}, {"overlap": 0.0}, {"max_boxes": 0}):
        with pytest.raises(BoxcovError, match="threshold must be"):
            Config(16, 1, **changes)
    with pytest.raises(BoxcovError, match="a width and a depth of at least 1 and classes"):
        Config(0, 1)
    assert [Config.named(name).size for name in SIZES] == [416, 416, 640, 640, 640, 640]


def test_images_of_a_wrong_shape_are_refused() -> None:
    for shape in ((1, 3, 60, 64), (1, 3, 0, 64), (1, 1, 64, 64), (3, 64, 64)):
        with pytest.raises(BoxcovError, match="sides divisible by 32"):
            small()(torch.zeros(shape, dtype=torch.float64))
    whole = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    for given, found in ((whole, "torch.uint8"), ([whole], "list"), (whole.numpy(), "ndarray")):
        with pytest.raises(BoxcovError, match=f"must be a tensor of floats .* got {found}"):
            small()(given)
