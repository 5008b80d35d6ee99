"""Bodies of the ten classes that no other scenario has: novel shapes for a trained detector."""

from __future__ import annotations

from boxcov.data.simulated.catalogue.backdrop import BACKDROP_BODIES
from boxcov.data.simulated.catalogue.body import (
    CLOTH,
    CONCRETE,
    GLASS,
    LATTICE,
    METAL,
    PAINT,
    PLASTIC,
    RUBBER,
    SPOKES,
    Body,
    axles,
    box,
    pair,
    tube,
)

_PERSON = (
    *pair(tube(-0.12, 0.12, 0.2, 0.0, 0.45, CLOTH, y=0.14)),
    tube(-0.16, 0.16, 0.5, 0.42, 0.76, CLOTH),
    tube(-0.1, 0.1, 0.2, 0.76, 0.9, CLOTH),
)

UNSEEN_BODIES = (
    Body(  # roadster without a roof
        "car",
        (1.75, 3.9, 1.1),
        (
            box(-0.5, 0.5, 1.0, 0.15, 0.72, PAINT),
            box(0.1, 0.14, 0.85, 0.72, 1.0, GLASS),
            *pair(tube(-0.22, -0.12, 0.2, 0.72, 1.0, PLASTIC, y=0.22)),
            *axles(0.28, -0.32, 0.32),
        ),
    ),
    Body(  # stretched limousine
        "car",
        (2.0, 8.6, 1.55),
        (
            box(-0.5, 0.5, 1.0, 0.15, 0.6, PAINT),
            box(-0.42, 0.28, 0.88, 0.6, 0.92, GLASS),
            box(-0.4, 0.24, 0.8, 0.92, 1.0, PAINT),
            *axles(0.21, -0.36, 0.38, length=0.04),
        ),
    ),
    Body(  # bubble car on three wheels
        "car",
        (1.35, 2.2, 1.6),
        (
            tube(-0.5, 0.5, 1.0, 0.18, 0.62, PAINT),
            tube(-0.42, 0.42, 0.9, 0.62, 1.0, GLASS),
            *axles(0.18, -0.25, 0.25, width=0.8),
        ),
    ),
    Body(  # silo truck
        "truck",
        (2.5, 9.5, 3.6),
        (
            box(0.36, 0.5, 1.0, 0.12, 0.7, PAINT),
            *(tube(x, x + 0.2, 0.95, 0.25, 1.0, METAL) for x in (-0.5, -0.29, -0.08, 0.13)),
            *axles(0.13, -0.4, -0.25, 0.4, length=0.05),
        ),
    ),
    Body(  # tipped dumper
        "truck",
        (2.6, 6.5, 5.2),
        (
            box(0.2, 0.5, 0.95, 0.1, 0.5, PAINT),
            box(-0.5, -0.25, 1.0, 0.2, 0.55, METAL),
            box(-0.35, -0.05, 1.0, 0.4, 0.78, METAL),
            box(-0.15, 0.12, 1.0, 0.62, 1.0, METAL),
            *axles(0.1, -0.35, 0.35),
        ),
    ),
    Body(  # mobile crane, boom laid forward
        "construction_vehicle",
        (2.9, 12.5, 3.4),
        (
            box(-0.5, 0.3, 1.0, 0.2, 0.5, PAINT),
            box(-0.3, 0.0, 0.7, 0.5, 0.85, PAINT),
            box(-0.25, 0.5, 0.2, 0.86, 1.0, METAL),
            *axles(0.17, -0.35, -0.1, 0.2, length=0.05),
        ),
    ),
    Body(  # road roller
        "construction_vehicle",
        (1.5, 3.2, 2.4),
        (
            box(-0.5, -0.12, 1.0, 0.0, 0.42, METAL),
            box(0.12, 0.5, 1.0, 0.0, 0.42, METAL),
            box(-0.3, 0.3, 0.6, 0.3, 0.5, PAINT),
            *pair(box(-0.2, -0.17, 0.05, 0.5, 0.95, METAL, y=0.3)),
            box(-0.25, 0.25, 0.9, 0.95, 1.0, PAINT),
        ),
    ),
    Body(  # double-decker, rear platform
        "bus",
        (2.6, 8.6, 4.9),
        (
            box(-0.42, 0.5, 1.0, 0.08, 0.3, PAINT),
            box(-0.42, 0.48, 0.98, 0.3, 0.48, GLASS),
            box(-0.5, 0.5, 1.0, 0.48, 0.65, PAINT),
            box(-0.49, 0.47, 0.98, 0.65, 0.85, GLASS),
            box(-0.5, 0.46, 0.95, 0.85, 1.0, PAINT),
            *axles(0.1, -0.25, 0.32, length=0.06),
        ),
    ),
    Body(  # minibus
        "bus",
        (2.0, 5.6, 2.7),
        (
            box(-0.5, 0.5, 1.0, 0.1, 0.5, PAINT),
            box(-0.48, 0.36, 0.95, 0.5, 0.85, GLASS),
            tube(-0.4, 0.2, 0.8, 0.85, 1.0, PLASTIC),
            *axles(0.12, -0.3, 0.3),
        ),
    ),
    Body(  # boat on a trailer
        "trailer",
        (2.3, 7.0, 2.4),
        (
            box(-0.5, 0.2, 1.0, 0.35, 0.7, PLASTIC),
            box(0.2, 0.38, 0.6, 0.4, 0.72, PLASTIC),
            box(0.38, 0.5, 0.25, 0.45, 0.75, PLASTIC),
            box(-0.2, 0.05, 0.6, 0.7, 1.0, GLASS),
            *axles(0.13, -0.2, width=0.9),
        ),
    ),
    Body(
        "trailer",
        (1.6, 2.6, 1.0),
        (
            box(-0.5, 0.1, 1.0, 0.4, 1.0, METAL),
            box(0.1, 0.5, 0.1, 0.45, 0.55, METAL),
            *axles(0.28, -0.2, length=0.12),
        ),
    ),
    Body(
        "barrier",
        (4.5, 0.9, 0.55),
        (box(-0.5, 0.5, 1.0, 0.0, 0.5, CONCRETE), box(-0.2, 0.2, 0.7, 0.5, 1.0, CONCRETE)),
    ),
    Body(
        "barrier",
        (1.1, 0.3, 1.8),
        (box(-0.5, 0.5, 1.0, 0.0, 0.06, RUBBER), box(-0.1, 0.1, 0.95, 0.06, 1.0, LATTICE)),
    ),
    Body(  # quad
        "motorcycle",
        (1.25, 1.9, 1.15),
        (
            *axles(0.28, -0.33, 0.33, length=0.17),
            box(-0.4, 0.35, 0.5, 0.4, 0.75, PAINT),
            box(0.15, 0.22, 0.8, 0.9, 1.0, METAL),
        ),
    ),
    Body(  # scooter with a roof and a case
        "motorcycle",
        (0.75, 2.0, 2.0),
        (
            *axles(0.12, -0.38, 0.38, length=0.12, width=0.2),
            box(-0.4, 0.1, 0.5, 0.15, 0.4, PAINT),
            box(-0.5, -0.25, 1.0, 0.4, 0.7, PLASTIC),
            box(0.25, 0.3, 0.9, 0.2, 0.95, GLASS),
            box(-0.2, 0.35, 0.8, 0.95, 1.0, PLASTIC),
        ),
    ),
    Body(  # cargo bicycle
        "bicycle",
        (0.85, 2.6, 1.15),
        (
            box(-0.5, -0.25, 0.08, 0.0, 0.55, SPOKES),
            box(0.32, 0.5, 0.08, 0.0, 0.4, SPOKES),
            box(-0.02, 0.36, 1.0, 0.15, 0.65, PLASTIC),
            box(-0.35, 0.0, 0.1, 0.3, 0.6, LATTICE),
            box(-0.1, -0.06, 0.7, 0.93, 1.0, METAL),
        ),
    ),
    Body(  # penny-farthing and rider
        "bicycle",
        (0.6, 1.8, 2.3),
        (
            box(-0.3, 0.5, 0.1, 0.0, 0.62, SPOKES),
            box(-0.5, -0.28, 0.1, 0.0, 0.18, SPOKES),
            tube(-0.1, 0.15, 0.7, 0.6, 0.88, CLOTH),
            tube(-0.04, 0.1, 0.3, 0.88, 1.0, CLOTH),
            box(0.1, 0.14, 1.0, 0.68, 0.72, METAL),
        ),
    ),
    Body(
        "pedestrian",
        (1.15, 1.15, 2.15),
        (
            *_PERSON,
            tube(-0.5, 0.5, 1.0, 0.93, 1.0, CLOTH),
            tube(-0.02, 0.02, 0.04, 0.6, 0.93, METAL, y=0.1),
        ),
    ),  # umbrella
    Body(  # with a pram
        "pedestrian",
        (0.6, 1.6, 1.7),
        (
            tube(-0.5, -0.15, 0.9, 0.0, 0.84, CLOTH),
            tube(-0.4, -0.25, 0.4, 0.84, 1.0, CLOTH),
            box(0.0, 0.5, 1.0, 0.3, 0.6, CLOTH),
            box(0.05, 0.45, 0.7, 0.0, 0.3, SPOKES),
        ),
    ),
    Body(
        "pedestrian",
        (0.36, 0.34, 0.95),
        (tube(-0.5, 0.5, 1.0, 0.0, 0.72, CLOTH), tube(-0.35, 0.35, 0.7, 0.72, 1.0, CLOTH)),
    ),  # toddler
    Body(
        "traffic_cone",
        (0.6, 0.6, 1.15),
        (
            *(tube(-0.5, 0.5, 1.0, z, z + 0.24, PLASTIC) for z in (0.0, 0.5)),
            tube(-0.44, 0.44, 0.88, 0.0, 1.0, PLASTIC),
        ),
    ),  # drum
    Body(
        "traffic_cone",
        (0.2, 0.2, 1.5),
        (box(-0.5, 0.5, 1.0, 0.0, 0.04, RUBBER), tube(-0.25, 0.25, 0.5, 0.04, 1.0, PLASTIC)),
    ),  # post
    *BACKDROP_BODIES,
)
