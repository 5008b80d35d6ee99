"""CenterPoint as a ``Detector``: encoder, SECOND, SECONDFPN and CenterHead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isclose, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from boxcov._torch.modules import shadow
from boxcov._torch.process_state import at_least_float32, seeded
from boxcov.data.augment import Augmentation
from boxcov.detector import SIGNAL_INPUTS, Candidates, Detector, Selection, flatten_configuration
from boxcov.detectors.centerpoint.config import Config, Pillars
from boxcov.detectors.centerpoint.decode import boxes_of, class_logits_at, values_at
from boxcov.detectors.centerpoint.fused_network import FusedCenterPoint
from boxcov.detectors.centerpoint.loss import MapTargets, encode, frame_losses
from boxcov.detectors.centerpoint.network import CenterHead, Second, SecondFPN
from boxcov.detectors.centerpoint.pillar_encoder import PillarEncoder
from boxcov.detectors.centerpoint.point_signals import point_maps
from boxcov.detectors.centerpoint.selection import candidates, select, select_static
from boxcov.detectors.centerpoint.signals import signals
from boxcov.detectors.centerpoint.voxel_encoder import VoxelEncoder
from boxcov.detectors.centerpoint.voxels import check_clouds
from boxcov.head_stages import HeadStages, LogitBranch
from boxcov.static_selection import StaticLimits, StaticSelection

Raw = dict[str, Any]


class Fact(NamedTuple):
    """One thing that ``load`` understood of a checkpoint."""

    name: str
    value: str
    evidence: str


class CenterPoint(Detector):
    """Boxes x y z w l h yaw vx vy from point clouds.

    Inputs: a list with one tensor (N, 5) per frame, x y z intensity dt.
    Targets: a list with one dict per frame: ``boxes`` (n, 9), with the centre of gravity, the yaw
    counter-clockwise from x and NaN for an unknown velocity, and ``labels`` (n,), indices into
    ``classes``.

    >>> detector = CenterPoint(Config.small()).eval()
    >>> sum(p.numel() for p in detector.parameters()) <= 2_000_000
    True
    >>> found = detector.detect([torch.zeros(0, 5)])
    >>> found.boxes.shape[1]
    9
    """

    def __init__(self, config: Config, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.provenance: tuple[Fact, ...] = ()  # what ``load`` understood of a checkpoint
        self.box_fields, self.classes = config.box_fields, config.classes
        with seeded(seed):
            encoder = PillarEncoder if isinstance(config.encoder, Pillars) else VoxelEncoder
            self.encoder = encoder(config)
            self.backbone = Second(config.bev_channels, config.dense)
            self.neck = SecondFPN(config.dense)
            self.head = CenterHead(config)
        first = torch.tensor([config.first_class(task) for task in range(len(config.tasks))])
        self.first_classes: Tensor  # (tasks,) the label of each task's first class
        self.register_buffer("first_classes", first, persistent=False)

    def forward(self, inputs: Sequence[Tensor]) -> Raw:
        features = self.neck(self.backbone(self.encoder(inputs)))
        raw = {"features": features, "tasks": self.head(features)}
        return raw if isinstance(inputs, Tensor) else {**raw, "points": list(inputs)}

    def parts(self) -> dict[str, nn.Module | tuple[nn.Module, ...]]:
        return {name: getattr(self, name) for name in ("head", "neck", "backbone", "encoder")}

    def configuration(self) -> dict[str, str]:
        about = asdict(self.config)
        for name in ("loss", "dense", "sweeps"):  # decide no box, or are seen in the weights
            del about[name]
        strides = {"strides": self.config.dense.strides, "up_strides": self.config.dense.up_strides}
        own = flatten_configuration({"selection": about.pop("reporting"), **about, **strides})
        return {**super().configuration(), **own}

    # from raw outputs to boxes

    def select(self, raw: Raw) -> Selection:
        return select(raw["tasks"], self.config)

    def select_static(self, raw: Raw, limits: StaticLimits) -> StaticSelection:
        return select_static(raw["tasks"], self.config, limits)

    def static_part(self) -> CenterPoint:
        """Return the network after the encoder; its inputs are maps (B, channels, ny, nx)."""
        twin = shadow(self)
        twin._modules["encoder"] = nn.Identity()  # in the twin's dict: the detector is unchanged
        return twin

    def static_inputs(self, inputs: Sequence[Tensor]) -> Tensor:
        return self.encoder(inputs)

    def candidates(self, raw: Raw) -> Candidates:
        return candidates(raw["tasks"], self.config)

    def decode(self, raw: Raw, selection: Selection) -> Tensor:
        where = selection.where
        values = values_at(raw["tasks"], where, list(self.config.branches))
        return boxes_of(values, where.row, where.column, self.config)

    def logits(self, raw: Raw, selection: Selection) -> Tensor:
        """Return the heat map's logit (m,) of each box's class at its cell."""
        every = class_logits_at(raw["tasks"], selection.where)
        return every.gather(1, selection.labels[:, None])[:, 0]

    def signals(self, raw: Raw, selection: Selection) -> dict[str, Tensor]:
        maps = raw.get(SIGNAL_INPUTS)
        if maps is None and "points" in raw:
            maps = self.signal_inputs(raw["points"])
        return signals(raw["tasks"], maps, selection, self.config)

    def signal_inputs(self, inputs: Sequence[Tensor]) -> Tensor | None:
        # the inputs of the static part are maps, not points
        if isinstance(inputs, Tensor):
            return None
        maps = [point_maps(cloud, 0, 1, self.config) for cloud in check_clouds(inputs)]
        return maps[0] if len(maps) == 1 else torch.cat(maps, 1)

    def augment(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[dict[str, Any]],
        generator: torch.Generator,
    ) -> tuple[list[Tensor], list[Any]]:
        """Return the frames turned by up to 22.5 degrees, and mirrored where the range is."""
        low, high = self.config.point_range[:2], self.config.point_range[3:5]
        mirror_x, mirror_y = (isclose(a, -b) for a, b in zip(low, high))
        change = Augmentation(pi / 8, scale=0.0, mirror_x=mirror_x, mirror_y=mirror_y)
        return change(check_clouds(inputs), targets, generator)

    def fused_network(self, example: Sequence[Tensor]) -> FusedCenterPoint:
        return FusedCenterPoint(self, example)

    def stages(self, raw: Raw, selection: Selection) -> HeadStages:
        """Return the head as stages; the kind of a box is its task."""
        where = selection.where
        stem, branches, heat = self.head.stages()
        sizes = list(self.config.branches.values())

        def decode(numbers: Tensor, row: Tensor, column: Tensor) -> Tensor:
            values = dict(zip(self.config.branches, at_least_float32(numbers).split(sizes, 1)))
            return boxes_of(values, row, column, self.config)

        cell = (where.frame, where.row, where.column, where.task)
        logit = LogitBranch(heat, channel=selection.labels - self.first_classes[where.task])
        return HeadStages(raw["features"], *cell, stem, branches, decode, logit)

    # the training loss

    def loss(self, raw: Raw, targets: Sequence[dict[str, Tensor]] | MapTargets) -> Tensor:
        """Return the focal loss of the heat maps plus the weighted L1 loss of the boxes (B,)."""
        if not isinstance(targets, MapTargets):
            targets = self.encode(targets, raw["tasks"][0]["heatmap"])
        return frame_losses(raw["tasks"], targets, self.config)

    def encode(self, targets: Sequence[dict[str, Tensor]], like: Tensor) -> MapTargets:
        """Return targets on the head's map, with the dtype and device of ``like`` (B, ...)."""
        return encode(targets, self.config, like)

    def sample_targets(self, raw: Raw, generator: torch.Generator) -> MapTargets:
        """Return targets drawn from the prediction: objects by score, values with noise.

        The gradient of the L1 loss depends only on the side of the prediction on which a value
        lies, so the width of the noise does not matter.
        """
        heats, places, values = [], [], []
        for task, maps in enumerate(raw["tasks"]):
            heat = torch.bernoulli(maps["heatmap"].sigmoid(), generator=generator)
            frame, label, row, column = heat.nonzero(as_tuple=True)
            label = label + self.config.first_class(task)
            at = [maps[name][frame, :, row, column] for name in self.config.branches]
            drawn = torch.cat(at, 1)
            heats.append(heat)
            places.append(torch.stack([torch.full_like(frame, task), frame, label, row, column]))
            values.append(drawn + torch.empty_like(drawn).normal_(generator=generator))
        sizes = tuple(len(classes) for classes in self.config.tasks)
        tasks, frame, label, row, column = torch.cat(places, 1)
        heat = torch.cat(heats, 1)
        return MapTargets(heat, tasks, frame, label, row, column, torch.cat(values), sizes)
