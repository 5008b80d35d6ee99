"""Checkpoints that cannot be loaded: code, misfits, other files, damage."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

import boxcov
from boxcov.detectors import centerpoint
from helpers.centerpoint_cases import detector_of, pillar_config, voxel_config
from helpers.centerpoint_files import exported, saved


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


def test_one_error_names_every_misfit(tmp_path):
    config = pillar_config()
    state = exported(detector_of(config), "det3d")
    del state["bbox_head.tasks.0.reg.3.bias"]
    state["bbox_head.tasks.0.iou.0.weight"] = torch.zeros(1)
    state["neck.blocks.0.1.weight"] = torch.zeros(7, 7, 3, 3)
    state["bbox_head.shared_conv.0.bias"] = torch.zeros(3)
    with pytest.raises(boxcov.BoxcovError) as error:
        centerpoint.load(saved(state, tmp_path), config)
    message = str(error.value)
    assert "1 missing: bbox_head.tasks.0.reg.3.bias" in message
    assert "2 surplus: bbox_head.shared_conv.0.bias, bbox_head.tasks.0.iou.0.weight" in message
    assert "1 of another shape: neck.blocks.0.1.weight (7, 7, 3, 3) for (4, 8, 3, 3)" in message
    assert "x.pth" in message


def test_pillar_weights_do_not_fit_a_voxel_network(tmp_path):
    with pytest.raises(boxcov.BoxcovError, match="missing: pts_middle_encoder"):
        centerpoint.load(
            saved(exported(detector_of(pillar_config()), "mmdet3d"), tmp_path),
            voxel_config(),
            legacy=False,
        )


def test_deformable_convolutions_are_refused_by_name(tmp_path):
    state = exported(detector_of(pillar_config()), "det3d")
    state["bbox_head.tasks.0.feature_adapt_cls.conv.weight"] = torch.zeros(1)
    with pytest.raises(boxcov.BoxcovError, match="does not implement deformable convolutions"):
        centerpoint.load(saved(state, tmp_path), "pillar02")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"backbone.conv.weight": torch.zeros(1)},
            r"names that start with pts_bbox_head\. \(mmdet3d\), .*found backbone.conv.weight",
        ),
        (
            {"state_dict": [1, 2]},
            "a dict of tensors, alone or under state_dict, model_state or model, "
            "and found state_dict",
        ),
        ([torch.zeros(1)], "and found list"),
        ({}, "and found dict"),
    ],
)
def test_files_without_weights(content, message, tmp_path):
    with pytest.raises(boxcov.BoxcovError, match=message):
        centerpoint.load(saved(content, tmp_path))


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
def test_damaged_and_missing_files(name, tmp_path):
    path = tmp_path / name
    with pytest.raises(
        boxcov.BoxcovError,
        match="no such file; give the path of a checkpoint, or a name: small",
    ):
        centerpoint.load(path)
    path.write_bytes(b"not a checkpoint at all")
    with pytest.raises(boxcov.BoxcovError, match=f"{name}: "):
        centerpoint.load(path)


def test_a_truncated_checkpoint(tmp_path):
    path = saved(exported(detector_of(pillar_config()), "mmdet3d"), tmp_path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(boxcov.BoxcovError, match=r"not a checkpoint .*, or a damaged one"):
        centerpoint.load(path)
