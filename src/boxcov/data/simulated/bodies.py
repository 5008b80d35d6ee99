"""The kinds of things there are, and the bodies they have."""

from __future__ import annotations

from boxcov.data.nuscenes.classes import CLASSES
from boxcov.data.simulated.small import SMALL
from boxcov.data.simulated.street import STREET
from boxcov.data.simulated.vehicles import CARS, LARGE

BACKDROP = ("ego", "building", "wall", "pole", "sign", "bin", "tree", "bush", "spray")
KINDS = CLASSES + BACKDROP

SEEN = CARS + LARGE + SMALL + STREET
