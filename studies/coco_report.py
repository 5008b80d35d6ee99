"""Tables and pictures of what coco.py wrote. See docs/results/quality.md for what came out.

python studies/coco_report.py report --root ROOT --weights WEIGHTS --out OUT    # tables
python studies/coco_report.py prior  --root ROOT --weights WEIGHTS --out OUT    # the head under several prior precisions
python studies/coco_report.py draw   --root ROOT --weights WEIGHTS --out OUT    # boxes, and a chart of bad images
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

from boxcov import Detections, ExactGLM, Posterior
from boxcov.data import coco
from boxcov.data.corruptions import KINDS
from boxcov.detections import concatenate
from boxcov.error_model.fit import fit_calibration
from boxcov.evaluate.covariance_metrics import covariance_metrics
from boxcov.evaluate.matching import match
from boxcov.evaluate.quality import accurate_iou
from boxcov.evaluate.ranking import auroc
from boxcov.evaluate.records import Records
from boxcov.evaluate.summary import compare, table
from boxcov.pipeline.calibrate import compare_calibrations
from boxcov.report.pictures import write_images


def main() -> None:
    run({"report": report, "prior": priors, "draw": draw}, __doc__)


def priors(given: argparse.Namespace) -> None:
    """The head's covariances under several prior precisions, that of the evidence among them."""
    detector = detector_of(given)
    images = images_of(given, detector, "val2017")
    inputs = [images[i][0] for i in range(len(images))]
    posterior = Posterior.load(given.out / "posterior.safetensors", detector)
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
        inside = covariance_metrics(paired.errors, paired.covariance, paired.fields)
        print(
            f"tau {tau:g}:",
            dict(zip(made, np.round(values, 3).tolist())),
            inside["coverage"],
            "NLL",
            inside["NLL"],
            flush=True,
        )


def report(given: argparse.Namespace) -> None:
    detector = detector_of(given)
    images = images_of(given, detector, "val2017")
    found = {
        name: Detections.load(given.out / f"{name}.safetensors")
        for name in (*PARTS, "dropout", "head dropout", "NMS spread")
    }
    records = records_of(found, images)
    rows = table(records, replicates=500)
    told: dict[str, Any] = {
        "rows": rows,
        "calibration": calibrations(records),
        "by": against_score(records),
    }
    told["seconds a frame"] = {name: f.meta["seconds"] for name, f in found.items()}
    told["correlation"] = correlations(records)
    if (given.out / "corrupted.jsonl").exists():
        told["corruptions"] = corruptions(given.out / "corrupted.jsonl")
        told["corruption gains"] = corruption_gains(given.out / "corrupted.jsonl")
    (given.out / "report.json").write_text(json.dumps(told, indent=1))
    show(told)


def records_of(
    found: Mapping[str, Detections], images: coco.Coco, threshold: float = 0.3
) -> dict[str, Records]:
    """The records of each number that may serve as u."""
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
            plain.boxes[:, :4].numpy(), plain.scores.numpy(), plain.labels.numpy(), plain.frame.numpy(), boxes, labels, frame,
            ("x1", "y1", "x2", "y2"), plain.classes, u, covariance[of][:, :4, :4], threshold=threshold,
        )  # fmt: skip
        return rows[~in_crowds(rows, truth)]

    box, scores = plain.boxes.numpy(), plain.scores.double().numpy()
    made = {
        "size": matched((box[:, 2:4] - box[:, :2]).prod(1), "head")
    }  # of the box, and nothing else: large boxes are off by more pixels
    for name, C in covariance.items():
        made[name] = matched(np.trace(C[:, :4, :4], axis1=1, axis2=2), name)
        made[f"{name}, relative"] = matched(relative_trace(box, C), name)
        if name == "NMS spread":
            continue
        made[f"{name}, logit"] = matched(C[:, LOGIT, LOGIT], name)
        made[f"{name}, score"] = matched(
            C[:, LOGIT, LOGIT] * (scores * (1 - scores)) ** 2, name
        )  # of the score itself, to first order
    return made


def in_crowds(records: Records, truth: list[dict[str, Any]]) -> np.ndarray:
    """Boxes without an object that lie in a crowd of their class: the official evaluation counts them neither for nor against."""
    away = np.zeros(len(records), bool)
    for row in np.flatnonzero(~records.paired):
        target = truth[int(records.frame[row])]
        crowds = target["crowds"].numpy()[target["crowd_labels"].numpy() == records.labels[row]]
        box = records.boxes[row]
        both = np.clip(
            np.minimum(box[2:], crowds[:, 2:]) - np.maximum(box[:2], crowds[:, :2]), 0, None
        ).prod(1)
        away[row] = bool((both >= 0.5 * (box[2:] - box[:2]).prod()).any())
    return away


def calibrations(records: Mapping[str, Records]) -> dict[str, Any]:
    """Coverage and NLL on the second half of the images, before and after a calibration that was fitted on the first."""
    out = {}
    for name in ("head", "backbone", "sum", "dropout"):
        rows = records[name]
        cut = (int(rows.frame.max()) + 1) // 2
        fitted = rows[rows.frame < cut]
        baseline = fit_calibration(fitted, "score", estimator=name)
        product = fit_calibration(fitted, estimator=name)
        out[f"{name}, product"] = compare_calibrations(rows[rows.frame >= cut], product, baseline)
    return out


def against_score(records: Mapping[str, Records]) -> dict[str, Any]:
    """Differences of AUROC, with their intervals over images: of each to 1 - score (IoU), of each to the size of the box (l2), and of a regression
    on the score and it to one on the score alone (IoU), both out of fold."""
    from boxcov.evaluate.baselines import one_minus_score, out_of_fold

    out = {}
    for name, rows in records.items():
        single = compare(rows, one_minus_score(rows), replicates=500)["AUROC"]["IoU"]
        bad = ~accurate_iou(rows.iou)
        score = np.log(rows.scores / (1 - rows.scores)).astype(float)[:, None]
        both = np.concatenate([score, np.log(np.maximum(rows.uncertainty, 1e-30))[:, None]], 1)
        beside, without = (
            rows.without_covariance(out_of_fold(columns, bad, rows.frame))
            for columns in (both, score)
        )
        sized = compare(rows, records["size"], replicates=500)["AUROC"]["l2"]
        out[name] = {
            "alone": single,
            "l2": sized,
            "beside": compare(beside, without, replicates=500)["AUROC"]["IoU"],
        }
    return out


def correlations(records: Mapping[str, Records]) -> dict[str, Any]:
    """Rank correlation of u with the size of the box and with the score."""
    out = {}
    for name, rows in records.items():
        size = (rows.boxes[:, 2:] - rows.boxes[:, :2]).prod(1)
        out[name] = [
            float(np.corrcoef(ranked(rows.uncertainty), ranked(other))[0, 1])
            for other in (size, rows.scores)
        ]
    return out


def ranked(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values, kind="stable"))


def corruptions(path: Path) -> dict[str, Any]:
    """AUROC of telling corrupted images from the same images clean; one without boxes counts as the most uncertain, whatever the number."""
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
            name: _told_apart(cells["clean 0"][name], u)
            for name, u in numbers.items()
            if name != "boxes"
        }
    return out


def corruption_gains(path: Path, replicates: int = 500) -> dict[str, Any]:
    """For each kind and over all, the mean AUROC of its five strengths less that of 1 - score: value, low and high, images drawn anew."""
    cells = _by_condition(path)
    names = [name for name in cells["clean 0"] if name not in ("boxes", "1 - score")]
    size = len(cells["clean 0"]["boxes"])
    rng = np.random.default_rng(0)
    draws = [np.arange(size), *(rng.integers(0, size, size) for _ in range(replicates))]

    def gain(kind: str, name: str, rows: np.ndarray) -> float:
        found = []
        for what in (what for what in cells if what.startswith(kind) and what != "clean 0"):
            mine, score = (
                _told_apart(cells["clean 0"][n][rows], cells[what][n][rows])
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


def _told_apart(clean: np.ndarray, corrupted: np.ndarray) -> float:
    return auroc(
        np.repeat([False, True], [len(clean), len(corrupted)]), np.concatenate([clean, corrupted])
    )


def _by_condition(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """By kind and strength, by name, one number an image, in the order of the images; those that all conditions have."""
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


def show(told: dict[str, Any]) -> None:
    """Markdown."""
    columns = [
        f"{m} {e}" for m in ("AvU", "P(A|C)", "P(U|I)", "AUROC", "AUSE") for e in ("IoU", "l2")
    ]
    print("| u |", " | ".join(columns), "|\n|", " --- |" * (len(columns) + 1))
    for row in told["rows"]:
        if row["kind"] != "chance":
            cells = [row[name] for name in columns]
            print(
                f"| {row['method']} |",
                " | ".join(
                    "" if c is None or c["value"] is None else f"{c['value']:.3f}" for c in cells
                ),
                "|",
            )
    print(told["rows"][0]["boxes"], "boxes,", told["rows"][0]["paired"], "paired")
    print(
        "\n| u | IoU: less 1 - score | l2: less size | IoU: regression on score and it, less score |\n| --- | --- | --- | --- |"
    )
    for name, row in told["by"].items():
        print(
            f"| {name} |",
            " | ".join(
                f"{c['value']:+.3f} ({c['low']:+.3f} to {c['high']:+.3f})" for c in row.values()
            ),
            "|",
        )
    print(
        "\n| calibration | when | NLL | 50 % | 90 % | 95 % | ANEES |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name, row in told["calibration"].items():
        for when, cells in row["rows"].items():
            numbers = [
                cells["NLL"],
                *(cells["coverage"][level] for level in ("0.5", "0.9", "0.95")),
                cells["ANEES"],
            ]
            print(
                f"| {name} | {when} |",
                " | ".join("" if n is None else f"{n:.3g}" for n in numbers),
                "|",
            )
        print("gain over the score baseline", row["gain"])
    print(
        "\nrank correlation with size and score:",
        {k: [round(v, 2) for v in pair] for k, pair in told["correlation"].items()},
    )
    print("seconds a frame:", told["seconds a frame"])
    if "corruptions" in told:
        names = list(told["corruptions"]["clean 0"])
        print("\n| images |", " | ".join(names), "|\n|", " --- |" * (len(names) + 1))
        for what, cells in told["corruptions"].items():
            print(f"| {what} |", " | ".join(f"{cells[name]:.2f}" for name in names), "|")
        for kind, gains in told["corruption gains"].items():
            print(
                kind,
                {
                    name: f"{c['value']:+.3f} ({c['low']:+.3f} to {c['high']:+.3f})"
                    for name, c in gains.items()
                },
            )


def draw(given: argparse.Namespace) -> None:
    """Boxes with the ellipses of their corners, and how well each number tells corrupted images from clean ones."""
    detector = detector_of(given)
    images = images_of(given, detector, "val2017")
    each = Detections.load(given.out / "backbone.safetensors").frames(len(images))
    many = [i for i in range(len(images)) if 3 <= len(each[i]) <= 6][:6]
    frames = []
    for i in many:
        image, targets = images[i]
        shown = image[0].numpy() if given.photos else np.full(image.shape[1:], 255.0)
        frames.append(
            (shown, each[i], targets[0]["boxes"].numpy() if given.photos else np.zeros((0, 4)))
        )
    write_images(given.out / "boxes.png", frames, [f"image {images.image_ids[i]}" for i in many])
    if (given.out / "corrupted.jsonl").exists():
        chart(given.out / "corruptions.png", corruptions(given.out / "corrupted.jsonl"))


def chart(path: Path, cells: Mapping[str, Mapping[str, float]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    names = [name for name in cells["clean 0"] if name not in ("images", "boxes", "without")]
    for number, kind in enumerate(KINDS):
        axes = figure.add_subplot(1, 4, number + 1)
        strengths = [s for s in range(1, 6) if f"{kind} {s}" in cells]
        for name in names:
            style = "-" if name == "1 - score" else ":" if "dropout" in name else "--"
            axes.plot(
                strengths,
                [cells[f"{kind} {s}"][name] for s in strengths],
                style,
                marker="o",
                markersize=3,
                label=name,
            )
        axes.axhline(0.5, color="grey", linewidth=0.5)
        axes.set(
            title=kind,
            ylim=(0.2, 1.02),
            xlabel="strength",
            ylabel="AUROC, corrupted or clean" if not number else "",
        )
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(names), fontsize=8
    )
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
