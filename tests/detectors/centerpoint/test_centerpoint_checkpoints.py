"""Checkpoints of the three frameworks: names, layouts, conventions; and what is refused."""

from __future__ import annotations

import os
import pickle
import re
from ast import literal_eval
from dataclasses import replace
from math import pi
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import boxcov
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint import CenterPoint, Config
from boxcov.detectors.centerpoint.config import Pillars
from boxcov.detectors.centerpoint.decode import CellIndex
from boxcov.detectors.centerpoint.frameworks import layer_names
from helpers.centerpoint_cases import cloud, detector_of, frames, pillar_config, voxel_config
from helpers.centerpoint_foreign import LAYOUTS, Foreign

FRAMEWORKS = ("mmdet3d", "det3d", "openpcdet")
PILLARS = {
    "mmdet3d": Config.mmdet3d_pillar(),
    "det3d": Config.det3d_pillar(),
    "openpcdet": Config.openpcdet_pillar(),
}
FILES = {"mmdet3d": "mm", "det3d": "det3d", "openpcdet": "pcdet"}
each_framework = pytest.mark.parametrize("framework", FRAMEWORKS)


def full_config(framework, kind):
    return PILLARS[framework] if kind == "pillar" else Config.voxel(0.1, framework)


def wrapped(state, framework):
    """As the framework saves it."""
    state = dict(state)
    if framework == "openpcdet":
        return {
            "model_state": {**state, "global_step": torch.zeros(1, dtype=torch.long)},
            "epoch": 20,
            "it": 1,
        }
    return {"state_dict": state, "meta": {"epoch": 20}}


def saved(content, folder, name="x.pth"):
    path = folder / name
    torch.save(content, path)
    return path


def all_boxes(detector, clouds):
    """Boxes of every cell and task (tasks, cells, 9)."""
    rows, columns = detector.config.map_size
    row, column = (
        t.flatten()
        for t in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    )
    with torch.no_grad():
        raw = detector(clouds)
        out = []
        for t in range(len(detector.config.tasks)):
            where = CellIndex(torch.zeros_like(row), torch.full_like(row, t), row, column)
            selection = boxcov.Selection(where.frame, torch.ones(len(row)), where.task, where)
            out.append(detector.decode(raw, selection))
    return torch.stack(out), [maps["heatmap"] for maps in raw["tasks"]]


def same_boxes(a, b, slack=1e-4):
    yaw = (a[..., 6] - b[..., 6] + pi).remainder(2 * pi) - pi
    rest = [i for i in range(9) if i != 6]
    assert float(yaw.abs().max()) < slack
    torch.testing.assert_close(a[..., rest], b[..., rest], rtol=slack, atol=slack)


# names and shapes


@each_framework
@pytest.mark.parametrize("kind", ["pillar", "voxel"])
def test_the_key_lists_load_strictly(framework, kind, tmp_path):
    folder = (
        Path(os.environ.get("BOXCOV_SHARED", Path(__file__).parents[4] / "shared"))
        / "facts"
        / "centerpoint_keys"
    )
    if not folder.exists():
        pytest.skip(f"no key lists at {folder}: set BOXCOV_SHARED")
    lines = (folder / f"{FILES[framework]}_{kind}.txt").read_text().splitlines()
    shapes = {name: literal_eval(shape) for name, shape in (line.split("\t") for line in lines)}
    ours = Foreign(
        full_config(framework, kind),
        framework,
        "spconv2" if framework == "openpcdet" else "spconv1",
    ).state_dict()
    assert {name: tuple(t.shape) for name, t in ours.items()} == shapes
    state = {name: torch.full(shape, 0.01) for name, shape in shapes.items()}
    assert isinstance(centerpoint.load(saved(wrapped(state, framework), tmp_path)), CenterPoint)


@each_framework
@pytest.mark.parametrize("kind", ["pillar", "voxel"])
def test_full_size_checkpoints_load_strictly(framework, kind, tmp_path):
    state = Foreign(full_config(framework, kind), framework).state_dict()
    detector = centerpoint.load(saved(wrapped(state, framework), tmp_path))
    assert not detector.training
    assert detector.config == full_config(framework, kind)
    counts = (
        {"pillar": 414, "voxel": 504} if framework == "mmdet3d" else {"pillar": 457, "voxel": 557}
    )
    assert len(state) == counts[kind]


# the same boxes


@each_framework
@pytest.mark.parametrize("kind", ["one pfn", "two pfn", "dynamic", "voxel"])
def test_a_frameworks_network_gives_its_boxes_here(framework, kind, tmp_path):
    encoders = {
        "one pfn": Pillars(widths=(8,)),
        "two pfn": Pillars(widths=(8, 8), centre_z=False),
        "dynamic": Pillars(widths=(8, 8), padded=False, max_points=None, max_cells=None),
    }
    config = (
        voxel_config(voxel_size=(0.2, 0.2, 0.2))
        if kind == "voxel"
        else pillar_config(encoder=encoders[kind])
    )
    foreign = Foreign(config, framework).double()
    clouds = [cloud(config).double()]
    with torch.no_grad():
        maps = foreign(clouds)
    detector = centerpoint.load(
        saved(wrapped(foreign.state_dict(), framework), tmp_path), config
    ).double()
    boxes, heat = all_boxes(detector, clouds)
    same_boxes(boxes, torch.stack([foreign.boxes(task) for task in maps]))
    name = "heatmap" if framework == "mmdet3d" else "hm"
    for mine, task in zip(heat, maps):
        torch.testing.assert_close(mine, task[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_framework
def test_layouts_of_sparse_kernels_are_told_apart(framework, layout, tmp_path):
    config = voxel_config(voxel_size=(0.2, 0.2, 0.2))
    foreign = Foreign(config, framework, layout).double()
    clouds = [cloud(config, count=100).double()]
    with torch.no_grad():
        expected = torch.stack([foreign.boxes(task) for task in foreign(clouds)])
    detector = centerpoint.load(
        saved(wrapped(foreign.state_dict(), framework), tmp_path), config
    ).double()
    same_boxes(all_boxes(detector, clouds)[0], expected)


def exported(detector, framework, legacy=False):
    """A detector in the names, layouts and conventions of a framework: the loader's steps,
    backwards.
    """
    own, state = detector.state_dict(), {}
    generator = torch.Generator().manual_seed(0)
    for layer in layer_names(detector.config, framework):
        module = detector.get_submodule(layer.own)
        weight = own[f"{layer.own}.weight"]
        if hasattr(module, "kernel"):
            weight = weight.reshape(module.n_out, *module.kernel, module.n_in).permute(
                1, 2, 3, 4, 0
            )
        if framework == "openpcdet" and "deblocks" in layer.own and weight.shape[2:] == (1, 1):
            weight = weight.transpose(0, 1)
        state[f"{layer.foreign}.weight"] = weight
        if layer.own_norm is None:
            state[f"{layer.foreign}.bias"] = own[f"{layer.own}.bias"]
        else:
            for leaf in ("weight", "bias", "running_mean", "running_var"):
                state[f"{layer.foreign_norm}.{leaf}"] = own[f"{layer.own_norm}.{leaf}"]
            if framework != "mmdet3d" and ".linear" not in layer.own:
                bias = torch.randn(len(own[f"{layer.own_norm}.bias"]), generator=generator)
                state[f"{layer.foreign}.bias"] = bias
                state[f"{layer.foreign_norm}.running_mean"] = (
                    own[f"{layer.own_norm}.running_mean"] + bias
                )
    turned = framework == "det3d" or legacy
    for name, tensor in state.items():
        if re.search(r"\.rot\.[13]\.(weight|bias)$", name) and len(tensor) == 2:
            state[name] = (
                -tensor.flip(0)
                if turned
                else tensor.flip(0)
                if framework == "openpcdet"
                else tensor
            )
        if re.search(r"\.dim\.[13]\.(weight|bias)$", name) and len(tensor) == 3 and turned:
            state[name] = tensor[[1, 0, 2]]
    return state


@pytest.mark.parametrize("kind", ["pillar", "voxel"])
def test_one_network_through_all_conventions(kind, tmp_path):
    config = pillar_config() if kind == "pillar" else voxel_config()
    detector = detector_of(config)
    inputs = [cloud(config)]
    plain = detector.detect(inputs)
    for framework in FRAMEWORKS:
        path = saved(wrapped(exported(detector, framework), framework), tmp_path)
        found = centerpoint.load(path, config).detect(inputs)
        assert torch.equal(found.labels, plain.labels)
        same_boxes(found.boxes, plain.boxes)
    old = saved(
        {
            "state_dict": exported(detector, "mmdet3d", legacy=True),
            "meta": {"mmdet3d_version": "0.17.1"},
        },
        tmp_path,
    )
    same_boxes(centerpoint.load(old, config).detect(inputs).boxes, plain.boxes)
    bare = saved(exported(detector, "mmdet3d", legacy=True), tmp_path)
    same_boxes(centerpoint.load(bare, config, legacy=True).detect(inputs).boxes, plain.boxes)


@each_framework
def test_boxes_and_covariances_in_a_frameworks_convention(framework):
    boxes = torch.randn(4, 9, dtype=torch.float64)
    root = torch.randn(4, 9, 9, dtype=torch.float64)
    covariance = root @ root.mT

    def written(box):
        x, y, z, w, l, h, yaw, vx, vy = box.unbind()
        if framework == "det3d":
            return torch.stack([x, y, z, w, l, h, vx, vy, -yaw - pi / 2])
        return torch.stack([x, y, z - h / 2 if framework == "mmdet3d" else z, l, w, h, yaw, vx, vy])

    found, turned = centerpoint.to_framework(boxes, covariance, framework)
    torch.testing.assert_close(found, torch.stack([written(box) for box in boxes]))
    for box, before, after in zip(boxes, covariance, turned):
        J = torch.autograd.functional.jacobian(written, box)
        torch.testing.assert_close(after, J @ before @ J.T)


# boxcov's own files


@pytest.mark.parametrize("kind", ["pillar", "voxel"])
def test_own_files_go_round(kind, tmp_path):
    config = pillar_config() if kind == "pillar" else voxel_config()
    detector = detector_of(config)
    path = tmp_path / "own.safetensors"
    centerpoint.save(detector, path)
    again = centerpoint.load(path)
    assert again.config == config
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    for name, tensor in again.state_dict().items():
        before = detector.state_dict()[name]
        assert torch.equal(tensor, before.half().float() if before.dim() > 1 else before)
    centerpoint.save(again, path)  # half precision loses nothing twice
    posterior = boxcov.fit(again, frames(config, 1))
    assert (
        boxcov.ExactGLM(centerpoint.load(path), posterior)([cloud(config)])
        .covariance.isfinite()
        .all()
    )


def test_own_weights_with_other_rules(tmp_path):
    path = tmp_path / "own.safetensors"
    centerpoint.save(detector_of(pillar_config()), path)
    strict = replace(pillar_config(), reporting=replace(pillar_config().reporting, threshold=0.9))
    assert centerpoint.load(path, strict).config.reporting.threshold == 0.9


def test_the_small_one_takes_little_room(tmp_path):
    path = tmp_path / "small.safetensors"
    centerpoint.save(CenterPoint(Config.small()), path)
    assert path.stat().st_size <= 4e6


def test_the_name_of_the_packaged_weights(monkeypatch, tmp_path):
    monkeypatch.setattr("boxcov.detectors.centerpoint.checkpoints._WEIGHTS", tmp_path)
    with pytest.raises(boxcov.BoxcovError, match="small CenterPoint are not in this installation"):
        centerpoint.load("small")
    centerpoint.save(CenterPoint(pillar_config()), tmp_path / "small.safetensors")
    assert centerpoint.load("small").config == pillar_config()


# what is refused


class Evil:
    def __reduce__(self):
        return os.system, ("echo this must never run",)


def test_code_in_a_pickle_is_never_run(tmp_path, capfd):
    path = tmp_path / "evil.pth"
    path.write_bytes(pickle.dumps({"state_dict": Evil()}, protocol=2))
    with pytest.raises(boxcov.BoxcovError, match=r"evil\.pth: holds more than weights"):
        centerpoint.load(path)
    torch.save({"state_dict": {"a": torch.zeros(1)}, "hub": Evil()}, path)
    with pytest.raises(
        boxcov.BoxcovError,
        match=r"evil\.pth: holds more than weights \(posix\.system\), and boxcov runs no code",
    ):
        centerpoint.load(path)
    assert "never run" not in capfd.readouterr().out


def test_all_that_does_not_fit_is_named_at_once(tmp_path):
    config = pillar_config()
    state = exported(detector_of(config), "det3d")
    del state["bbox_head.tasks.0.reg.3.bias"]
    state["bbox_head.tasks.0.feature_adapt_cls.weight"] = torch.zeros(1)
    state["neck.blocks.0.1.weight"] = torch.zeros(7, 7, 3, 3)
    state["bbox_head.shared_conv.0.bias"] = torch.zeros(3)
    with pytest.raises(boxcov.BoxcovError) as error:
        centerpoint.load(saved(state, tmp_path), config)
    message = str(error.value)
    assert "1 missing: bbox_head.tasks.0.reg.3.bias" in message
    assert (
        "2 surplus: bbox_head.shared_conv.0.bias, bbox_head.tasks.0.feature_adapt_cls.weight"
        in message
    )
    assert "1 of another shape: neck.blocks.0.1.weight (7, 7, 3, 3) for (4, 8, 3, 3)" in message
    assert "x.pth" in message


def test_a_pillar_network_is_no_voxel_network(tmp_path):
    with pytest.raises(boxcov.BoxcovError, match="missing: pts_middle_encoder"):
        centerpoint.load(
            saved(exported(detector_of(pillar_config()), "mmdet3d"), tmp_path), voxel_config()
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"backbone.conv.weight": torch.zeros(1)},
            r"looked for names that start with pts_bbox_head\. \(mmdet3d\), .*found backbone.conv.weight",
        ),
        (
            {"state_dict": [1, 2]},
            "looked for a dict of tensors, alone or under state_dict, model_state or model, and found state_dict",
        ),
        ([torch.zeros(1)], "and found list"),
        ({}, "and found dict"),
    ],
)
def test_files_with_something_else_in_them(content, message, tmp_path):
    with pytest.raises(boxcov.BoxcovError, match=message):
        centerpoint.load(saved(content, tmp_path))


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
def test_damaged_and_missing_files(name, tmp_path):
    path = tmp_path / name
    with pytest.raises(
        boxcov.BoxcovError,
        match=r"no such file; give the path of a checkpoint, or the name .* small",
    ):
        centerpoint.load(path)
    path.write_bytes(b"not a checkpoint at all")
    with pytest.raises(boxcov.BoxcovError, match=f"{name}: "):
        centerpoint.load(path)


def test_a_truncated_checkpoint(tmp_path):
    path = saved(exported(detector_of(pillar_config()), "mmdet3d"), tmp_path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(boxcov.BoxcovError, match="not a checkpoint, or a damaged one"):
        centerpoint.load(path)


def test_weights_under_foreign_names_in_safetensors_and_from_several_gpus(tmp_path):
    config = pillar_config()
    detector = detector_of(config)
    state = exported(detector, "det3d")
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in state.items()},
        tmp_path / "x.safetensors",
    )
    spread = saved(
        {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path
    )
    inputs = [cloud(config)]
    for path in (tmp_path / "x.safetensors", spread):
        same_boxes(
            centerpoint.load(path, config).detect(inputs).boxes, detector.detect(inputs).boxes
        )


def test_values_beyond_half_precision_are_not_saved(tmp_path):
    detector = CenterPoint(pillar_config())
    with torch.no_grad():
        detector.head.shared[0].weight[0, 0, 0, 0] = 1e6
    with pytest.raises(
        boxcov.BoxcovError, match=r"head\.shared\.0\.weight has values too large for half precision"
    ):
        centerpoint.save(detector, tmp_path / "x.safetensors")
