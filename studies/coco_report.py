"""Tables and pictures of the results of coco.py. Results: docs/results/quality.md.

python studies/coco_report.py STEP --root ROOT --weights WEIGHTS --out OUT

Steps:
  report  tables
  prior   the head's covariances under several prior precisions
  draw    boxes with ellipses, and a chart of corrupted images
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from coco import LOGIT, PARTS, detector_of, images_of, relative_trace, run
from corruptions import KINDS
from matplotlib import pyplot as plt
from shift import auroc_of_shift, chart

from boxcov import Detections, ExactGLM, Posterior
from boxcov.concatenation import concatenate
from boxcov.data import coco
from boxcov.data.coco.images import to_pixels
from boxcov.evaluate.covariance_metrics import covariance_metrics
from boxcov.evaluate.matching import match
from boxcov.evaluate.quality import accurate_iou, auroc
from boxcov.evaluate.records import Records
from boxcov.evaluate.summary import compare, table


def main() -> None:
    run({"report": report, "prior": priors, "draw": draw}, __doc__)


def priors(args: argparse.Namespace) -> None:
    """Print the head's metrics under several prior precisions, and the most likely precision."""
    detector = detector_of(args)
    images = images_of(args, detector, "val2017")
    inputs = [images[i][0] for i in range(len(images))]
    posterior = Posterior.load(args.out / "posterior.safetensors", detector)
    likeliest = posterior.optimize_prior_precision()
    print("evidence:", likeliest.prior_precision)
    head = posterior.restricted([name for name in posterior.blocks if name.startswith("head.")])
    for tau in (1.0, 10.0, 100.0, 1e3, 1e4, 1e5):
        model = ExactGLM(detector, head.with_prior(tau))
        found = [model(image) for image in inputs]
        plain = concatenate([replace(f, frame=f.frame + number) for number, f in enumerate(found)])
        made = records_of({"head": plain}, images)
        values = [auroc(~accurate_iou(rows.iou), rows.uncertainty) for rows in made.values()]
        paired = made["head"][made["head"].paired]
        inside = covariance_metrics(paired.errors, paired.covariance)
        print(
            f"tau {tau:g}:",
            dict(zip(made, np.round(values, 3).tolist())),
            inside["coverage"],
            "NLL",
            inside["NLL"],
            flush=True,
        )


def report(args: argparse.Namespace) -> None:
    detector = detector_of(args)
    images = images_of(args, detector, "val2017")
    found = {
        name: Detections.load(args.out / f"{name}.safetensors")
        for name in (*PARTS, "dropout", "head dropout", "NMS spread")
    }
    records = records_of(found, images)
    rows = table(records, replicates=500)
    results: dict[str, Any] = {
        "rows": rows,
        "by": against_score(records),
    }
    results["seconds per frame"] = {name: f.meta["seconds"] for name, f in found.items()}
    results["correlation"] = correlations(records)
    if (args.out / "corrupted.jsonl").exists():
        results["corruptions"] = corruptions(args.out / "corrupted.jsonl")
        results["corruption gains"] = corruption_gains(args.out / "corrupted.jsonl")
    (args.out / "report.json").write_text(json.dumps(results, indent=1))
    show(results)


def records_of(
    found: Mapping[str, Detections], images: coco.Coco, threshold: float = 0.3
) -> dict[str, Records]:
    """Return the records for each number that may serve as u."""
    truth = [targets[0] for targets in (images[i][1] for i in range(len(images)))]
    boxes, labels = (np.concatenate([t[key].numpy() for t in truth]) for key in ("boxes", "labels"))
    frame = np.repeat(np.arange(len(truth)), [len(t["labels"]) for t in truth])
    plain = found["head"]
    covariance = {
        name: f.covariance.double().numpy() for name, f in found.items() if f.covariance is not None
    }
    if set(PARTS) <= set(covariance):
        covariance["sum"] = sum(covariance[part] for part in PARTS)

    def matched(u: np.ndarray, of: str) -> Records:
        rows = match(
            plain.boxes[:, :4].numpy(), plain.scores.numpy(), plain.labels.numpy(),
            plain.frame.numpy(), boxes, labels, frame, ("x1", "y1", "x2", "y2"), plain.classes,
            u, covariance[of][:, :4, :4], threshold=threshold,
        )  # fmt: skip
        return rows[~in_crowds(rows, truth)]

    box, scores = plain.boxes.numpy(), plain.scores.double().numpy()
    # the area is a baseline: large boxes have larger errors in pixels
    made = {"size": matched((box[:, 2:4] - box[:, :2]).prod(1), "head")}
    for name, C in covariance.items():
        made[name] = matched(np.trace(C[:, :4, :4], axis1=1, axis2=2), name)
        made[f"{name}, relative"] = matched(relative_trace(box, C), name)
        if name == "NMS spread":
            continue
        made[f"{name}, logit"] = matched(C[:, LOGIT, LOGIT], name)
        # the variance of the score itself, to first order
        made[f"{name}, score"] = matched(C[:, LOGIT, LOGIT] * (scores * (1 - scores)) ** 2, name)
    return made


def in_crowds(records: Records, truth: list[dict[str, Any]]) -> np.ndarray:
    """Return which unpaired boxes (n,) lie in a crowd of their class.

    The official evaluation ignores them.
    """
    ignored = np.zeros(len(records), bool)
    for row in np.flatnonzero(~records.paired):
        target = truth[int(records.frame[row])]
        crowds = target["crowds"].numpy()[target["crowd_labels"].numpy() == records.labels[row]]
        box = records.boxes[row]
        both = np.clip(
            np.minimum(box[2:], crowds[:, 2:]) - np.maximum(box[:2], crowds[:, :2]), 0, None
        ).prod(1)
        ignored[row] = bool((both >= 0.5 * (box[2:] - box[:2]).prod()).any())
    return ignored


def against_score(records: Mapping[str, Records]) -> dict[str, Any]:
    """Return differences of AUROC for each u, with intervals over images.

    ``alone``: u minus 1 - score (IoU). ``l2``: u minus the size of the box (l2). ``added``: a
    regression on score and u minus one on the score alone (IoU), both out of fold.
    """
    from boxcov.evaluate.baselines import one_minus_score, out_of_fold

    out = {}
    for name, rows in records.items():
        single = compare(rows, one_minus_score(rows), replicates=500)["AUROC"]["IoU"]
        bad = ~accurate_iou(rows.iou)
        score = np.log(rows.scores / (1 - rows.scores)).astype(float)[:, None]
        both = np.concatenate([score, np.log(np.maximum(rows.uncertainty, 1e-30))[:, None]], 1)
        added, without = (
            rows.without_covariance(out_of_fold(columns, bad, rows.frame))
            for columns in (both, score)
        )
        sized = compare(rows, records["size"], replicates=500)["AUROC"]["l2"]
        out[name] = {
            "alone": single,
            "l2": sized,
            "added": compare(added, without, replicates=500)["AUROC"]["IoU"],
        }
    return out


def correlations(records: Mapping[str, Records]) -> dict[str, Any]:
    """Return the rank correlation of u with the size of the box and with the score."""
    out = {}
    for name, rows in records.items():
        size = (rows.boxes[:, 2:] - rows.boxes[:, :2]).prod(1)
        out[name] = [
            float(np.corrcoef(ranks(rows.uncertainty), ranks(other))[0, 1])
            for other in (size, rows.scores)
        ]
    return out


def ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values, kind="stable"))


def corruptions(path: Path) -> dict[str, Any]:
    """Return the AUROC of recognising corrupted images, against the same images without corruption.

    An image without boxes counts as the most uncertain under every number.
    """
    cells = _by_condition(path)
    out: dict[str, Any] = {}
    for what, numbers in cells.items():
        boxes = numbers["boxes"]
        out[what] = {
            "images": len(boxes),
            "boxes": float(boxes.mean()),
            "without": int((boxes == 0).sum()),
        }
        out[what] |= {
            name: auroc_of_shift(cells["clean 0"][name], u)
            for name, u in numbers.items()
            if name != "boxes"
        }
    return out


def corruption_gains(path: Path, replicates: int = 500) -> dict[str, Any]:
    """Return the mean AUROC over the five strengths minus that of 1 - score, per kind and overall.

    The 95 % intervals come from bootstrap samples of the images.
    """
    cells = _by_condition(path)
    names = [name for name in cells["clean 0"] if name not in ("boxes", "1 - score")]
    size = len(cells["clean 0"]["boxes"])
    rng = np.random.default_rng(0)
    draws = [np.arange(size), *(rng.integers(0, size, size) for _ in range(replicates))]

    def gain(kind: str, name: str, rows: np.ndarray) -> float:
        found = []
        for what in (what for what in cells if what.startswith(kind) and what != "clean 0"):
            mine, score = (
                auroc_of_shift(cells["clean 0"][n][rows], cells[what][n][rows])
                for n in (name, "1 - score")
            )
            found.append(mine - score)
        return float(np.mean(found))

    out: dict[str, Any] = {}
    for kind in (*KINDS, ""):
        for name in names:
            values = [gain(kind, name, rows) for rows in draws]
            low, high = np.quantile(values[1:], (0.025, 0.975))
            out.setdefault(kind or "all", {})[name] = {
                "value": values[0],
                "low": float(low),
                "high": float(high),
            }
    return out


def _by_condition(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return, by condition and name, one number per image, for the images of all conditions."""
    lines: dict[str, dict[int, dict[str, Any]]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        kind, strength, number = line.pop("what")
        line = {
            "1 - score": 1 - (line["score"] or 0),
            **{name: value for name, value in line.items() if name != "score"},
        }
        lines.setdefault(f"{kind} {strength}", {})[number] = line
    images = sorted(set.intersection(*(set(some) for some in lines.values())))
    names = list(lines["clean 0"][images[0]])

    def value(line: dict[str, Any], name: str) -> float:
        return float("inf") if name != "boxes" and not line["boxes"] else float(line[name])

    return {
        what: {name: np.array([value(some[i], name) for i in images]) for name in names}
        for what, some in lines.items()
    }


def show(results: dict[str, Any]) -> None:
    """Print all results as Markdown."""
    show_metrics(results["rows"])
    header("u", "IoU: u - (1 - score)", "l2: u - size", "IoU: score and u - score")
    for name, row in results["by"].items():
        print(f"| {name} |", " | ".join(interval(c) for c in row.values()), "|")
    correlation = {k: [round(v, 2) for v in pair] for k, pair in results["correlation"].items()}
    print("\nrank correlation with size and score:", correlation)
    print("seconds per frame:", results["seconds per frame"])
    if "corruptions" not in results:
        return
    names = list(results["corruptions"]["clean 0"])
    header("images", *names)
    for condition, cells in results["corruptions"].items():
        print(f"| {condition} |", " | ".join(f"{cells[name]:.2f}" for name in names), "|")
    for kind, gains in results["corruption gains"].items():
        print(kind, {name: interval(c) for name, c in gains.items()})


def show_metrics(rows: list[dict[str, Any]]) -> None:
    metrics = ("AvU", "P(A|C)", "P(U|I)", "AUROC", "AUSE")
    columns = [f"{metric} {error}" for metric in metrics for error in ("IoU", "l2")]
    header("u", *columns)
    for row in rows:
        if row["kind"] != "chance":
            values = [row[name] and row[name]["value"] for name in columns]
            cells = ["" if v is None else f"{v:.3f}" for v in values]
            print(f"| {row['method']} |", " | ".join(cells), "|")
    print(rows[0]["boxes"], "boxes,", rows[0]["paired"], "paired")


def header(*columns: str) -> None:
    print("\n|", " | ".join(columns), "|\n|", " --- |" * len(columns))


def interval(cell: Mapping[str, float]) -> str:
    return f"{cell['value']:+.3f} ({cell['low']:+.3f} to {cell['high']:+.3f})"


def draw(args: argparse.Namespace) -> None:
    """Write boxes with the ellipses of their corners, and a chart of the corruptions."""
    detector = detector_of(args)
    images = images_of(args, detector, "val2017")
    detections = Detections.load(args.out / "backbone.safetensors").frames(len(images))
    chosen = [i for i in range(len(images)) if 3 <= len(detections[i]) <= 6][:6]
    figure, axes = plt.subplots(2, 3, figsize=(12.6, 8.4), layout="constrained")
    for ax, i in zip(axes.flat, chosen):
        image, targets = images[i]
        shown = to_pixels(image) if args.photos else np.full((*image.shape[2:], 3), 255, np.uint8)
        detections[i].plot(shown, targets if args.photos else None, ax)
        ax.set_title(f"image {images.image_ids[i]}", fontsize=9)
    figure.savefig(args.out / "boxes.png", dpi=90)
    if (args.out / "corrupted.jsonl").exists():
        cells = corruptions(args.out / "corrupted.jsonl")
        names = [name for name in cells["clean 0"] if name not in ("images", "boxes", "without")]
        table = {name: {c: (cell[name],) for c, cell in cells.items()} for name in names}
        chart(args.out / "corruptions.png", table, KINDS, names)


if __name__ == "__main__":
    main()
