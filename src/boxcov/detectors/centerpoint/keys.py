"""Where det3d, mmdetection3d and OpenPCDet keep each layer: one network under four naming schemes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from boxcov.detectors.centerpoint.config import Config, Framework, Pillars

HEADS: dict[Framework, str] = {
    "mmdet3d": "pts_bbox_head",
    "det3d": "bbox_head",
    "openpcdet": "dense_head",
}
SPARSE: dict[Framework, str] = {
    "mmdet3d": "pts_middle_encoder",
    "det3d": "backbone",
    "openpcdet": "backbone_3d",
}
_PILLARS: dict[Framework, str] = {
    "mmdet3d": "pts_voxel_encoder",
    "det3d": "reader",
    "openpcdet": "vfe",
}
_BLOCKS: dict[Framework, str] = {
    "mmdet3d": "pts_backbone",
    "det3d": "neck",
    "openpcdet": "backbone_2d",
}
_DEBLOCKS: dict[Framework, str] = {
    "mmdet3d": "pts_neck",
    "det3d": "neck",
    "openpcdet": "backbone_2d",
}
_BRANCHES: dict[Framework, dict[str, str]] = {
    "mmdet3d": {},
    "det3d": {"heatmap": "hm"},
    "openpcdet": {"heatmap": "hm", "reg": "center", "height": "center_z"},
}


@dataclass(frozen=True)
class Names:
    """A layer and the norm behind it, if any: their names here, and in a framework."""

    own: str
    own_norm: str | None
    foreign: str
    foreign_norm: str | None


def layers(config: Config, framework: Framework) -> Iterator[Names]:
    """Every layer of the network.

    >>> first = next(layers(Config.mmdet3d_pillar(), "det3d"))
    >>> first.own, first.foreign
    ('encoder.layers.0.linear', 'reader.pfn_layers.0.linear')
    """
    if isinstance(config.encoder, Pillars):
        for i in range(len(config.encoder.widths)):
            own, foreign = f"encoder.layers.{i}", f"{_PILLARS[framework]}.pfn_layers.{i}"
            yield Names(f"{own}.linear", f"{own}.norm", f"{foreign}.linear", f"{foreign}.norm")
    else:
        yield from _sparse(framework)
    yield from _dense(config, framework)
    yield from _head(config, framework)


def _sparse(framework: Framework) -> Iterator[Names]:
    root = SPARSE[framework]
    for stage in range(5):
        own = f"encoder.stages.{stage}"
        foreign = f"{root}.{_into_stage(stage, framework)}"
        yield Names(f"{own}.conv", f"{own}.norm", f"{foreign}.0", f"{foreign}.1")
        if stage == 4:
            return
        for j in range(2):
            block = f"{root}.{_residual(stage, j, framework)}"
            for n in (1, 2):
                yield Names(
                    f"{own}.blocks.{j}.conv{n}",
                    f"{own}.blocks.{j}.norm{n}",
                    f"{block}.conv{n}",
                    f"{block}.bn{n}",
                )


def _into_stage(stage: int, framework: Framework) -> str:
    if stage == 0:
        return "conv_input"
    if stage == 4:
        return "extra_conv" if framework == "det3d" else "conv_out"
    if framework == "mmdet3d":  # the strided convolution is the end of the stage before
        return f"encoder_layers.encoder_layer{stage}.2"
    return f"conv{stage + 1}" if framework == "det3d" else f"conv{stage + 1}.0"


def _residual(stage: int, j: int, framework: Framework) -> str:
    if framework == "mmdet3d":
        return f"encoder_layers.encoder_layer{stage + 1}.{j}"
    before = (
        0 if stage == 0 else 3 if framework == "det3d" else 1
    )  # what the strided convolution takes up
    return f"conv{stage + 1}.{before + j}"


def _dense(config: Config, framework: Framework) -> Iterator[Names]:
    shift = 0 if framework == "mmdet3d" else 1  # the others pad in a layer of its own
    for i, count in enumerate(config.dense.layers):
        own, foreign = f"backbone.blocks.{i}", f"{_BLOCKS[framework]}.blocks.{i}"
        for j in range(0, 3 * (count + 1), 3):
            yield Names(
                f"{own}.{j}",
                f"{own}.{j + 1}",
                f"{foreign}.{j + shift}",
                f"{foreign}.{j + shift + 1}",
            )
    for i in range(len(config.dense.up_widths)):
        own, foreign = f"neck.deblocks.{i}", f"{_DEBLOCKS[framework]}.deblocks.{i}"
        yield Names(f"{own}.0", f"{own}.1", f"{foreign}.0", f"{foreign}.1")


def _head(config: Config, framework: Framework) -> Iterator[Names]:
    root = HEADS[framework]
    inner = ("conv", "bn") if framework == "mmdet3d" else ("0", "1")
    yield Names(
        "head.shared.0",
        "head.shared.1",
        f"{root}.shared_conv.{inner[0]}",
        f"{root}.shared_conv.{inner[1]}",
    )
    tasks = {"mmdet3d": "task_heads", "det3d": "tasks", "openpcdet": "heads_list"}[framework]
    for t in range(len(config.tasks)):
        for branch in (*config.branches, "heatmap"):
            own, foreign = (
                f"head.tasks.{t}.{branch}",
                f"{root}.{tasks}.{t}.{_BRANCHES[framework].get(branch, branch)}",
            )
            first = foreign if framework == "det3d" else f"{foreign}.0"
            yield Names(f"{own}.0", f"{own}.1", f"{first}.{inner[0]}", f"{first}.{inner[1]}")
            yield Names(f"{own}.3", None, f"{foreign}.{3 if framework == 'det3d' else 1}", None)
