"""Checkpoints of the three frameworks: names, layouts and conventions."""

from __future__ import annotations

import os
from ast import literal_eval
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import boxcov
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.centerpoint.config import Pillars
from boxcov.detectors.centerpoint.decode import CellIndex
from boxcov.detectors.centerpoint.upstream_config import named_config
from helpers.centerpoint_cases import cloud, detector_of, pillar_config, voxel_config
from helpers.centerpoint_files import assert_same_boxes, exported, saved
from helpers.centerpoint_foreign import LAYOUTS, Foreign

FRAMEWORKS = ("mmdet3d", "det3d", "openpcdet")
NAMES = {"pillar": "pillar02", "voxel": "voxel01"}
FILES = {"mmdet3d": "mm", "det3d": "det3d", "openpcdet": "pcdet"}
each_framework = pytest.mark.parametrize("framework", FRAMEWORKS)


def full_config(framework, kind):
    return named_config(NAMES[kind], framework)


def wrapped(state, framework):
    """Return the weights as the framework stores them in a file."""
    state = dict(state)
    if framework == "openpcdet":
        return {
            "model_state": {**state, "global_step": torch.zeros(1, dtype=torch.long)},
            "epoch": 20,
            "it": 1,
        }
    return {"state_dict": state, "meta": {"epoch": 20, "mmdet3d_version": "1.4.0"}}


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
    path = saved(wrapped(state, framework), tmp_path)
    assert isinstance(centerpoint.load(path, NAMES[kind]), CenterPoint)


@each_framework
@pytest.mark.parametrize("kind", ["pillar", "voxel"])
def test_full_size_checkpoints_load_strictly(framework, kind, tmp_path):
    state = Foreign(full_config(framework, kind), framework).state_dict()
    detector = centerpoint.load(saved(wrapped(state, framework), tmp_path), NAMES[kind])
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
        "dynamic": Pillars((8, 8), padded=False, max_points=None, max_cells=None, any_height=True),
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
    assert_same_boxes(boxes, torch.stack([foreign.boxes(task) for task in maps]))
    name = "heatmap" if framework == "mmdet3d" else "hm"
    for mine, task in zip(heat, maps):
        torch.testing.assert_close(mine, task[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_framework
def test_the_layout_of_sparse_kernels_is_recognised(framework, layout, tmp_path):
    config = voxel_config(voxel_size=(0.2, 0.2, 0.2))
    foreign = Foreign(config, framework, layout).double()
    clouds = [cloud(config, count=100).double()]
    with torch.no_grad():
        expected = torch.stack([foreign.boxes(task) for task in foreign(clouds)])
    detector = centerpoint.load(
        saved(wrapped(foreign.state_dict(), framework), tmp_path), config
    ).double()
    assert_same_boxes(all_boxes(detector, clouds)[0], expected)


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
        assert_same_boxes(found.boxes, plain.boxes)
    old = saved(
        {
            "state_dict": exported(detector, "mmdet3d", legacy=True),
            "meta": {"mmdet3d_version": "0.17.1"},
        },
        tmp_path,
    )
    assert_same_boxes(centerpoint.load(old, config).detect(inputs).boxes, plain.boxes)
    bare = saved(exported(detector, "mmdet3d", legacy=True), tmp_path)
    # mmdetection3d before 1.0 had 10 point features
    told = pytest.warns(boxcov.BoxcovWarning, match="11 point features")
    with told if kind == "pillar" else nullcontext():
        found = centerpoint.load(bare, config, legacy=True).detect(inputs)
    assert_same_boxes(found.boxes, plain.boxes)


def test_foreign_weights_in_safetensors_and_from_data_parallel(tmp_path):
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
        assert_same_boxes(
            centerpoint.load(path, config).detect(inputs).boxes, detector.detect(inputs).boxes
        )
