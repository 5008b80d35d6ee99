"""Do YOLOX's covariances recognise corrupted images? Results: docs/results/quality.md.

python studies/coco_shift.py STEP --root ROOT --weights WEIGHTS --out OUT

Steps:
  predict  after coco.py fit: covariances on clean, blurred, noisy, foggy and dark images;
           an interrupted run continues
  report   tables and a chart
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from coco import models_of, relative_trace
from corruptions import KINDS, Corruption
from shift import Frame, chart, gain, shift_auroc, show, statistics

from boxcov.data import coco
from boxcov.detectors import yolox

THRESHOLD = 0.1
KNOWN = "train2017"
BASELINES = (
    "1 - score",
    "1 - score, fewer boxes",
    "features of the frame",
    "score and size, one class",
    "head dropout, fields",
)
OURS = ("backbone, fields, logit", "backbone, fields, logit, fewer boxes")


def main() -> None:
    steps = {"predict": predict, "report": report}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=steps)
    parser.add_argument(
        "--root", type=Path, required=True, help="COCO: annotations, train2017, val2017"
    )
    parser.add_argument("--weights", type=Path, required=True, help="YOLOX checkpoint")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder of the posterior and of all results",
    )
    parser.add_argument(
        "--images", type=int, default=40, help="images of val2017, clean and per corruption"
    )
    parser.add_argument("--first", type=int, default=0, help="first image to report on")
    parser.add_argument(
        "--known",
        type=int,
        default=80,
        help="clean images of train2017, on which the numbers are fitted",
    )
    parser.add_argument(
        "--samples", type=int, default=8, help="directions of MC-GLM through the backbone"
    )
    parser.add_argument("--prior", type=float, default=1.0, help="prior precision")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    (args.out / "shift").mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


def predict(args: argparse.Namespace) -> None:
    """Write one file per image and condition.

    It holds the boxes, their covariances (the score logit is last), and the neck's features at each
    box and averaged over the image.
    """
    detector = yolox.load(args.weights, threshold=THRESHOLD, logit=True)
    models = models_of(args, detector, args.samples)
    for split, kind, strength, number in order(args):
        path = args.out / "shift" / f"{split} {kind} {strength} {number}.npz"
        if path.exists():
            continue
        images = coco.frames(args.root, split, detector.config.size, detector.classes)
        inputs = (images.changed(Corruption(kind, strength)) if strength else images)[number][0]  # type: ignore[arg-type]
        found = detector.detect(inputs)
        made = dict(zip(("features", "level", "pooled"), features_at(detector, inputs)))
        made |= {name: getattr(found, name).numpy() for name in ("boxes", "scores", "labels")}
        for part in (
            "head",
            "backbone",
            *(("head dropout",) if split != KNOWN and strength in (0, 5) else ()),
        ):
            made[part] = models[part](inputs).covariance.numpy().astype(np.float32)
        np.savez_compressed(path, **made)
        print(path.name, len(found), flush=True)


def order(args: argparse.Namespace) -> list[tuple[str, str, int, int]]:
    known = [(KNOWN, "clean", 0, i) for i in range(args.known)]
    strongest = [
        ("val2017", kind, s, i)
        for s in (0, 5)
        for kind in (KINDS if s else ("clean",))
        for i in range(args.images)
    ]
    return (
        known
        + strongest
        + [
            ("val2017", kind, s, i)
            for s in (3, 4, 2, 1)
            for kind in KINDS
            for i in range(args.images)
        ]
    )


def features_at(detector: yolox.YOLOX, inputs: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the outputs of the head's stems at the cell of each box (m, channels), the boxes'
    levels (m,), and the means over all cells of each level (levels x channels,)."""
    with torch.no_grad():
        raw = detector(inputs)
        where = detector.select(raw).where
        maps = [stem(m) for stem, m in zip(detector.head.stems, raw["features"])]
        at = torch.cat([m.flatten(2).transpose(1, 2) for m in maps], 1)  # (1, cells, channels)
        level = torch.repeat_interleave(
            torch.arange(len(maps)), torch.tensor([m[0, 0].numel() for m in maps])
        )
        return (
            at[where.frame, where.cell].numpy(),
            level[where.cell].numpy(),
            torch.cat([m.mean((0, 2, 3)) for m in maps]).numpy(),
        )


def report(args: argparse.Namespace) -> None:
    some = range(args.first, args.images)
    for least in (THRESHOLD, 0.3):
        known = [frame_of(args, (KNOWN, "clean", 0, i), least) for i in range(args.known)]
        cells = {
            (kind, s): [frame_of(args, ("val2017", kind, s, i), least) for i in some]
            for kind, s in conditions(args, some)
        }
        clean = cells.pop(("clean", 0))
        numbers = statistics(known, ("head", "backbone", "head dropout"))
        usual = {name: number(clean) for name, number in numbers.items()}
        table: dict[str, dict[str, Any]] = {}
        for name, number in numbers.items():
            for (kind, s), frames in cells.items():
                there = "dropout" not in name or s == 5
                table.setdefault(name, {})[f"{kind} {s}"] = (
                    shift_auroc(usual[name], number(frames), pairs=True) if there else None
                )
        without = {
            f"{kind} {s}": sum(not len(f) for f in frames) for (kind, s), frames in cells.items()
        }
        print(
            f"\nboxes above {least}; {len(some)} images; images without boxes: "
            f"clean {sum(not len(f) for f in clean)}, {without}"
        )
        for strength in sorted({s for _, s in cells}, reverse=True):
            show(
                {
                    name: {c: v for c, v in row.items() if c.endswith(str(strength))}
                    for name, row in table.items()
                }
            )
        print("\ndifferences to the baselines, strength 5")
        strongest = {
            kind: {name: number(cells[kind, 5]) for name, number in numbers.items()}
            for kind in KINDS
        }
        show(
            {
                f"{o} minus {b}": {k: gain(usual, strongest[k], o, b) for k in KINDS}
                for o in OURS
                for b in BASELINES
            }
        )
        overall(table)
        if least == THRESHOLD:
            chart(
                args.out / "corruptions.png",
                table,
                KINDS,
                (*BASELINES[:3], "backbone, trace", *OURS),
            )


def overall(table: dict[str, dict[str, Any]]) -> None:
    """Print the mean AUROC over all kinds, by strength."""
    print("\n| mean over the four kinds | 1 | 2 | 3 | 4 | 5 |\n| --- |", " ---: |" * 5)
    for name, row in table.items():
        values = [
            [v[0] for c, v in row.items() if c.endswith(str(s)) and v is not None]
            for s in range(1, 6)
        ]
        print(
            f"| {name} |",
            " | ".join(f"{np.mean(v):.2f}" if v else "" for v in values),
            "|",
            flush=True,
        )


def conditions(args: argparse.Namespace, images: range) -> list[tuple[str, int]]:
    """Return the conditions for which the files of all images exist."""
    every = [("clean", 0), *((kind, s) for s in (5, 4, 3, 2, 1) for kind in KINDS)]
    return [
        c
        for c in every
        if all((args.out / "shift" / f"val2017 {c[0]} {c[1]} {i}.npz").exists() for i in images)
    ]


def frame_of(args: argparse.Namespace, what: tuple[str, str, int, int], least: float) -> Frame:
    with np.load(args.out / "shift" / "{} {} {} {}.npz".format(*what)) as file:
        made = dict(file)
    some = made["scores"] > least
    boxes, scores = (
        made["boxes"][some].astype(float),
        np.clip(made["scores"][some].astype(float), 1e-6, 1 - 1e-6),
    )
    sides = np.maximum(boxes[:, 2:4] - boxes[:, :2], 1.0)
    C = {
        part: made[part][some].astype(float)
        for part in ("head", "backbone", "head dropout")
        if part in made
    }
    return Frame(
        scores,
        np.concatenate([np.log(scores / (1 - scores))[:, None], np.log(sides)], 1),
        made["level"][some],
        made["features"][some],
        made["pooled"],
        {part: np.diagonal(c, axis1=1, axis2=2) for part, c in C.items()},
        {part: relative_trace(boxes, c) for part, c in C.items()},
    )


if __name__ == "__main__":
    main()
