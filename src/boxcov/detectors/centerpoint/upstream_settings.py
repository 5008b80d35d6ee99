"""Where the configuration files of det3d, mmdetection3d and OpenPCDet hold each setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from boxcov.detectors.centerpoint.config import FRAMEWORKS, Framework
from boxcov.detectors.centerpoint.config_file import Settings, is_unknown
from boxcov.errors import BoxcovError

_VOXELS = "DATA_CONFIG.DATA_PROCESSOR.transform_points_to_voxels"
# The sections of the files of mmdetection3d, det3d and OpenPCDet. The first place of a section that
# exists counts.
_SECTIONS: dict[str, tuple[str, str, str]] = {
    "-": ("", "", ""),
    "data": ("", "", "DATA_CONFIG"),
    "shuffle": ("", "", "DATA_CONFIG.DATA_PROCESSOR.shuffle_points.SHUFFLE_ENABLED"),
    "voxels": (
        "model.pts_voxel_layer model.data_preprocessor.voxel_layer",
        "voxel_generator",
        f"{_VOXELS} {_VOXELS}_placeholder",
    ),
    "encoder": ("model.pts_voxel_encoder", "model.reader", "MODEL.VFE"),
    "backbone": ("model.pts_backbone", "", "MODEL.BACKBONE_2D"),
    "neck": ("model.pts_neck", "model.neck", ""),
    "head": ("model.pts_bbox_head", "model.bbox_head", "MODEL.DENSE_HEAD"),
    "coder": ("model.pts_bbox_head.bbox_coder", "", ""),
    "targets": ("", "", "MODEL.DENSE_HEAD.TARGET_ASSIGNER_CONFIG"),
    "test": ("model.test_cfg.pts test_cfg.pts", "test_cfg", "MODEL.DENSE_HEAD.POST_PROCESSING"),
    "nms": ("", "test_cfg.nms", "MODEL.DENSE_HEAD.POST_PROCESSING.NMS_CONFIG"),
    "train": ("model.train_cfg.pts train_cfg.pts", "", "MODEL.DENSE_HEAD.LOSS_CONFIG.LOSS_WEIGHTS"),
}
# Where the files of the three hold a setting: a section and the path in it; a dash for nowhere. The
# names with a 2 are what a file says a second time and decodes boxes by.
_PATHS = """
voxel_size   voxels.voxel_size            voxels.voxel_size            voxels.VOXEL_SIZE
point_range  voxels.point_cloud_range     voxels.range                 data.POINT_CLOUD_RANGE
max_points   voxels.max_num_points        voxels.max_points_in_voxel   voxels.MAX_POINTS_PER_VOXEL
max_cells    voxels.max_voxels            voxels.max_voxel_num         voxels.MAX_NUMBER_OF_VOXELS
encoder      encoder.type                 encoder.type                 encoder.NAME
pillars      encoder.feat_channels        encoder.num_filters          encoder.NUM_FILTERS
widths       backbone.out_channels        neck.ds_num_filters          backbone.NUM_FILTERS
layers       backbone.layer_nums          neck.layer_nums              backbone.LAYER_NUMS
strides      backbone.layer_strides       neck.ds_layer_strides        backbone.LAYER_STRIDES
up_widths    neck.out_channels            neck.us_num_filters          backbone.NUM_UPSAMPLE_FILTERS
up_strides   neck.upsample_strides        neck.us_layer_strides        backbone.UPSAMPLE_STRIDES
shared       head.share_conv_channel      head.share_conv_channel      head.SHARED_CONV_CHANNEL
branch       head.separate_head.head_conv -                            head.SHARED_CONV_CHANNEL
tasks        head.tasks                   head.tasks                   head.CLASS_NAMES_EACH_HEAD
branches     head.common_heads            head.common_heads  head.SEPARATE_HEAD_CFG.HEAD_DICT
threshold    coder.score_threshold        test.score_threshold         test.SCORE_THRESH
candidates   coder.max_num                nms.nms_pre_max_size         test.MAX_OBJ_PER_SAMPLE
centre_range coder.post_center_range      test.post_center_limit_range test.POST_CENTER_LIMIT_RANGE
nms          test.nms_type                test.circular_nms            nms.NMS_TYPE
nms_limit    test.pre_max_size            nms.nms_pre_max_size         nms.NMS_PRE_MAXSIZE
overlap      test.nms_thr                 nms.nms_iou_threshold        nms.NMS_THRESH
radii        test.min_radius              test.min_radius              -
max_boxes    test.post_max_size           nms.nms_post_max_size        nms.NMS_POST_MAXSIZE
weights      train.code_weights           head.code_weights            train.code_weights
box_weight   head.loss_bbox.loss_weight   head.weight                  train.loc_weight
shuffled     -                            -                            shuffle.test
voxel_size2  coder.voxel_size             test.voxel_size              -
point_range2 coder.pc_range               test.pc_range                -
stride2      coder.out_size_factor        test.out_size_factor         targets.FEATURE_MAP_STRIDE
"""
_BY_NAME = {name: row for name, *row in map(str.split, _PATHS.strip().splitlines())}


def framework_of(settings: Settings) -> Framework | None:
    """Return the framework whose files have these settings."""
    heads = dict(zip(FRAMEWORKS, _SECTIONS["head"]))
    is_there = (name for name, at in heads.items() if isinstance(settings.at(str(at)), Mapping))
    return next(is_there, None)


@dataclass(frozen=True)
class SettingsReader:
    """Settings by the names in ``_PATHS``."""

    settings: Settings
    framework: Framework

    def get(self, path: str, default: Any = None) -> Any:
        """Return a setting; path: a name in ``_PATHS``, or a section and the path in it."""
        places = self.places(path)
        if not places:
            raise BoxcovError(f"files of {self.framework} have no {path}")
        return self.settings.get(*places, default=default)

    def optional(self, path: str) -> Any:
        """Return a setting; None if the file does not have it, or only running it would tell."""
        found = (self.settings.at(place) for place in self.places(path))
        return next((value for value in found if value is not None and not is_unknown(value)), None)

    def places(self, path: str) -> list[str]:
        """Return where the framework's files may hold a setting; path: as in ``get``."""
        column = FRAMEWORKS.index(self.framework)
        section, _, rest = (_BY_NAME[path][column] if path in _BY_NAME else path).partition(".")
        return [f"{start}.{rest}" for start in _SECTIONS[section][column].split()]

    def fields(self, of: Any, *names: str) -> dict[str, Any]:
        """Return the settings ``names``, by default those of ``of``, with tuples for lists."""
        found = {name: self.get(name, getattr(of, name)) for name in names}
        return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
