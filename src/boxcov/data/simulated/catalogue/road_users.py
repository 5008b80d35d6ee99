"""Bodies of pedestrians, cycles, barriers and traffic cones."""

from __future__ import annotations

from boxcov.data.simulated.catalogue.body import (
    CLOTH,
    LATTICE,
    METAL,
    PAINT,
    PLASTIC,
    RETRO,
    RUBBER,
    SPOKES,
    Body,
    box,
    pair,
    tube,
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

ROAD_USERS = (
    Body(
        "pedestrian",
        (0.66, 0.74, 1.74),
        (
            *_WALKER,
            tube(0.02, 0.5, 0.3, 0.0, 0.48, CLOTH, y=0.17),
            tube(-0.5, -0.02, 0.3, 0.0, 0.48, CLOTH, y=-0.17),
        ),
        spread=0.09,
        share=2.0,
    ),
    Body(
        "pedestrian",
        (0.64, 0.52, 1.7),
        (*_WALKER, *pair(tube(-0.5, 0.5, 0.4, 0.0, 0.48, CLOTH, y=0.22))),
        spread=0.09,
    ),
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
        moves=False,
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
        moves=False,
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
        (
            box(-0.5, 0.5, 1.0, 0.0, 0.3, PLASTIC),
            box(-0.34, 0.34, 1.0, 0.3, 0.55, PLASTIC),
            box(-0.22, 0.22, 0.98, 0.55, 1.0, PLASTIC),
        ),
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
