"""Collisions and room lost when driving past parked vehicles, as examples/margin.py plans it.

python studies/margin.py --root OUT                   the table; a stopped run resumes
python studies/margin.py --root OUT --quick           does it run? writes no table

The protocol, fixed before the set ``margin`` is read: the first 1,000 passes of reported, standing
vehicles with an object, at 4 to 40 m, with the error model that boxcov ships; margins of at most
3 m. Developed on the set ``fit``. The last row is the constant margin with as few collisions on the
same passes: nobody could have chosen it before.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tracking_boxes import PASSES, QUICK_FRAMES, collect, load

from boxcov import Posterior
from boxcov.detectors import centerpoint
from boxcov.evaluate.intervals import bootstrap

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from margin import outcomes, sight  # noqa: E402

PASSES_COUNT = 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="folder of the boxes")
    parser.add_argument("--set", default=PASSES, help="name of the set")
    parser.add_argument("--quick", action="store_true", help="a few frames: does it run?")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    detector = centerpoint.load("small")
    model = Posterior.load("small", detector).error_model
    assert model is not None
    root = args.root / "quick" if args.quick else args.root
    collect(root, [args.set], most=QUICK_FRAMES if args.quick else None)
    drive = load(root, args.set)
    seen = [sight(model.apply(f), target) for f, target in zip(drive.found, drive.targets)]
    frame = torch.cat([torch.full((len(s[0]),), i) for i, s in enumerate(seen)])[:PASSES_COUNT]
    columns = [torch.cat(column)[:PASSES_COUNT] for column in zip(*seen)]
    rows = table(columns, frame.numpy())
    for row in rows:
        print(row)
    if args.set == PASSES and not args.quick:
        write(rows, len(frame))


def table(columns: list[torch.Tensor], frame: np.ndarray) -> list[list[Any]]:
    """Return collisions and room lost of each margin, with intervals over frames."""

    def numbers(rows: np.ndarray) -> np.ndarray:
        found = outcomes([tuple(column[torch.as_tensor(rows)] for column in columns)])
        return np.array([[one["collisions"], one["lost"]] for one in found.values()])

    every = np.arange(len(frame))
    middle = numbers(every)
    interval = bootstrap(lambda rows: numbers(rows).ravel(), frame)
    low, high = (side.reshape(middle.shape) for side in (interval.low, interval.high))
    names = outcomes([tuple(columns)]).items()
    return [
        [
            name,
            f"{row['margin']:.2f}",
            f"{middle[i, 0]:.0f} [{low[i, 0]:.0f}, {high[i, 0]:.0f}]",
            f"{middle[i, 1]:.2f} [{low[i, 1]:.2f}, {high[i, 1]:.2f}]",
        ]
        for i, (name, row) in enumerate(names)
    ]


def write(rows: list[list[Any]], passes: int) -> None:
    content = {
        "title": f"Driving past parked vehicles: {passes} passes",
        "command": "python studies/margin.py --root OUT",
        "date": date.today().isoformat(),
        "machine": "one CPU thread",
        "columns": ["margin", "mean, m", "collisions per 1,000", "room lost, m"],
        "digits": [None] * 4,
        "rows": rows,
        "notes": [
            "Simulated clear frames, shipped CenterPoint and error model. 95 % intervals over "
            "frames. The last margin is chosen on the same passes, in favour of the constant."
        ],
    }
    path = ROOT / "docs" / "results" / "data" / "margin.json"
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
