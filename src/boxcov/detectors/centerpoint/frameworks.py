"""What differs between det3d, mmdetection3d and OpenPCDet: layer names and conventions of boxes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import warn

from torch import Tensor

from boxcov.detectors.centerpoint.config import FRAMEWORKS, Config, Framework, Pillars
from boxcov.errors import BoxcovError, BoxcovWarning

TITLES: dict[Framework, str] = {
    "mmdet3d": "mmdetection3d",
    "det3d": "det3d",
    "openpcdet": "OpenPCDet",
}
GENERATIONS = {True: "before 1.0", False: "1.0 or later"}  # of mmdetection3d; True: legacy
# The branch with the conventions of 1.0 was begun in 2021; its version said 0.16 at most.
_BRANCH_BEGUN, _BRANCH_VERSION = "202104", 16

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
# Of the sparse encoder: the last convolution, those into a stage (mmdetection3d has them at the end
# of the stage before), the residual blocks of a stage, and how many layers come before these.
_SPARSE: dict[Framework, tuple[str, str, str, int]] = {
    "mmdet3d": ("conv_out", "encoder_layers.encoder_layer{0}.2", "encoder_layers.encoder_layer", 0),
    "det3d": ("extra_conv", "conv{1}", "conv", 3),
    "openpcdet": ("conv_out", "conv{1}.0", "conv", 1),
}
_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def module_name(module: str, framework: Framework) -> str:
    """Return what a framework calls a module; other branches have boxcov's names."""
    return _MODULES[module][FRAMEWORKS.index(framework)] if module in _MODULES else module


@dataclass(frozen=True)
class LayerNames:
    """The names of a layer in boxcov and in a framework."""

    own: str
    foreign: str
    has_norm: bool = True  # whether a norm follows

    @property
    def own_norm(self) -> str | None:
        return _norm_name(self.own, "norm") if self.has_norm else None

    @property
    def foreign_norm(self) -> str | None:
        return _norm_name(self.foreign, "bn") if self.has_norm else None

    def tensors(self) -> dict[str, str]:
        """Return what the framework calls each tensor of the layer and its norm."""
        if not self.has_norm:
            return {f"{self.own}.{leaf}": f"{self.foreign}.{leaf}" for leaf in ("weight", "bias")}
        norm = {f"{self.own_norm}.{leaf}": f"{self.foreign_norm}.{leaf}" for leaf in _NORM}
        return {f"{self.own}.weight": f"{self.foreign}.weight", **norm}


def _norm_name(layer: str, word: str) -> str:
    """Return the name of the norm after a layer.

    >>> _norm_name("neck.0", "bn"), _norm_name("block.conv2", "bn"), _norm_name("vfe.linear", "bn")
    ('neck.1', 'block.bn2', 'vfe.norm')
    """
    parent, _, name = layer.rpartition(".")
    if name.isdecimal():
        return f"{parent}.{int(name) + 1}"
    return f"{parent}.{name.replace('conv', word).replace('linear', 'norm')}"


def layer_names(config: Config, framework: Framework) -> Iterator[LayerNames]:
    """Yield the names of every layer of the network."""
    if isinstance(config.encoder, Pillars):
        root = module_name("pillar encoder", framework)
        for i in range(len(config.encoder.widths)):
            yield LayerNames(f"encoder.layers.{i}.linear", f"{root}.pfn_layers.{i}.linear")
    else:
        yield from _sparse(framework)
    yield from _dense(config, framework)
    yield from _head(config, framework)


def _sparse(framework: Framework) -> Iterator[LayerNames]:
    root = module_name("sparse encoder", framework)
    last, strided, folder, before = _SPARSE[framework]
    yield LayerNames("encoder.stages.0.conv", f"{root}.conv_input.0")
    for stage in range(4):
        own, first = f"encoder.stages.{stage}", before if stage else 0
        if stage:
            yield LayerNames(f"{own}.conv", f"{root}.{strided.format(stage, stage + 1)}.0")
        for j in (0, 1):
            block = f"{root}.{folder}{stage + 1}.{first + j}"
            yield LayerNames(f"{own}.blocks.{j}.conv1", f"{block}.conv1")
            yield LayerNames(f"{own}.blocks.{j}.conv2", f"{block}.conv2")
    yield LayerNames("encoder.stages.4.conv", f"{root}.{last}.0")


def _dense(config: Config, framework: Framework) -> Iterator[LayerNames]:
    blocks, deblocks = (module_name(module, framework) for module in ("blocks", "deblocks"))
    shift = 0 if framework == "mmdet3d" else 1  # the others have a layer for the padding
    for i, count in enumerate(config.dense.layers):
        for j in range(0, 3 * (count + 1), 3):
            yield LayerNames(f"backbone.blocks.{i}.{j}", f"{blocks}.blocks.{i}.{j + shift}")
    for i in range(len(config.dense.up_widths)):
        yield LayerNames(f"neck.deblocks.{i}.0", f"{deblocks}.deblocks.{i}.0")


def _head(config: Config, framework: Framework) -> Iterator[LayerNames]:
    root, tasks = (module_name(module, framework) for module in ("head", "tasks"))
    conv = "conv" if framework == "mmdet3d" else "0"
    yield LayerNames("head.shared.0", f"{root}.shared_conv.{conv}")
    for t in range(len(config.tasks)):
        for branch in (*config.branches, "heatmap"):
            own = f"head.tasks.{t}.{branch}"
            foreign = f"{root}.{tasks}.{t}.{module_name(branch, framework)}"
            first, last = ("0", "3") if framework == "det3d" else (f"0.{conv}", "1")
            yield LayerNames(f"{own}.0", f"{foreign}.{first}")
            yield LayerNames(f"{own}.3", f"{foreign}.{last}", has_norm=False)


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


# generations of mmdetection3d


def choose_generation(
    given: bool | None, about: Mapping[str, Any], point_features: int | None, path: Path
) -> tuple[bool, str]:
    """Return whether mmdetection3d before 1.0 wrote a checkpoint, and the evidence.

    Version 1.0 changed the conventions of sizes and yaw, but the weights have the same shapes.
    given: ``legacy`` of the user, who is warned if the file tells another generation, and asked if
    it tells none. about: the meta data. point_features: inputs of the pillar encoder's first layer.
    """
    found, evidence = _generation(about, point_features, path)
    if given is None:
        if found is None:
            raise BoxcovError(
                f"{path}: the file does not tell whether mmdetection3d before 1.0 wrote it, which "
                f"had other conventions for sizes and yaw (found: {evidence}): give legacy=True "
                "for before 1.0 or legacy=False, on the command line --legacy or --no-legacy. If "
                "you do not know, run boxcov check with either: it compares the boxes with their "
                "classes"
            )
        return found, evidence
    if found is not None and found != given:
        warn(
            f"{path}: read as a file of mmdetection3d {GENERATIONS[given]}, as given, but it says "
            f"{GENERATIONS[found]} ({evidence}): sizes and headings will be wrong. Remove legacy= "
            "(--legacy or --no-legacy)",
            BoxcovWarning,
            stacklevel=2,
        )
    return given, "as given"


def _generation(
    about: Mapping[str, Any], point_features: int | None, path: Path
) -> tuple[bool | None, str]:
    """Return whether the file is of before 1.0, None if that is undecided, and the evidence."""
    version, date = str(about.get("mmdet3d_version") or "")[:20], _date(about, path)
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    if "mmengine_version" in about:
        return False, "mmengine_version in the meta data, which only 1.1 and later write"
    if numbers and numbers[0] >= 1:
        return False, f"mmdet3d_version {version} in the meta data"
    if len(numbers) == 2 and numbers[1] > _BRANCH_VERSION:
        return True, f"mmdet3d_version {version} in the meta data"
    if date and date[0] < _BRANCH_BEGUN:
        return True, f"{date[1]}, before the conventions of 1.0 existed"
    if not numbers and point_features == 11:
        return False, "11 point features, since 1.0 (10 before)"
    seen = [f"mmdet3d_version {version}" if version else "no mmdet3d_version"]
    seen += [date[1]] if date else []
    seen += [f"{point_features} point features"] if point_features else []
    return None, ", ".join(seen)


def _date(about: Mapping[str, Any], path: Path) -> tuple[str, str] | None:
    """Return the year and month of a checkpoint, as 202110, and where they are from."""
    text = str(about.get("time", ""))
    try:
        stamp = time.strptime(text)  # time.asctime, as mmcv writes it
        return f"{stamp.tm_year}{stamp.tm_mon:02}", f"written {stamp.tm_year}-{stamp.tm_mon:02}"
    except ValueError:
        pass
    if found := re.match(r"(20\d\d)(\d\d)\d\d_", text):
        return found[1] + found[2], f"written {found[1]}-{found[2]}"
    if found := re.search(r"_(20\d\d)(\d\d)\d\d_\d{6}", path.name):
        return found[1] + found[2], f"{found[1]}-{found[2]} in the file name"
    return None
