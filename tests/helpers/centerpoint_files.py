"""Checkpoint files of CenterPoint for tests: write them, and compare the boxes of two networks."""

from __future__ import annotations

import re
from math import pi

import torch

from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.centerpoint.frameworks import layer_names
from boxcov.detectors.centerpoint.upstream_config import named_config


def saved(content, folder, name="x.pth"):
    """Write a checkpoint and return its path."""
    path = folder / name
    torch.save(content, path)
    return path


def assert_same_boxes(a, b, slack=1e-4):
    yaw = (a[..., 6] - b[..., 6] + pi).remainder(2 * pi) - pi
    rest = [i for i in range(9) if i != 6]
    assert float(yaw.abs().max()) < slack
    torch.testing.assert_close(a[..., rest], b[..., rest], rtol=slack, atol=slack)


def exported(detector, framework, legacy=False):
    """Return a detector's weights in the names and conventions of a framework."""
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
                norm = own[f"{layer.own_norm}.bias"]
                bias = torch.randn(len(norm), generator=generator).to(norm.device)
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


def foreign_state(framework, name):
    """Return a checkpoint of a published network as a framework stores it; all weights are 0.01."""
    config = named_config(name, framework)
    with torch.device("meta"):
        detector = CenterPoint(config)
    shapes = {key: tensor.shape for key, tensor in exported(detector, framework).items()}
    state = {key: torch.full(shape, 0.01, dtype=torch.float16) for key, shape in shapes.items()}
    if framework == "openpcdet":
        return {"model_state": state}
    return {"state_dict": state, "meta": {"mmdet3d_version": "1.4.0"}}


_TASKS = """[
    dict(num_class=1, class_names=['car']),
    dict(num_class=2, class_names=['truck', 'construction_vehicle']),
    dict(num_class=2, class_names=['bus', 'trailer']),
    dict(num_class=1, class_names=['barrier']),
    dict(num_class=2, class_names=['motorcycle', 'bicycle']),
    dict(num_class=2, class_names=['pedestrian', 'traffic_cone']),
]"""
_GRIDS = {
    "pillar02": ("[0.2, 0.2, 8]", 51.2),
    "voxel01": ("[0.1, 0.1, 0.2]", 51.2),
    "voxel0075": ("[0.075, 0.075, 0.2]", 54),
}


def config_text(config):
    """Return mmdetection3d's configuration file of a network on pillars."""
    encoder, dense, rules = config.encoder, config.dense, config.reporting
    tasks = [{"class_names": list(names)} for names in config.tasks]
    return f"""
model = dict(
    pts_voxel_layer=dict(
        max_num_points={encoder.max_points}, max_voxels={encoder.max_cells},
        voxel_size={config.voxel_size}, point_cloud_range={config.point_range}),
    pts_voxel_encoder=dict(
        type='PillarFeatureNet', feat_channels={list(encoder.widths)}, legacy=False),
    pts_backbone=dict(
        out_channels={dense.widths}, layer_nums={dense.layers}, layer_strides={dense.strides}),
    pts_neck=dict(out_channels={dense.up_widths}, upsample_strides={dense.up_strides}),
    pts_bbox_head=dict(
        tasks={tasks},
        common_heads=dict(reg=(2, 2), height=(1, 2), dim=(3, 2), rot=(2, 2), vel=(2, 2)),
        share_conv_channel={dense.shared},
        separate_head=dict(type='SeparateHead', head_conv={dense.branch}),
        bbox_coder=dict(score_threshold={rules.threshold}, post_center_range={rules.centre_range})),
    train_cfg=dict(pts=dict(code_weights={config.loss.weights})),
    test_cfg=dict(pts=dict(post_max_size={rules.max_boxes})))
"""


def _mmdet3d(name):
    size, side = _GRIDS[name]
    pillar = name == "pillar02"
    encoder = (
        "type='PillarFeatureNet', in_channels=5, feat_channels=[64], legacy=False"
        if pillar
        else "type='HardSimpleVFE', num_features=5"
    )
    widths, layers, strides = (
        ("[64, 128, 256]", "[3, 5, 5]", "[2, 2, 2]")
        if pillar
        else ("[128, 256]", "[5, 5]", "[1, 2]")
    )
    up, up_strides = ("[128, 128, 128]", "[0.5, 1, 2]") if pillar else ("[256, 256]", "[1, 2]")
    limits = (20, "(30000, 40000)") if pillar else (10, "(90000, 120000)")
    return f"""
import os  # statements without names are skipped
voxel_size = {size}
point_cloud_range = [-{side}, -{side}, -5.0, {side}, {side}, 3.0]
model = dict(
    type='CenterPoint',
    pts_voxel_layer=dict(
        max_num_points={limits[0]}, voxel_size=voxel_size, max_voxels={limits[1]},
        point_cloud_range=point_cloud_range),
    pts_voxel_encoder=dict({encoder}),
    pts_backbone=dict(
        type='SECOND', out_channels={widths}, layer_nums={layers}, layer_strides={strides}),
    pts_neck=dict(type='SECONDFPN', out_channels={up}, upsample_strides={up_strides}),
    pts_bbox_head=dict(
        type='CenterHead',
        in_channels=sum({up}),
        tasks={_TASKS},
        common_heads=dict(reg=(2, 2), height=(1, 2), dim=(3, 2), rot=(2, 2), vel=(2, 2)),
        share_conv_channel=64,
        bbox_coder=dict(
            post_center_range=[-61.2, -61.2, -10.0, 61.2, 61.2, 10.0],
            max_num=500, score_threshold=0.1, voxel_size=voxel_size[:2]),
        separate_head=dict(type='SeparateHead', init_bias=-2.19, final_kernel=3),
        loss_bbox=dict(type='L1Loss', reduction='mean', loss_weight=0.25)),
    train_cfg=dict(pts=dict(code_weights=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2])),
    test_cfg=dict(pts=dict(
        min_radius=[4, 12, 10, 1, 0.85, 0.175], nms_type='rotate', post_max_size=83, nms_thr=0.2)))
data = dict(train=dict(dataset=os.path.join('a', 'b')))
test_pipeline = [
    dict(type='LoadPointsFromFile', load_dim=5, use_dim=5),
    dict(type='LoadPointsFromMultiSweeps', sweeps_num=9, use_dim=[0, 1, 2, 3, 4])]
"""


def _det3d(name):
    size, side = _GRIDS[name]
    pillar = name == "pillar02"
    reader = (
        'type="PillarFeatureNet", num_filters=[64, 64], num_input_features=5'
        if pillar
        else 'type="VoxelFeatureExtractorV3", num_input_features=5'
    )
    neck = (
        "layer_nums=[3, 5, 5], ds_layer_strides=[2, 2, 2], ds_num_filters=[64, 128, 256],"
        "us_layer_strides=[0.5, 1, 2], us_num_filters=[128, 128, 128]"
        if pillar
        else "layer_nums=[5, 5], ds_layer_strides=[1, 2], ds_num_filters=[128, 256],"
        "us_layer_strides=[1, 2], us_num_filters=[256, 256]"
    )
    limits = (20, [30000, 60000]) if pillar else (10, [120000, 160000])
    return f"""
import itertools
from det3d.utils.config_tool import get_downsample_factor
nsweeps = 10
tasks = {_TASKS}
class_names = list(itertools.chain(*[t["class_names"] for t in tasks]))
model = dict(
    reader=dict({reader}),
    neck=dict(type="RPN", {neck}, logger=logging.getLogger("RPN")),
    bbox_head=dict(
        type="CenterHead", tasks=tasks, weight=0.25,
        code_weights=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2, 1.0, 1.0],
        common_heads={{
            'reg': (2, 2), 'height': (1, 2), 'dim': (3, 2), 'rot': (2, 2), 'vel': (2, 2)}},
    ),
)
test_cfg = dict(
    post_center_limit_range=[-61.2, -61.2, -10.0, 61.2, 61.2, 10.0],
    nms=dict(nms_pre_max_size=1000, nms_post_max_size=83, nms_iou_threshold=0.2),
    score_threshold=0.1,
    out_size_factor=get_downsample_factor(model),
)
voxel_generator = dict(
    range=[-{side}, -{side}, -5.0, {side}, {side}, 3.0],
    voxel_size={size},
    max_points_in_voxel={limits[0]},
    max_voxel_num={limits[1]},
)
work_dir = './work_dirs/{{}}/'.format(__file__[__file__.rfind('/') + 1:-3])
"""


def _openpcdet(name):
    size, side = _GRIDS[name]
    pillar = name == "pillar02"
    voxels = (
        f"        - NAME: transform_points_to_voxels_placeholder\n          VOXEL_SIZE: {size}"
        if pillar
        else f"""        - NAME: transform_points_to_voxels
          VOXEL_SIZE: {size}
          MAX_POINTS_PER_VOXEL: 10
          MAX_NUMBER_OF_VOXELS: {{'train': 120000, 'test': 160000}}"""
    )
    encoder = "NAME: DynPillarVFE\n        NUM_FILTERS: [64, 64]" if pillar else "NAME: MeanVFE"
    backbone = (
        "LAYER_NUMS: [3, 5, 5], LAYER_STRIDES: [2, 2, 2], NUM_FILTERS: [64, 128, 256], "
        "UPSAMPLE_STRIDES: [0.5, 1, 2], NUM_UPSAMPLE_FILTERS: [128, 128, 128]"
        if pillar
        else "LAYER_NUMS: [5, 5], LAYER_STRIDES: [1, 2], NUM_FILTERS: [128, 256], "
        "UPSAMPLE_STRIDES: [1, 2], NUM_UPSAMPLE_FILTERS: [256, 256]"
    )
    return f"""
DATA_CONFIG:
    MAX_SWEEPS: 10
    POINT_CLOUD_RANGE: [-{side}, -{side}, -5.0, {side}, {side}, 3.0]
    DATA_PROCESSOR:
        - NAME: mask_points_and_boxes_outside_range
          REMOVE_OUTSIDE_BOXES: True
        - NAME: shuffle_points
          SHUFFLE_ENABLED: {{'train': True, 'test': True}}
{voxels}

MODEL:
    NAME: CenterPoint
    VFE:
        {encoder}
    BACKBONE_2D: {{{backbone}}}
    DENSE_HEAD:
        NAME: CenterHead
        CLASS_NAMES_EACH_HEAD: [
            ['car'], ['truck', 'construction_vehicle'], ['bus', 'trailer'], ['barrier'],
            ['motorcycle', 'bicycle'], ['pedestrian', 'traffic_cone'],
        ]
        SHARED_CONV_CHANNEL: 64
        SEPARATE_HEAD_CFG:
            HEAD_DICT: {{'center': {{}}, 'center_z': {{}}, 'dim': {{}}, 'rot': {{}}, 'vel': {{}}}}
        LOSS_CONFIG:
            LOSS_WEIGHTS: {{
                'loc_weight': 0.25,
                'code_weights': [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2, 1.0, 1.0]
            }}
        POST_PROCESSING:
            SCORE_THRESH: 0.1
            POST_CENTER_LIMIT_RANGE: [-61.2, -61.2, -10.0, 61.2, 61.2, 10.0]
            MAX_OBJ_PER_SAMPLE: 500
            NMS_CONFIG: {{NMS_TYPE: nms_gpu, NMS_THRESH: 0.2, NMS_POST_MAXSIZE: 83}}
"""


_WRITERS = {"mmdet3d": _mmdet3d, "det3d": _det3d, "openpcdet": _openpcdet}
CONFIG_TEXTS = {
    (framework, name): write(name) for framework, write in _WRITERS.items() for name in _GRIDS
}
