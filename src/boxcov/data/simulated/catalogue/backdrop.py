"""Bodies without a label: the ego car, buildings, plants, street furniture and spray."""

from __future__ import annotations

from boxcov.data.simulated.catalogue.body import (
    BARK,
    CONCRETE,
    GLASS,
    LEAVES,
    METAL,
    PAINT,
    PLASTIC,
    RETRO,
    SPRAY,
    Body,
    box,
    tube,
)

BACKDROP_BODIES = (
    Body("ego", (1.1, 1.4, 1.54), (box(-0.5, 0.5, 1.0, 0.0, 1.0, PAINT),), spread=0.0),
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
    Body(
        "wall",
        (1.0, 7.0, 1.2),
        (box(-0.5, 0.5, 1.0, 0.0, 1.0, LEAVES._replace(depth=0.2)),),
        spread=0.25,
    ),
    Body(
        "pole",
        (0.3, 0.3, 6.5),
        (tube(-0.5, 0.5, 1.0, 0.0, 0.1, METAL), tube(-0.3, 0.3, 0.6, 0.1, 1.0, METAL)),
        spread=0.15,
    ),
    Body(
        "sign",
        (0.7, 0.1, 2.6),
        (tube(-0.5, 0.5, 0.12, 0.0, 1.0, METAL), box(-0.2, 0.2, 1.0, 0.74, 1.0, RETRO)),
        spread=0.1,
    ),
    Body(
        "bin",
        (0.6, 0.75, 1.1),
        (box(-0.44, 0.44, 0.88, 0.0, 0.9, PLASTIC), box(-0.5, 0.5, 1.0, 0.9, 1.0, PLASTIC)),
        spread=0.2,
    ),
    Body(
        "bin", (0.2, 0.2, 0.9), (tube(-0.5, 0.5, 1.0, 0.0, 1.0, METAL),), spread=0.15
    ),  # a bollard
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
    Body(
        "bush",
        (1.5, 1.8, 1.1),
        (tube(-0.5, 0.5, 1.0, 0.1, 0.65, LEAVES), tube(-0.36, 0.32, 0.7, 0.0, 1.0, LEAVES)),
        spread=0.25,
    ),
    Body("spray", (2.2, 5.0, 1.4), (tube(-0.5, 0.5, 1.0, 0.0, 1.0, SPRAY),), spread=0.2),
)
