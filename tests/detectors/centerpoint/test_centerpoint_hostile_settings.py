"""Settings of a configuration file that are too deep, too large or of another type."""

from __future__ import annotations

import pytest
import torch

import boxcov
from boxcov.detectors import centerpoint, yolox
from boxcov.detectors.centerpoint.config_file import parse_settings, read_settings
from boxcov.detectors.centerpoint.upstream_config import config_of
from helpers.centerpoint_cases import pillar_config
from helpers.centerpoint_files import config_text, saved

DEEP = "x = dict(a=1)\n" + "x = dict(a=x)\n" * 3000


@pytest.mark.parametrize("text", ["x = a" + ".b" * 2000, "x = a" + "[0]" * 2000, DEEP])
def test_settings_that_lie_too_deep_are_an_error(text, tmp_path):
    (tmp_path / "a.py").write_text(f"_base_ = 'b.py'\n{text}")
    (tmp_path / "b.py").write_text(DEEP)
    with pytest.raises(boxcov.BoxcovError, match=r"a\.py: not a configuration .*RecursionError"):
        read_settings(tmp_path / "a.py")
    if text != DEEP:  # too deep to be merged only
        with pytest.raises(boxcov.BoxcovError, match="cfg: not a Python file"):
            parse_settings(text, "cfg")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("type='PillarFeatureNet'", "type={bomb}"),
        ("bbox_coder=dict(", "bbox_coder=dict(voxel_size={bomb}, "),
        ("post_max_size=", "nms_type={bomb}, post_max_size="),
        ("post_max_size=", "post_center_limit_range={bomb}, post_max_size="),
        ("tasks=[", "tasks=[{bomb}, "),
    ],
)
def test_no_setting_fills_the_memory(setting, value):
    """Every one of these is compared, copied or shown in a message."""
    text = config_text(pillar_config())
    assert setting in text
    lists = "b = ['x', 'x']\n" + "b = [b, b]\n" * 60
    settings = parse_settings(lists + text.replace(setting, value.format(bomb="b")), "cfg")
    with pytest.raises(boxcov.BoxcovError, match="cfg: a setting of more than 10000 values"):
        config_of(settings, "mmdet3d")


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("bbox_coder=dict(", "bbox_coder=dict(max_num=100.5, ", "candidates is 100.5"),
        ("separate_head=", "loss_bbox=dict(loss_weight='x'), separate_head=", "box_weight is 'x'"),
        ("post_max_size=", "nms_type='circle', min_radius=['a'] * 6, post_max_size=", "min_radius"),
        ("post_max_size=", "nms_type='circle', min_radius=list('abcdef'), x=", "min_radius"),
        ("post_center_range=(", "post_center_range=('a', ", r"centre_range\[0\] is 'a'"),
        ("max_voxels=(", "max_voxels=('a', 2), x=(", r"max_cells\[0\] is 'a'"),
    ],
)
def test_settings_of_another_type_are_refused(setting, value, message):
    """They would fail at the first frame only."""
    text = config_text(pillar_config())
    assert setting in text
    with pytest.raises(boxcov.BoxcovError, match=f"cfg: .*{message}"):
        config_of(parse_settings(text.replace(setting, value), "cfg"), "mmdet3d")


@pytest.mark.parametrize("key", ["<<", "!!merge x"])
def test_mappings_that_merge_each_other_are_refused(key, tmp_path):
    """Each would be twice as long as the one before."""
    lines = [f"a{i}: &a{i} {{{key}: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40)]
    (tmp_path / "a.yaml").write_text("\n".join(["a0: &a0 {k: 1}", *lines]))
    with pytest.raises(boxcov.BoxcovError, match=r"a\.yaml: merge keys \(<<\) are not read"):
        read_settings(tmp_path / "a.yaml")


# what a checkpoint says


def test_a_configuration_in_a_checkpoint_is_as_small_as_a_file(tmp_path):
    """Reading takes 12 s per MB."""
    meta = {"config": "x = 1\n" * 200_000}
    path = saved({"state_dict": {"bbox_head.a": torch.ones(1)}, "meta": meta}, tmp_path)
    with pytest.raises(boxcov.BoxcovError, match="1200000 characters, at most 1048576 are read"):
        centerpoint.load(path)


@pytest.mark.parametrize("version", ["9" * 10_000, "0.16" + "x" * 10**6])
def test_a_version_without_end_is_no_traceback(version, tmp_path):
    state = {"pts_bbox_head.a": torch.ones(1)}
    path = saved({"state_dict": state, "meta": {"mmdet3d_version": version}}, tmp_path)
    with pytest.raises(boxcov.BoxcovError) as caught:
        centerpoint.load(path, "pillar02")
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("load", [yolox.load, lambda path: centerpoint.load(path, "pillar02")])
@pytest.mark.parametrize("start", ["", "bbox_head."])
def test_long_names_of_tensors_are_cut_in_messages(load, start, tmp_path):
    content = {start + "n" * 10**6 + str(i): torch.ones(1) for i in range(9)}
    with pytest.raises(boxcov.BoxcovError, match=r"n{100}") as caught:
        load(saved(content, tmp_path))
    assert len(str(caught.value)) < 5000
