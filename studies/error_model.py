"""What the error model is worth, beside every free and every expensive baseline.

python studies/collect.py boxes --out OUT --sets fit fit-copies test --bare --cheap
for frames in 20 40 150 500 1200; do
    python studies/error_model.py --root OUT --out RESULTS --frames $frames
done
python studies/error_model_tables.py RESULTS

The protocol, written before the frames of ``test`` (seed 8777) were collected:
- All rows are error models of the same kind, fitted by ``fit_error_model`` on the first frames of
  the set ``fit`` and three turned and mirrored copies of each; they differ in their inputs alone.
  Signals, sizes, training and copies were chosen on ``develop``, and on frames of ``fit`` that the
  compared models were not fitted on.
- The set ``test`` is read once, by this script, for the tables that it writes. Other frames were
  read for earlier versions of the error model (seeds 777, 1777, 2777, 5777 and 6777), the last of
  them without copies. Since then the copies alone were added.
- Boxes are those above a score of 0.1. Intervals are 95 % over frames.
- Covariances are those of the head, exact, as in the posterior of the package. The identity Fisher
  has covariances of the head, too.
- The distance of a box counts as large above the mean over the test boxes; it is ranked by the
  scales of x, y and z.
- Rows: those of ``ROWS`` without further passes with 500 frames, and ours without copies. Dropout,
  NMS spread and identity Fisher were read on the frames before (6777), all rows without copies;
  score + size, free and ours with 20, 40 and 150, free and ours with 1,200 and the copies of the
  first 542.
- Beside it stands ours without copies on the same frames: what copies buy, with intervals over
  frames.
- Goals: with 500 frames AUROC of IoU < 0.4 0.91, of IoU < 0.7 0.87, of the distance 0.85; AvU 0.79,
  P(A|C) 0.955, P(U|I) 0.86 and ECE at most 0.015 with u = misplaced on boxes with an object;
  regions within 2 points at 50, 90 and 95 %, within 4 in every class and range bin with 200 boxes;
  with 40 frames 0.88; NLL lower than every baseline, without velocity, too; ours above raw outputs,
  and above free, in AUROC of IoU < 0.4, the interval clear of zero; risk above score and score +
  size.
- What comes out is reported, reached or not, and nothing is changed afterwards.

The deep ensemble was tried on earlier frames, with an earlier error model and covariances of head
and backbone (``ceiling``): collect with ``--sets fit ceiling`` on a GPU, then ``--test ceiling``.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from boxcov.data import simulated
from boxcov.detections import Detections
from boxcov.error_model.calibrate import fit_error_model
from boxcov.error_model.labelled_frames import COPIES, CopiedBoxes
from boxcov.error_model.model import ErrorModel
from boxcov.error_model.network import WIDTHS, TrainingOptions
from boxcov.error_model.regions import RANGES, class_range_index
from boxcov.error_model.student_t import student_nll
from boxcov.evaluate.covariance_metrics import calibration_error
from boxcov.evaluate.quality import auroc, quality
from boxcov.evaluate.records import Records

FIELDS = ("x", "y", "z", "w", "l", "h", "yaw", "vx", "vy")
RAW = "+ raw outputs of the head"
FREE = "free: score + size + signals"
OURS = "ours: free + covariances"
ALONE = "ours, without copies"
SIZE = "score + size"
DROPOUT = "+ MC dropout, 8 passes"
ENSEMBLE = "+ deep ensemble, 4 more networks"
RAW_COVARIANCES = "raw outputs + covariances"
FREE_ENSEMBLE = "free + deep ensemble"
_NEIGHBOURS = ("nearest", "boxes in frame", "scores nearby")


@dataclass(frozen=True)
class Row:
    """The inputs of one row: arrays of the collection, beyond score, size, range and class."""

    arrays: tuple[str, ...] = ()
    has_signals: bool = False
    has_covariance: bool = False
    has_points: bool = True  # among the signals
    has_copies: bool = True  # of the frames, to learn from


ROWS = {
    SIZE: Row(),
    "+ features of the head": Row(("features",)),
    "+ NMS spread": Row(("nms",)),
    DROPOUT: Row(("dropout",)),
    "+ identity Fisher": Row(("identity",)),
    ENSEMBLE: Row(("members",)),
    "+ covariances alone": Row(has_covariance=True),
    RAW: Row(has_signals=True, has_points=False),
    RAW_COVARIANCES: Row(has_signals=True, has_covariance=True, has_points=False),
    FREE: Row(has_signals=True),
    FREE_ENSEMBLE: Row(("members",), has_signals=True),
    OURS: Row(has_signals=True, has_covariance=True),
    ALONE: Row(has_signals=True, has_covariance=True, has_copies=False),
}
ONE_PASS = tuple(name for name, row in ROWS.items() if set(row.arrays) <= {"features"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="folder of studies/collect.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON results")
    parser.add_argument(
        "--rows", nargs="*", default=[], help="names of rows; those of the protocol"
    )
    parser.add_argument("--frames", type=int, default=500, help="frames of the fit")
    parser.add_argument("--test", default="test", help="set to report on")
    parser.add_argument("--shifts", nargs="*", default=[], help="further sets to report on")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    some = (FREE, OURS) if args.frames > 500 else (SIZE, FREE, OURS)
    for name in args.rows or (ONE_PASS if args.frames == 500 else some):
        began = time.perf_counter()
        row = ROWS[name]
        found, records = load(args.root, "fit", row, args.frames)
        model = fit_row(found, records, row, load_copies(args.root, row, args.frames))
        result = {
            "row": name,
            "frames": args.frames,
            "seconds": time.perf_counter() - began,
            "boxes": len(found),
            **dict(model.provenance),
            "sets": {
                one: report(model, *load(args.root, one, row)) for one in (args.test, *args.shifts)
            },
        }
        path = args.out / f"{args.test} {args.frames} {slug(name)}"
        np.savez(path.with_suffix(".npz"), **per_box(model, *load(args.root, args.test, row)))
        path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps(result["sets"][args.test]["ranking"]), flush=True)


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")


def fit_row(
    found: Detections, records: Records, row: Row, copies: CopiedBoxes | None = None
) -> ErrorModel:
    exclude = () if row.has_signals or row.has_covariance else _NEIGHBOURS
    return fit_error_model(
        found,
        records,
        estimator="study",
        fingerprint="",
        options=TrainingOptions(widths=WIDTHS[1:], exclude=exclude),
        copies=copies,
    )


# the collection as detections and records


def load(root: Path, name: str, row: Row, frames: int | None = None) -> tuple[Detections, Records]:
    """Return a set with the inputs of a row."""
    with np.load(root / f"{name}.npz") as file:
        arrays = dict(file)
    if "members" in row.arrays:
        with np.load(root / f"{name}-ensemble.npz") as file:
            arrays["members"] = disagreement(arrays, file["members"])
    most = min(len(arrays[key]) for key in ("scores", *row.arrays))
    if frames is not None:
        most = min(most, int((arrays["frame"] < frames).sum()))
    d = {key: v if key == "signal names" else v[:most] for key, v in arrays.items()}
    return detections(d, row), records_of(d)


def load_copies(root: Path, row: Row, frames: int) -> CopiedBoxes | None:
    """Return the copies of the frames that a row learns from, if they were collected."""
    if not row.has_copies or not (root / "fit-copies.npz").exists():
        return None
    found, records = load(root, "fit-copies", row, frames * COPIES)
    return CopiedBoxes(found, records, found.frame // COPIES)


def detections(d: dict[str, np.ndarray], row: Row) -> Detections:
    columns: list[np.ndarray] = []
    names: list[str] = []
    parts = [(key, d[key]) for key in row.arrays]
    if row.has_covariance and "below" in d:  # else: of the head alone
        parts.append(("below the head", d["below"]))
    for key, values in parts:
        columns.append(values.astype(np.float32))
        names += [f"{key} {i}" for i in range(values.shape[1])]
    if row.has_signals:
        every = [str(name) for name in d["signal names"]]
        own = [i for i, n in enumerate(every) if row.has_points or not n.startswith("points")]
        columns.append(d["signals"][:, own].astype(np.float32))
        names += [every[i] for i in own]
    head = torch.tensor(d["head"].astype(np.float64)).exp().float()
    return Detections(
        boxes=torch.tensor(d["boxes"]),
        scores=torch.tensor(d["scores"]),
        labels=torch.tensor(d["labels"].astype(np.int64)),
        frame=torch.tensor(d["frame"].astype(np.int64)),
        fields=FIELDS,
        classes=tuple(simulated.CLASSES),
        covariance=torch.diag_embed(head[:, :-1]) if row.has_covariance else None,
        score_variance=head[:, -1] if row.has_covariance else None,
        signals=torch.tensor(np.concatenate(columns, 1)) if columns else None,
        meta={"signals": names},
    )


def records_of(d: dict[str, np.ndarray]) -> Records:
    boxes = d["boxes"].astype(float)
    return Records(
        fields=FIELDS,
        classes=tuple(simulated.CLASSES),
        boxes=boxes,
        uncertainty=1 - d["scores"].astype(float),
        scores=d["scores"].astype(float),
        labels=d["labels"].astype(int),
        frame=d["frame"].astype(int),
        truth=boxes - d["errors"].astype(float),
        iou=d["iou"].astype(float),
        l2=d["l2"].astype(float),
    )


def disagreement(d: dict[str, np.ndarray], members: np.ndarray) -> np.ndarray:
    """Return how far the members' boxes are from ours: log rms per field, scores, and how many."""
    members = members.astype(np.float32)
    n = len(members)
    own = np.concatenate([d["scores"][:n, None], d["boxes"][:n]], 1)[:, None]
    is_found = ~np.isnan(members[:, :, 0])
    delta = members - own
    delta[:, :, 7] = (delta[:, :, 7] + np.pi) % (2 * np.pi) - np.pi
    square = np.where(is_found[:, :, None], delta**2, 0).sum(1)
    rms = np.sqrt(square / np.maximum(is_found.sum(1), 1)[:, None])
    score = np.where(is_found, members[:, :, 0], 0).mean(1)
    return np.concatenate(
        [np.log(rms[:, 1:] + 1e-3), rms[:, :1], score[:, None], is_found.sum(1)[:, None]], 1
    )


# results


def per_box(model: ErrorModel, found: Detections, records: Records) -> dict[str, np.ndarray]:
    """Return the numbers of each box that comparisons between rows need."""
    out = model.apply(found)
    return {
        "risk": out.risk.numpy(),
        "no_object": out.no_object.numpy(),  # type: ignore[union-attr]
        "misplaced": out.misplaced.numpy(),
        "misplaced 0.7": out.misplaced_at(0.7).numpy(),
        "distance": _distance(out),
        "nll": _nll(out, records),
        "frame": records.frame,
        "iou": records.iou,
        "l2": records.l2,
        "scores": records.scores,
        "labels": records.labels,
        "range": np.hypot(records.boxes[:, 0], records.boxes[:, 1]),
    }


def _distance(out: Detections) -> np.ndarray:
    assert out.scale is not None
    return out.scale[:, :3].square().sum(1).sqrt().numpy()


def _nll(out: Detections, records: Records) -> np.ndarray:
    """Return the Student-t NLL (n, D); NaN without an object."""
    errors = torch.as_tensor(records.as_axes().errors).float()
    assert out.scale is not None
    nll: np.ndarray = student_nll(errors, out.scale.log(), out.dof).numpy()
    return nll


def _gaussian_nll(out: Detections, records: Records) -> float:
    """Return the mean NLL of the errors under ``predictive``, over boxes with an object."""
    rows = torch.as_tensor(records.paired)
    assert out.predictive is not None
    errors = torch.as_tensor(records.as_axes().errors)[rows]
    zero, R = torch.zeros_like(errors), out.predictive[rows].double()
    return float(-torch.distributions.MultivariateNormal(zero, R).log_prob(errors).mean())


def report(model: ErrorModel, found: Detections, records: Records) -> dict[str, Any]:
    out = model.apply(found)
    paired = records.paired
    u = out.misplaced.numpy()
    large = records.l2 > records.l2[paired].mean()
    nll = _nll(out, records)[paired].sum(1)
    no_velocity = _nll(out, records)[paired][:, :7].sum(1)
    metrics = quality(records.iou[paired], records.l2[paired], u[paired])
    return {
        "boxes": len(records),
        "paired": int(paired.sum()),
        "ranking": {
            "IoU < 0.4": auroc((records.iou < 0.4)[paired], u[paired]),
            "IoU < 0.7": auroc((records.iou < 0.7)[paired], out.misplaced_at(0.7).numpy()[paired]),
            "distance": auroc(large[paired], _distance(out)[paired]),
            "no object": auroc(~paired, out.no_object.numpy()),  # type: ignore[union-attr]
            "risk": auroc(records.iou < 0.4, out.risk.numpy()),
            "1 - score, IoU < 0.4": auroc((records.iou < 0.4)[paired], 1 - records.scores[paired]),
            "1 - score, risk": auroc(records.iou < 0.4, 1 - records.scores),
        },
        "paper": {key: metrics[key]["IoU"] for key in ("AvU", "P(A|C)", "P(U|I)")},
        "ECE": {
            "misplaced": calibration_error(u[paired], (records.iou < 0.4)[paired]),
            "risk": calibration_error(out.risk.numpy(), records.iou < 0.4),
        },
        "NLL": {
            "nine fields": float(nll.mean()),
            "without velocity": float(no_velocity.mean()),
            "predictive": _gaussian_nll(out, records),
        },
        "coverage": coverage(out, records),
        "width": {
            name: float(w) for name, w in zip(FIELDS, out.region(0.9)[paired].median(0).values)
        },
    }


def coverage(out: Detections, records: Records) -> dict[str, Any]:
    """Return the share of errors inside the regions, over all fields and by class and range."""
    paired = records.paired
    errors = np.abs(records.as_axes().errors[paired])
    own = out[torch.as_tensor(paired)]
    labels, ranges = (t.numpy() for t in class_range_index(own))
    result: dict[str, Any] = {}
    for level in (0.5, 0.9, 0.95):
        inside = errors <= own.region(level).numpy()
        joint = (errors <= own.region(level, joint=True).numpy()).all(1)
        groups = {}
        for c, name in enumerate(out.classes):
            for r in range(len(RANGES) + 1):
                rows = (labels == c) & (ranges == r)
                if rows.sum() >= 200:
                    groups[f"{name} {r}"] = float(inside[rows].mean())
        result[str(level)] = {
            "all": float(inside.mean()),
            "joint": float(joint.mean()),
            "by field": inside.mean(0).round(4).tolist(),
            "groups": groups,
        }
    return result


if __name__ == "__main__":
    main()
