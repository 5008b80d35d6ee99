"""det3d, mmdetection3d and OpenPCDet: their layer names and head outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from boxcov.detectors.centerpoint.config import FRAMEWORKS, Config, Framework, Pillars

# What mmdetection3d, det3d and OpenPCDet call the modules of their networks.
_MODULES = {
    "head": ("pts_bbox_head", "bbox_head", "dense_head"),
    "sparse encoder": ("pts_middle_encoder", "backbone", "backbone_3d"),
    "pillar encoder": ("pts_voxel_encoder", "reader", "vfe"),
    "blocks": ("pts_backbone", "neck", "backbone_2d"),
    "deblocks": ("pts_neck", "neck", "backbone_2d"),
    "tasks": ("task_heads", "tasks", "heads_list"),
    "heatmap": ("heatmap", "hm", "hm"),
    "reg": ("reg", "reg", "center"),
    "height": ("height", "height", "center_z"),
}


def module_name(module: str, framework: Framework) -> str:
    """Return what a framework calls a module; other branches have boxcov's names."""
    return _MODULES[module][FRAMEWORKS.index(framework)] if module in _MODULES else module


@dataclass(frozen=True)
class LayerNames:
    """The names of a layer and of the norm that follows it, in boxcov and in a framework."""

    own: str
    own_norm: str | None
    foreign: str
    foreign_norm: str | None


def layer_names(config: Config, framework: Framework) -> Iterator[LayerNames]:
    """Yield the names of every layer of the network."""
    if isinstance(config.encoder, Pillars):
        for i in range(len(config.encoder.widths)):
            own, foreign = (
                f"encoder.layers.{i}",
                f"{module_name('pillar encoder', framework)}.pfn_layers.{i}",
            )
            yield LayerNames(f"{own}.linear", f"{own}.norm", f"{foreign}.linear", f"{foreign}.norm")
    else:
        yield from _sparse(framework)
    yield from _dense(config, framework)
    yield from _head(config, framework)


def _sparse(framework: Framework) -> Iterator[LayerNames]:
    root = module_name("sparse encoder", framework)
    for stage in range(5):
        own = f"encoder.stages.{stage}"
        foreign = f"{root}.{_into_stage(stage, framework)}"
        yield LayerNames(f"{own}.conv", f"{own}.norm", f"{foreign}.0", f"{foreign}.1")
        if stage == 4:
            return
        for j in range(2):
            block = f"{root}.{_residual(stage, j, framework)}"
            for n in (1, 2):
                yield LayerNames(
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
    before = 0 if stage == 0 else 3 if framework == "det3d" else 1  # of the strided convolution
    return f"conv{stage + 1}.{before + j}"


def _dense(config: Config, framework: Framework) -> Iterator[LayerNames]:
    shift = 0 if framework == "mmdet3d" else 1  # the others have a layer for the padding
    for i, count in enumerate(config.dense.layers):
        own, foreign = f"backbone.blocks.{i}", f"{module_name('blocks', framework)}.blocks.{i}"
        for j in range(0, 3 * (count + 1), 3):
            yield LayerNames(
                f"{own}.{j}",
                f"{own}.{j + 1}",
                f"{foreign}.{j + shift}",
                f"{foreign}.{j + shift + 1}",
            )
    for i in range(len(config.dense.up_widths)):
        own, foreign = f"neck.deblocks.{i}", f"{module_name('deblocks', framework)}.deblocks.{i}"
        yield LayerNames(f"{own}.0", f"{own}.1", f"{foreign}.0", f"{foreign}.1")


def _head(config: Config, framework: Framework) -> Iterator[LayerNames]:
    root, tasks = (module_name(module, framework) for module in ("head", "tasks"))
    inner = ("conv", "bn") if framework == "mmdet3d" else ("0", "1")
    yield LayerNames(
        "head.shared.0",
        "head.shared.1",
        f"{root}.shared_conv.{inner[0]}",
        f"{root}.shared_conv.{inner[1]}",
    )
    for t in range(len(config.tasks)):
        for branch in (*config.branches, "heatmap"):
            own, foreign = (
                f"head.tasks.{t}.{branch}",
                f"{root}.{tasks}.{t}.{module_name(branch, framework)}",
            )
            first = foreign if framework == "det3d" else f"{foreign}.0"
            yield LayerNames(f"{own}.0", f"{own}.1", f"{first}.{inner[0]}", f"{first}.{inner[1]}")
            yield LayerNames(
                f"{own}.3", None, f"{foreign}.{3 if framework == 'det3d' else 1}", None
            )


def head_rows(weight: Tensor, branch: str, framework: Framework, legacy: bool) -> Tensor:
    """Convert the last layer of a branch, weight or bias (n, ...), to boxcov's outputs.

    Those are log (l, w, h) and (sin, cos) of the yaw.
    legacy: mmdetection3d before 1.0, which had det3d's conventions: (w, l, h) and a rotation of
    -yaw - pi / 2.
    """
    if framework == "openpcdet":
        return weight.flip(0) if branch == "rot" else weight
    if framework == "det3d" or legacy:
        if branch == "dim":
            return weight[[1, 0, 2]]
        if branch == "rot":  # sin(yaw) = -cos(rot), cos(yaw) = -sin(rot)
            return -weight.flip(0)
    return weight
