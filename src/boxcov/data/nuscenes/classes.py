"""The ten detection classes: which of the 23 categories they gather, and the attribute a detection of each is given."""

from __future__ import annotations

CLASSES = (
    "car",
    "truck",
    "construction_vehicle",
    "bus",
    "trailer",
    "barrier",
    "motorcycle",
    "bicycle",
    "pedestrian",
    "traffic_cone",
)  # in the order of CenterPoint's tasks

# the official mapping; categories that are not here (animals, strollers, debris, ambulances ...) are no detection class
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

_VEHICLE = ("vehicle.moving", "vehicle.parked")
_CYCLE = ("cycle.with_rider", "cycle.without_rider")
_ATTRIBUTES = {  # moving, and not: the likelier of each, as CenterPoint and its successors submit them
    "car": _VEHICLE,
    "truck": _VEHICLE,
    "construction_vehicle": _VEHICLE,
    "bus": ("vehicle.moving", "vehicle.stopped"),
    "trailer": _VEHICLE,
    "barrier": ("", ""),
    "motorcycle": _CYCLE,
    "bicycle": _CYCLE,
    "pedestrian": ("pedestrian.moving", "pedestrian.standing"),
    "traffic_cone": ("", ""),
}


def attribute(name: str, speed: float) -> str:
    """The attribute of a detection, by its class and its speed in m/s; an unknown (NaN) speed counts as none.

    >>> attribute("car", 3.0), attribute("pedestrian", 0.0), attribute("barrier", 0.0)
    ('vehicle.moving', 'pedestrian.standing', '')
    """
    moving, still = _ATTRIBUTES[name]
    return moving if speed > 0.2 else still
