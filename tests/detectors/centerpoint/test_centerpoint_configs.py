"""The configuration of a checkpoint: names, configuration files, and no guess."""

from __future__ import annotations

import os
from dataclasses import replace
from textwrap import dedent

import pytest
import torch

import boxcov
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint import Config
from boxcov.detectors.centerpoint.config_file import UNKNOWN, parse_settings, read_settings
from boxcov.detectors.centerpoint.upstream_config import config_of, named_config
from helpers.centerpoint_files import CONFIG_TEXTS, foreign_state, saved

EACH = [
    ("mmdet3d", "pillar02"),
    ("mmdet3d", "voxel01"),
    ("mmdet3d", "voxel0075"),
    ("det3d", "pillar02"),
    ("det3d", "voxel0075"),
    ("openpcdet", "pillar02"),
    ("openpcdet", "voxel0075"),
]
each_network = pytest.mark.parametrize(("framework", "name"), EACH)


def write(folder, framework, name, file=None):
    suffix = ".yaml" if framework == "openpcdet" else ".py"
    path = folder / (file or f"config{suffix}")
    path.write_text(CONFIG_TEXTS[framework, name])
    return path


# no guess


@pytest.mark.parametrize("framework", ["mmdet3d", "det3d", "openpcdet"])
@pytest.mark.parametrize("kind", ["pillar02", "voxel01"])
def test_weights_alone_do_not_tell_the_grid(framework, kind, tmp_path):
    path = saved(foreign_state(framework, kind), tmp_path)
    with pytest.raises(boxcov.BoxcovError, match=r"do not tell the grid .*--config: pillar02"):
        centerpoint.load(path)


def test_a_name_chooses_the_grid(tmp_path):
    path = saved(foreign_state("openpcdet", "voxel01"), tmp_path)
    for name in ("voxel01", "voxel0075"):
        assert centerpoint.load(path, name).config == named_config(name, "openpcdet")


def test_an_unknown_name_is_refused(tmp_path):
    path = saved(foreign_state("det3d", "voxel01"), tmp_path)
    with pytest.raises(boxcov.BoxcovError, match="no configuration 'voxel': give pillar02"):
        centerpoint.load(path, "voxel")


def test_circle_nms_has_names_of_its_own():
    plain, circle = (named_config(f"voxel01{end}", "mmdet3d") for end in ("", "-circlenms"))
    assert plain.reporting.nms == "rotated"
    assert circle == replace(plain, reporting=replace(plain.reporting, nms="circle"))


@pytest.mark.parametrize("make", [Config.pillar, lambda name: Config.voxel(0.1, name)])
def test_an_unknown_framework_is_refused(make):
    with pytest.raises(boxcov.BoxcovError, match=r"framework must be one of .* got 'OpenPCDet'"):
        make("OpenPCDet")


def test_own_files_need_no_config(tmp_path):
    path = tmp_path / "own.safetensors"
    centerpoint.save(centerpoint.CenterPoint(Config.small()), path)
    for given in ({"config": "pillar02"}, {"legacy": True}):
        with pytest.raises(boxcov.BoxcovError, match="with its configuration inside"):
            centerpoint.load(path, **given)


# configuration files


@each_network
def test_a_configuration_file_gives_the_named_network(framework, name, tmp_path):
    read = config_of(read_settings(write(tmp_path, framework, name)), framework)
    assert read == named_config(name, framework)


@each_network
def test_a_config_beside_the_checkpoint_is_found(framework, name, tmp_path):
    path = saved(foreign_state(framework, name), tmp_path, "epoch_20.pth")
    file = write(tmp_path, framework, name)
    detector = centerpoint.load(path)
    assert detector.config == named_config(name, framework)
    assert {fact.name: fact.evidence for fact in detector.provenance}["grid"] == str(file)


def test_openpcdet_keeps_checkpoints_one_folder_below(tmp_path):
    write(tmp_path, "openpcdet", "voxel0075")
    (tmp_path / "ckpt").mkdir()
    path = saved(foreign_state("openpcdet", "voxel01"), tmp_path / "ckpt")
    assert centerpoint.load(path).config.voxel_size[0] == 0.075


def test_several_configs_beside_a_checkpoint_are_refused(tmp_path):
    path = saved(foreign_state("det3d", "voxel01"), tmp_path)
    write(tmp_path, "det3d", "voxel0075", "a.py")
    write(tmp_path, "det3d", "pillar02", "b.py")
    (tmp_path / "setup.py").write_text("import os\n")
    with pytest.raises(boxcov.BoxcovError, match=r"several configurations beside it \(a.py, b.py"):
        centerpoint.load(path)
    write(tmp_path, "det3d", "voxel0075", "x.py")  # the name of the checkpoint decides
    assert centerpoint.load(path).config.voxel_size[0] == 0.075


@pytest.mark.parametrize(
    "text", ["model = dict(bbox_head=dict(type='CenterHead'", "_base_ = './nowhere.py'\n"]
)
def test_a_config_that_is_not_understood_is_not_passed_over(text, tmp_path):
    path = saved(foreign_state("det3d", "voxel01"), tmp_path)
    (tmp_path / "b.py").write_text(text)
    with pytest.raises(boxcov.BoxcovError, match=r"b\.py: (not a Python file|no .*nowhere)"):
        centerpoint.load(path)
    write(tmp_path, "det3d", "voxel0075", "a.py")
    with pytest.raises(boxcov.BoxcovError, match=r"several configurations beside it \(a.py, b.py"):
        centerpoint.load(path)


def test_pipes_and_links_beside_a_checkpoint_are_passed_over(tmp_path):
    path = saved(foreign_state("det3d", "voxel01"), tmp_path)
    os.mkfifo(tmp_path / "a.py")  # would wait for a writer
    (tmp_path / "b.py").symlink_to(tmp_path / "absent")
    (tmp_path / "c.py").mkdir()
    write(tmp_path, "det3d", "voxel0075", "d.py")
    assert centerpoint.load(path).config.voxel_size[0] == 0.075


@pytest.mark.parametrize("key", ["config", "cfg"])
def test_a_config_in_the_meta_data_is_found(key, tmp_path):
    meta = {key: CONFIG_TEXTS["mmdet3d", "voxel0075"], "mmdet3d_version": "1.4.0"}
    state = foreign_state("mmdet3d", "voxel01")["state_dict"]
    detector = centerpoint.load(saved({"state_dict": state, "meta": meta}, tmp_path))
    assert detector.config == named_config("voxel0075", "mmdet3d")


def test_a_given_config_that_contradicts_the_file(tmp_path):
    meta = {"config": CONFIG_TEXTS["mmdet3d", "voxel0075"], "mmdet3d_version": "1.4.0"}
    state = foreign_state("mmdet3d", "voxel01")["state_dict"]
    path = saved({"state_dict": state, "meta": meta}, tmp_path)
    with pytest.warns(boxcov.BoxcovWarning, match=r"voxel_size \(0.1, 0.1, 0.2\), not \(0.075"):
        assert centerpoint.load(path, "voxel01").config.voxel_size[0] == 0.1
    centerpoint.load(path, "voxel0075-circlenms")  # other rules are no contradiction


def test_a_config_of_another_framework_is_refused(tmp_path):
    file = write(tmp_path, "openpcdet", "voxel0075")
    path = saved(foreign_state("det3d", "voxel01"), tmp_path)
    with pytest.raises(boxcov.BoxcovError, match="of openpcdet, but the checkpoint is of det3d"):
        centerpoint.load(path, file)


def test_base_files_are_followed_and_merged(tmp_path):
    write(tmp_path, "mmdet3d", "voxel01", "base.py")
    child = tmp_path / "child.py"
    child.write_text(
        dedent("""
        _base_ = ['./base.py']
        size = [0.075, 0.075, 0.2]
        reach = [-54, -54, -5.0, 54, 54, 3.0]
        model = dict(
            pts_voxel_layer=dict(voxel_size=size, point_cloud_range=reach),
            pts_bbox_head=dict(bbox_coder=dict(voxel_size=size[:2])),
            test_cfg=dict(pts=dict(nms_type='circle')))
        """)
    )
    read = config_of(read_settings(child), "mmdet3d")
    assert read == named_config("voxel0075-circlenms", "mmdet3d")
    (tmp_path / "base.py").unlink()
    with pytest.raises(boxcov.BoxcovError, match=r"it may be in .*base.py, which is not there"):
        config_of(read_settings(child), "mmdet3d")


def test_the_base_of_a_yaml_file_is_found_above_it(tmp_path):
    text = CONFIG_TEXTS["openpcdet", "voxel0075"]
    start, end = text.index("DATA_CONFIG:"), text.index("MODEL:")
    data = dedent(text[start:end].partition("\n")[2])
    (tmp_path / "cfgs" / "models").mkdir(parents=True)
    (tmp_path / "cfgs" / "data.yaml").write_text(data)
    child = tmp_path / "cfgs" / "models" / "x.yaml"
    child.write_text(f"DATA_CONFIG:\n    _BASE_CONFIG_: cfgs/data.yaml\n\n{text[end:]}")
    assert config_of(read_settings(child), "openpcdet") == named_config("voxel0075", "openpcdet")
    (tmp_path / "cfgs" / "data.yaml").unlink()
    with pytest.raises(boxcov.BoxcovError, match=r"cfgs/data.yaml, which is not there"):
        config_of(read_settings(child), "openpcdet")


def test_files_that_include_each_other_end_in_an_error(tmp_path):
    (tmp_path / "a.py").write_text("_base_ = 'b.py'\n")
    (tmp_path / "b.py").write_text("_base_ = 'a.py'\n")
    with pytest.raises(boxcov.BoxcovError, match="more than 100 base files"):
        read_settings(tmp_path / "a.py")


# never run


def test_no_statement_of_a_python_file_is_run(tmp_path):
    marker = tmp_path / "ran"
    call = f'open(r"{marker}", "w")'
    path = tmp_path / "evil.py"
    path.write_text(f"x = {call}\n{call}\ny = [{call}]\nz = dict(a={call})\n")
    settings = read_settings(path)
    assert (settings.at("x"), settings.at("y"), settings.at("z.a")) == (UNKNOWN, [UNKNOWN], UNKNOWN)
    assert not marker.exists()


@pytest.mark.parametrize(
    "change",
    [
        "model.update(a=2)",
        "model['a'] = 2",
        "for k in model: pass",
        "model |= dict(a=2)",
        "del model",
    ],
)
def test_a_name_that_a_statement_may_change_is_unknown(change):
    settings = parse_settings(f"model = dict(a=1)\n{change}\n", "x.py")
    with pytest.raises(boxcov.BoxcovError, match=r"x\.py: model\.a is not a plain value"):
        settings.get("model.a")


def test_yaml_tags_are_refused(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text("MODEL: !!python/object/apply:os.system ['echo never']\n")
    with pytest.raises(boxcov.BoxcovError, match=r"evil\.yaml: not a YAML file"):
        read_settings(path)


@pytest.mark.parametrize(
    ("framework", "old", "new", "message"),
    [
        (
            "mmdet3d",
            "'PillarFeatureNet'",
            "'DynamicPillarFeatureNet'",
            "the encoder Dyn",
        ),
        ("mmdet3d", "'SeparateHead'", "'DCNSeparateHead'", "deformable convolutions"),
        ("mmdet3d", "legacy=False", "legacy=True", "with legacy=True"),
        ("mmdet3d", "'rotate'", "'soft'", "does not implement the NMS soft"),
        ("mmdet3d", "[0.2, 0.2, 8]", "[0.3, 0.2, 8]", "not divisible by the stride"),
        (
            "mmdet3d",
            "[0.2, 0.2, 8]",
            "'wide'",
            "a configuration of a CenterPoint, or",
        ),
        ("det3d", "score_threshold", "double_flip=True, score_threshold", "flipped copies"),
        ("openpcdet", "DynPillarVFE", "PillarVFE", "does not implement the encoder PillarVFE"),
        ("mmdet3d", "share_conv", "norm_bbox=False, share_conv", "sizes that are not logarithms"),
        ("det3d", "score_threshold", "per_class_nms=True, score_threshold", "NMS of each class"),
        ("openpcdet", "NMS_THRESH", "MULTI_CLASSES_NMS: True, NMS_THRESH", "NMS of each class"),
        ("openpcdet", "NMS_TYPE: nms_gpu", "NMS_TYPE: circle_nms", "of openpcdet have no radii"),
    ],
)
def test_what_is_not_implemented_is_refused(framework, old, new, message, tmp_path):
    text = CONFIG_TEXTS[framework, "pillar02"]
    assert old in text
    path = tmp_path / ("x.yaml" if framework == "openpcdet" else "x.py")
    path.write_text(text.replace(old, new))
    settings = read_settings(path)
    with pytest.raises(boxcov.BoxcovError, match=message):
        config_of(settings, framework)


@pytest.mark.parametrize(
    ("framework", "old", "new", "message"),
    [
        ("mmdet3d", "voxel_size[:2]", "[0.1, 0.1]", r"voxel_size is \[0.1, 0.1\], but"),
        ("mmdet3d", "max_num", "pc_range=[-54, -54], max_num", r"but point_range is \[-51.2"),
        ("mmdet3d", "max_num", "out_size_factor=8, max_num", "but stride is 4"),
        ("mmdet3d", "nms_type", "pre_max_size=100, nms_type", "only 100 of the 500 candidates"),
        ("det3d", "score_threshold", "pc_range=[-54, -54], score_threshold", "but point_range"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(framework, old, new, message, tmp_path):
    text = CONFIG_TEXTS[framework, "pillar02"]
    assert old in text
    settings = parse_settings(text.replace(old, new), "x.py")
    with pytest.raises(boxcov.BoxcovError, match=message):
        config_of(settings, framework)


def test_rotated_nms_of_mmdet3d_has_a_second_threshold():
    text = CONFIG_TEXTS["mmdet3d", "pillar02"]
    changed = text.replace("nms_type", "score_threshold=0.3, nms_type")
    rotated, circle = (
        config_of(parse_settings(t, "x.py"), "mmdet3d").reporting
        for t in (changed, changed.replace("'rotate'", "'circle'"))
    )
    assert (rotated.threshold, circle.threshold) == (0.3, 0.1)


@pytest.mark.parametrize(
    ("framework", "text"),
    [("mmdet3d", "dataset_type = 'WaymoDataset'\n"), ("openpcdet", "    DATASET: WaymoDataset\n")],
)
def test_networks_of_other_data_sets_are_warned_about(framework, text, tmp_path):
    path = write(tmp_path, framework, "voxel01" if framework == "mmdet3d" else "voxel0075")
    before, section, after = path.read_text().partition("DATA_CONFIG:\n")
    for name in ("NuScenesDataset", "WaymoDataset"):
        new = text.replace("WaymoDataset", name)
        path.write_text(before + (section + new + after if section else new))
        if name.startswith("Nu"):
            config_of(read_settings(path), framework)
        else:
            with pytest.warns(boxcov.BoxcovWarning, match="a network of WaymoDataset"):
                config_of(read_settings(path), framework)


# generations of mmdetection3d


@pytest.mark.parametrize(
    ("meta", "name", "legacy"),
    [
        ({"mmdet3d_version": "0.17.1"}, "x.pth", True),
        ({"mmdet3d_version": "0.18.1"}, "x.pth", True),
        ({"mmdet3d_version": "1.0.0rc4"}, "x.pth", False),
        ({"mmengine_version": "0.8.0"}, "x.pth", False),
        ({"time": "Thu Oct  1 13:52:05 2020"}, "x.pth", True),  # 2020: no version was written
        ({}, "centerpoint_01voxel_nus_20201001_135205-5db91e00.pth", True),
    ],
)
def test_the_generation_is_decided_by_evidence(meta, name, legacy, tmp_path):
    path = saved({**foreign_state("mmdet3d", "voxel01"), "meta": meta}, tmp_path, name)
    facts = {fact.name: fact for fact in centerpoint.load(path, "voxel01").provenance}
    assert facts["generation"].value == ("before 1.0" if legacy else "1.0 or later")


@pytest.mark.parametrize(
    ("meta", "name"),
    [
        ({}, "x.pth"),
        ({"mmdet3d_version": None}, "x.pth"),
        ({"mmdet3d_version": "0.16.0"}, "x.pth"),  # trained on the branch that became 1.0, or not
        ({"mmdet3d_version": "0.16.0", "time": "Sun Aug 15 08:58:57 2021"}, "x.pth"),
        ({}, "centerpoint_01voxel_nus_20210815_085857-9ba7f3a5.pth"),
    ],
)
def test_an_undecided_generation_is_asked_for(meta, name, tmp_path):
    path = saved({**foreign_state("mmdet3d", "voxel01"), "meta": meta}, tmp_path, name)
    with pytest.raises(boxcov.BoxcovError, match="give legacy=True for before 1") as caught:
        centerpoint.load(path, "voxel01")
    assert ("no mmdet3d_version" in str(caught.value)) == (not meta.get("mmdet3d_version"))
    assert centerpoint.load(path, "voxel01", legacy=True).provenance[1].value == "before 1.0"


@pytest.mark.parametrize("features", [10, 11])
def test_pillars_have_10_or_11_point_features(features, tmp_path):
    content = {**foreign_state("mmdet3d", "pillar02"), "meta": {}}
    key = "pts_voxel_encoder.pfn_layers.0.linear.weight"
    content["state_dict"][key] = torch.zeros(64, features)
    path = saved(content, tmp_path)
    if features == 11:  # only 1.0 and later have them
        assert not centerpoint.load(path, "pillar02").provenance[1].value.startswith("before")
    else:
        with pytest.raises(boxcov.BoxcovError, match="10 point features"):
            centerpoint.load(path, "pillar02")
        detector = centerpoint.load(path, "pillar02", legacy=True)
        assert detector.config.encoder.point_features == features


@pytest.mark.parametrize("version", ["0.17.1", "1.4.0"])
def test_a_given_generation_that_contradicts_the_file(version, tmp_path):
    content = {**foreign_state("mmdet3d", "voxel01"), "meta": {"mmdet3d_version": version}}
    path, is_old = saved(content, tmp_path), version.startswith("0")
    assert centerpoint.load(path, "voxel01", legacy=is_old).provenance[1].evidence == "as given"
    with pytest.warns(boxcov.BoxcovWarning, match=f"but it says .* {version} in the meta data"):
        centerpoint.load(path, "voxel01", legacy=not is_old)


def test_legacy_is_about_mmdetection3d_alone(tmp_path):
    path = saved(foreign_state("det3d", "voxel01"), tmp_path)
    with pytest.raises(boxcov.BoxcovError, match="legacy is about mmdetection3d"):
        centerpoint.load(path, "voxel01", legacy=True)
