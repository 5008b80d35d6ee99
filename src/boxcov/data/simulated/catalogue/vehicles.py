"""Bodies of cars, trucks, buses, trailers and construction vehicles."""

from __future__ import annotations

from boxcov.data.simulated.catalogue.body import (
    GLASS,
    METAL,
    PAINT,
    PLASTIC,
    RETRO,
    RUBBER,
    Body,
    axles,
    box,
    pair,
)

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
