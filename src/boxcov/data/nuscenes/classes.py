"""The ten detection classes of nuScenes, their categories and their attributes."""

from __future__ import annotations

_VEHICLES = ("car", "truck", "construction_vehicle", "bus", "trailer")
_OTHERS = ("barrier", "motorcycle", "bicycle", "pedestrian", "traffic_cone")
CLASSES = _VEHICLES + _OTHERS  # in the order of CenterPoint's tasks

# the official mapping; other categories (animals, strollers, debris ...) have no detection class
CATEGORIES = {
    "vehicle.car": "car",
    "vehicle.truck": "truck",
    "vehicle.construction": "construction_vehicle",
    "vehicle.bus.bendy": "bus",
    "vehicle.bus.rigid": "bus",
    "vehicle.trailer": "trailer",
    "movable_object.barrier": "barrier",
    "vehicle.motorcycle": "motorcycle",
    "vehicle.bicycle": "bicycle",
    "human.pedestrian.adult": "pedestrian",
    "human.pedestrian.child": "pedestrian",
    "human.pedestrian.construction_worker": "pedestrian",
    "human.pedestrian.police_officer": "pedestrian",
    "movable_object.trafficcone": "traffic_cone",
}

# moving, not moving: the more frequent attributes, as in the submissions of CenterPoint
_ATTRIBUTES = {
    **dict.fromkeys(_VEHICLES, ("vehicle.moving", "vehicle.parked")),
    "bus": ("vehicle.moving", "vehicle.stopped"),
    **dict.fromkeys(("motorcycle", "bicycle"), ("cycle.with_rider", "cycle.without_rider")),
    "pedestrian": ("pedestrian.moving", "pedestrian.standing"),
    **dict.fromkeys(("barrier", "traffic_cone"), ("", "")),
}


def attribute(name: str, speed: float) -> str:
    """Return the attribute of a detection of this class and speed in m/s; NaN means unknown.

    >>> attribute("car", 3.0), attribute("pedestrian", 0.0), attribute("barrier", 0.0)
    ('vehicle.moving', 'pedestrian.standing', '')
    """
    moving, still = _ATTRIBUTES[name]
    return moving if speed > 0.2 else still
