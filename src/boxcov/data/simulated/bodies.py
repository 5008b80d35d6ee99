"""The bodies of the ten nuScenes classes and of the street behind them."""

from __future__ import annotations

from boxcov.data.simulated.parts import (
    BARK,
    CLOTH,
    CONCRETE,
    GLASS,
    LATTICE,
    LEAVES,
    METAL,
    PAINT,
    PLASTIC,
    RETRO,
    RUBBER,
    SPOKES,
    SPRAY,
    Body,
    Part,
    box,
    pair,
    tube,
)

# index = label; the order in which CenterPoint's six tasks name them
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
)
BACKDROP = ("ego", "building", "wall", "pole", "sign", "tree", "bush", "spray")
KINDS = CLASSES + BACKDROP


def axles(radius: float, *places: float, length: float = 0.07, width: float = 1.0) -> tuple[Part, ...]:
    """Wheels: a box across the width at each place along the length, ``radius`` a fraction of the height.

    >>> len(axles(0.2, -0.3, 0.3))
    2
    """
    return tuple(box(x - length, x + length, width, 0.0, 2 * radius, RUBBER) for x in places)


# number plates at both ends: one bar through the whole length, of which only the ends look out
_PLATES = box(-0.5, 0.5, 0.28, 0.3, 0.36, RETRO)

CARS = (
    Body(  # saloon
        "car",
        (1.87, 4.7, 1.5),
        (
            box(-0.49, 0.495, 0.98, 0.15, 0.5, PAINT),
            box(-0.47, 0.44, 0.96, 0.5, 0.62, PAINT),
            box(-0.36, 0.21, 0.86, 0.62, 0.82, GLASS),
            box(-0.27, 0.11, 0.76, 0.82, 0.95, GLASS),
            box(-0.24, 0.07, 0.72, 0.95, 1.0, PAINT),
            _PLATES,
            *axles(0.21, -0.3, 0.31),
        ),
        share=3.0,
    ),
    Body(  # hatchback
        "car",
        (1.8, 4.1, 1.52),
        (
            box(-0.49, 0.495, 0.98, 0.16, 0.56, PAINT),
            box(-0.48, 0.4, 0.95, 0.56, 0.64, PAINT),
            box(-0.46, 0.2, 0.87, 0.64, 0.82, GLASS),
            box(-0.43, 0.1, 0.78, 0.82, 0.95, GLASS),
            box(-0.41, 0.05, 0.74, 0.95, 1.0, PAINT),
            _PLATES,
            *axles(0.21, -0.31, 0.31),
        ),
        share=2.0,
    ),
    Body(  # sport utility
        "car",
        (2.0, 4.85, 1.8),
        (
            box(-0.49, 0.495, 0.98, 0.17, 0.6, PAINT),
            box(-0.485, 0.22, 0.92, 0.6, 0.84, GLASS),
            box(-0.46, 0.12, 0.84, 0.84, 0.95, GLASS),
            box(-0.45, 0.09, 0.8, 0.95, 1.0, PAINT),
            _PLATES,
            *axles(0.22, -0.3, 0.31),
        ),
        share=2.0,
    ),
    Body(  # van
        "car",
        (2.0, 5.2, 2.1),
        (
            box(-0.49, 0.49, 0.98, 0.12, 0.5, PAINT),
            box(-0.49, 0.38, 0.97, 0.5, 0.97, PAINT),
            box(0.2, 0.42, 0.9, 0.5, 0.75, GLASS),
            box(-0.48, 0.28, 0.93, 0.97, 1.0, PAINT),
            _PLATES,
            *axles(0.17, -0.3, 0.32),
        ),
    ),
)

LARGE = (
    Body(  # box truck
        "truck",
        (2.45, 7.2, 3.1),
        (
            box(0.24, 0.5, 0.88, 0.14, 0.42, PAINT),
            box(0.24, 0.47, 0.86, 0.42, 0.66, GLASS),
            box(0.24, 0.45, 0.84, 0.66, 0.78, PAINT),
            box(-0.5, 0.22, 1.0, 0.3, 1.0, PLASTIC),
            box(-0.48, 0.22, 0.4, 0.18, 0.3, METAL),
            *axles(0.15, -0.33, 0.35, width=0.92),
        ),
        spread=0.12,
    ),
    Body(  # pickup and flatbed
        "truck",
        (2.2, 6.2, 2.1),
        (
            box(-0.5, 0.5, 1.0, 0.2, 0.5, PAINT),
            box(0.05, 0.32, 0.88, 0.5, 0.8, GLASS),
            box(0.07, 0.27, 0.82, 0.8, 1.0, PAINT),
            *pair(box(-0.5, 0.04, 0.04, 0.5, 0.62, PAINT, y=0.47)),
            box(-0.5, -0.48, 1.0, 0.5, 0.62, PAINT),
            *axles(0.19, -0.3, 0.32, width=0.96),
        ),
        spread=0.1,
    ),
    Body(  # tractor
        "truck",
        (2.6, 6.6, 3.5),
        (
            box(0.1, 0.5, 0.95, 0.15, 0.5, PAINT),
            box(0.08, 0.4, 0.93, 0.5, 0.72, GLASS),
            box(0.06, 0.34, 0.9, 0.72, 1.0, PAINT),
            box(-0.5, 0.1, 0.4, 0.2, 0.32, METAL),
            *axles(0.15, -0.38, -0.2, 0.32),
        ),
        spread=0.1,
        share=0.7,
    ),
    Body(  # city bus
        "bus",
        (2.9, 11.4, 3.3),
        (
            box(-0.5, 0.5, 1.0, 0.1, 0.38, PAINT),
            box(-0.498, 0.498, 0.99, 0.38, 0.76, GLASS),
            box(-0.5, 0.495, 1.0, 0.76, 0.93, PAINT),
            box(-0.42, 0.1, 0.7, 0.93, 1.0, PAINT),
            *axles(0.15, -0.27, 0.3, length=0.04, width=0.98),
        ),
    ),
    Body(  # coach
        "bus",
        (2.95, 10.2, 3.6),
        (
            box(-0.5, 0.5, 1.0, 0.1, 0.5, PAINT),
            box(-0.5, 0.47, 0.97, 0.5, 0.86, GLASS),
            box(-0.5, 0.45, 0.96, 0.86, 1.0, PAINT),
            *axles(0.14, -0.3, 0.3, length=0.05, width=0.98),
        ),
        spread=0.15,
    ),
    Body(  # container on a semi-trailer
        "trailer",
        (2.7, 12.0, 3.9),
        (
            box(-0.5, 0.5, 1.0, 0.3, 1.0, PLASTIC),
            box(-0.49, 0.45, 0.4, 0.2, 0.3, METAL),
            *pair(box(0.25, 0.27, 0.06, 0.0, 0.3, METAL, y=0.3)),
            *axles(0.13, -0.4, -0.29, length=0.045, width=0.94),
        ),
        spread=0.1,
    ),
    Body(  # flatbed trailer, loaded at the rear
        "trailer",
        (2.5, 9.5, 2.7),
        (
            box(-0.5, 0.5, 1.0, 0.36, 0.46, METAL),
            box(0.47, 0.5, 1.0, 0.46, 0.75, METAL),
            box(-0.45, 0.05, 0.8, 0.46, 1.0, PLASTIC),
            *axles(0.18, -0.36, -0.22, length=0.05, width=0.94),
            *pair(box(0.3, 0.32, 0.06, 0.0, 0.36, METAL, y=0.3)),
        ),
        spread=0.15,
        share=0.6,
    ),
    Body(  # excavator: tracks, house, boom up, stick down
        "construction_vehicle",
        (2.8, 7.2, 3.1),
        (
            *pair(box(-0.42, 0.12, 0.22, 0.0, 0.27, RUBBER, y=0.39)),
            box(-0.5, 0.04, 0.9, 0.3, 0.62, PAINT),
            box(-0.22, 0.06, 0.4, 0.62, 0.95, GLASS, y=0.22),
            box(0.03, 0.14, 0.16, 0.5, 0.8, PAINT, y=-0.1),
            box(0.12, 0.32, 0.16, 0.75, 1.0, PAINT, y=-0.1),
            box(0.3, 0.4, 0.14, 0.45, 0.88, PAINT, y=-0.1),
            box(0.36, 0.5, 0.3, 0.1, 0.48, METAL, y=-0.1),
        ),
        spread=0.12,
    ),
    Body(  # wheel loader: bucket low in front
        "construction_vehicle",
        (2.6, 6.8, 3.0),
        (
            box(-0.5, 0.0, 0.8, 0.25, 0.55, PAINT),
            box(-0.18, 0.08, 0.6, 0.55, 1.0, GLASS),
            box(-0.19, 0.09, 0.62, 0.95, 1.0, PAINT),
            *pair(box(0.05, 0.4, 0.1, 0.3, 0.45, PAINT, y=0.2)),
            box(0.36, 0.5, 1.0, 0.04, 0.36, METAL),
            *axles(0.22, -0.32, 0.15, length=0.1, width=0.92),
        ),
        spread=0.12,
    ),
)

_RIDER = (
    *pair(tube(-0.14, 0.1, 0.22, 0.28, 0.6, CLOTH, y=0.2)),
    tube(-0.2, 0.06, 0.72, 0.55, 0.86, CLOTH),
    tube(-0.08, 0.06, 0.3, 0.86, 1.0, CLOTH),
)
_WALKER = (
    tube(-0.26, 0.26, 0.72, 0.46, 0.84, CLOTH),
    tube(-0.15, 0.17, 0.3, 0.86, 1.0, CLOTH),
    *pair(tube(-0.14, 0.2, 0.18, 0.45, 0.8, CLOTH, y=0.41)),
)

SMALL = (
    Body(
        "pedestrian",
        (0.66, 0.74, 1.74),
        (*_WALKER, tube(0.02, 0.5, 0.3, 0.0, 0.48, CLOTH, y=0.17), tube(-0.5, -0.02, 0.3, 0.0, 0.48, CLOTH, y=-0.17)),
        spread=0.09,
        share=2.0,
    ),
    Body("pedestrian", (0.64, 0.52, 1.7), (*_WALKER, *pair(tube(-0.5, 0.5, 0.4, 0.0, 0.48, CLOTH, y=0.22))), spread=0.09),
    Body(
        "bicycle",
        (0.58, 1.72, 1.06),
        (
            box(-0.5, -0.13, 0.09, 0.0, 0.62, SPOKES),
            box(0.13, 0.5, 0.09, 0.0, 0.62, SPOKES),
            box(-0.3, 0.25, 0.1, 0.35, 0.68, LATTICE),
            box(-0.22, -0.08, 0.26, 0.84, 0.93, PLASTIC),
            box(0.2, 0.28, 1.0, 0.92, 1.0, METAL),
            box(0.2, 0.24, 0.08, 0.3, 0.92, METAL),
        ),
    ),
    Body(
        "bicycle",
        (0.62, 1.75, 1.66),
        (
            box(-0.5, -0.13, 0.09, 0.0, 0.4, SPOKES),
            box(0.13, 0.5, 0.09, 0.0, 0.4, SPOKES),
            box(-0.3, 0.25, 0.1, 0.22, 0.44, LATTICE),
            box(0.16, 0.24, 1.0, 0.56, 0.64, METAL),
            box(-0.5, -0.48, 0.12, 0.4, 0.45, RETRO),
            *_RIDER,
        ),
    ),
    Body(
        "motorcycle",
        (0.8, 2.1, 1.2),
        (
            box(-0.5, -0.2, 0.22, 0.0, 0.52, RUBBER),
            box(0.2, 0.5, 0.2, 0.0, 0.52, RUBBER),
            box(-0.3, 0.24, 0.45, 0.22, 0.7, PAINT),
            box(-0.38, 0.0, 0.36, 0.6, 0.72, PLASTIC),
            box(0.14, 0.26, 1.0, 0.8, 0.9, METAL),
            box(0.16, 0.28, 0.4, 0.5, 1.0, PAINT),
        ),
    ),
    Body(
        "motorcycle",
        (0.82, 2.15, 1.62),
        (
            box(-0.5, -0.2, 0.22, 0.0, 0.38, RUBBER),
            box(0.2, 0.5, 0.2, 0.0, 0.38, RUBBER),
            box(-0.32, 0.26, 0.5, 0.16, 0.52, PAINT),
            box(0.14, 0.26, 1.0, 0.58, 0.66, METAL),
            *_RIDER,
        ),
    ),
    Body(
        "traffic_cone",
        (0.42, 0.42, 0.95),
        (
            box(-0.5, 0.5, 1.0, 0.0, 0.07, RUBBER),
            tube(-0.36, 0.36, 0.72, 0.07, 0.3, PLASTIC),
            tube(-0.28, 0.28, 0.56, 0.3, 0.5, RETRO),
            tube(-0.2, 0.2, 0.4, 0.5, 0.72, PLASTIC),
            tube(-0.12, 0.12, 0.24, 0.72, 1.0, PLASTIC),
        ),
        spread=0.14,
    ),
    Body(  # filled plastic, wide foot
        "barrier",
        (2.3, 0.52, 1.0),
        (box(-0.5, 0.5, 1.0, 0.0, 0.3, PLASTIC), box(-0.34, 0.34, 1.0, 0.3, 0.55, PLASTIC), box(-0.22, 0.22, 0.98, 0.55, 1.0, PLASTIC)),
        spread=0.09,
    ),
    Body(  # boards on feet
        "barrier",
        (2.4, 0.55, 1.05),
        (
            *pair(box(-0.5, 0.5, 0.06, 0.0, 0.08, RUBBER, y=0.38)),
            *pair(box(-0.1, 0.1, 0.04, 0.0, 1.0, METAL, y=0.38)),
            box(-0.08, 0.08, 1.0, 0.72, 0.98, RETRO._replace(reflectivity=0.5)),
            box(-0.08, 0.08, 1.0, 0.25, 0.5, PLASTIC),
        ),
        spread=0.09,
    ),
)

STREET = (
    Body("ego", (1.2, 1.8, 1.54), (box(-0.5, 0.5, 1.0, 0.0, 1.0, PAINT),), spread=0.0),
    Body("building", (10.0, 15.0, 8.0), (box(-0.5, 0.5, 1.0, 0.0, 1.0, CONCRETE),), spread=0.25),
    Body(
        "building",
        (9.0, 13.0, 6.0),
        (
            box(-0.49, 0.49, 0.97, 0.0, 0.45, GLASS._replace(reflectivity=0.02)),
            box(-0.5, 0.5, 1.0, 0.45, 1.0, CONCRETE),
            box(-0.05, 0.05, 1.0, 0.0, 0.45, CONCRETE),
        ),
        spread=0.25,
    ),
    Body("wall", (0.3, 9.0, 1.4), (box(-0.5, 0.5, 1.0, 0.0, 1.0, CONCRETE),), spread=0.25),
    Body("wall", (1.0, 7.0, 1.2), (box(-0.5, 0.5, 1.0, 0.0, 1.0, LEAVES._replace(depth=0.2)),), spread=0.25),
    Body("pole", (0.3, 0.3, 6.5), (tube(-0.5, 0.5, 1.0, 0.0, 0.1, METAL), tube(-0.3, 0.3, 0.6, 0.1, 1.0, METAL)), spread=0.15),
    Body("sign", (0.7, 0.1, 2.6), (tube(-0.5, 0.5, 0.12, 0.0, 1.0, METAL), box(-0.2, 0.2, 1.0, 0.74, 1.0, RETRO)), spread=0.1),
    Body(
        "tree",
        (4.2, 4.2, 6.5),
        (
            tube(-0.04, 0.04, 0.08, 0.0, 0.6, BARK),
            tube(-0.38, 0.38, 0.76, 0.38, 0.5, LEAVES),
            tube(-0.5, 0.5, 1.0, 0.5, 0.78, LEAVES),
            tube(-0.32, 0.32, 0.64, 0.78, 1.0, LEAVES),
        ),
        spread=0.2,
    ),
    Body("bush", (1.5, 1.8, 1.1), (tube(-0.5, 0.5, 1.0, 0.1, 0.65, LEAVES), tube(-0.36, 0.32, 0.7, 0.0, 1.0, LEAVES)), spread=0.25),
    Body("spray", (2.2, 5.0, 1.4), (tube(-0.5, 0.5, 1.0, 0.0, 1.0, SPRAY),), spread=0.2),
)

SEEN = CARS + LARGE + SMALL + STREET
