"""The routes of MCI: the head per instance, or the whole network."""

from __future__ import annotations

import torch

from boxcov.detector import InstanceGroup
from boxcov.predict.engine_options import EngineOptions
from boxcov.predict.instances import instance_groups, leaves_read, with_leaves
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector
from boxcov.predict.route.base import Router
from boxcov.predict.route.instances import InstancesCheck


class MCIRouter(Router):
    """The head per instance, if all chosen weights that affect the boxes are in it."""

    def __init__(self, linearized: LinearizedDetector, options: EngineOptions) -> None:
        super().__init__(linearized, options)
        self.instances_check = InstancesCheck()

    def needs_trunk(self) -> bool:
        return not self.instances_check.is_verified

    def groups(self, point: LinearizationPoint) -> list[InstanceGroup] | None:
        """The instances of a frame; None if the whole network has to run."""
        check, watched = self.instances_check, with_leaves(point)
        if check.is_refused:
            return None
        with torch.inference_mode(False), torch.enable_grad():
            groups = instance_groups(watched)
            # in every frame: boxes of another level may read other raw outputs
            read, z = set[int](), torch.zeros_like(point.z)
            for index, run in groups or []:
                own = run()
                read |= leaves_read(own)
                z[index] = own.detach().to(z.dtype)
        if groups is None:
            check.refuse()
        elif not check.verify(watched, set(), z):
            return None
        elif check.upstream(watched, read):
            check.refuse()
        self.settle("the whole network" if check.is_refused else "instances")
        return None if check.is_refused else groups
