"""The bodies of everything in a scene: the ten classes, and the backdrop without labels."""

from __future__ import annotations

from boxcov.data.nuscenes.classes import CLASSES
from boxcov.data.simulated.catalogue.backdrop import BACKDROP_BODIES
from boxcov.data.simulated.catalogue.road_users import ROAD_USERS
from boxcov.data.simulated.catalogue.unseen import UNSEEN_BODIES
from boxcov.data.simulated.catalogue.vehicles import CARS, LARGE

__all__ = ["BACKDROP", "BODIES", "KINDS", "UNSEEN_BODIES"]

BACKDROP = ("ego", "building", "wall", "pole", "sign", "bin", "tree", "bush", "spray")
KINDS = CLASSES + BACKDROP  # a body's kind; those of the backdrop have no label

BODIES = CARS + LARGE + ROAD_USERS + BACKDROP_BODIES
