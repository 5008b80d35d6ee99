"""The interactive viewer of the page: its HTML and its data. ``assets`` holds its script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcov.evaluate.matching import IMAGE, PLANE
from boxcov.evaluate.quality import ERRORS, accurate_iou, accurate_l2, clipped_mean
from boxcov.evaluate.records import Records
from boxcov.report.study import Method, Scene, Study, thin_points

Array = NDArray[Any]
MAX_POINTS, MAX_POINTS_PER_SCENE = 100_000, 20_000  # they would dominate the size of the page
CENTIMETRES = 100  # points are stored in whole centimetres: two bytes per coordinate up to 327 m


class Blobs:
    """Arrays as base64 text; equal arrays, such as the boxes of two methods, are stored once.

    >>> blobs = Blobs()
    >>> [blobs.add(array, "<f4") for array in (np.zeros(3), np.ones(3), np.zeros(3))]
    [0, 1, 0]
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, array: Array, dtype: str) -> int:
        """Return the number of the array."""
        text = base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        return list(self._numbers)


def pack(study: Study) -> dict[str, Any]:
    """Return the data of the viewer as plain dicts, lists, numbers and text."""
    blobs = Blobs()
    plane = plane_columns(study.fields)
    scenes = sorted(study.scenes.items()) if plane else []
    points = min(MAX_POINTS // max(len(scenes), 1), MAX_POINTS_PER_SCENE)
    frames = [number for number, _ in scenes]
    return {
        "fields": list(study.fields),
        "units": [_unit(name) for name in study.fields],
        "classes": list(study.classes),
        "plane": plane,
        "image": plane is not None and len(plane) == len(IMAGE),
        "scenes": [_pack_scene(blobs, number, scene, points) for number, scene in scenes],
        "methods": [_pack_method(blobs, method, frames) for method in study.methods],
        "blobs": blobs.texts,
    }


def plane_columns(fields: Sequence[str]) -> list[int] | None:
    """Return the columns of x y w l yaw, or of x1 y1 x2 y2; None if the fields have neither."""
    for names in (PLANE, IMAGE):
        if all(name in fields for name in names):
            return [list(fields).index(name) for name in names]
    return None


def _unit(field: str) -> str:
    return {"yaw": "rad", "vx": "m/s", "vy": "m/s"}.get(field, "px" if field in IMAGE else "m")


def _pack_scene(blobs: Blobs, number: int, scene: Scene, max_points: int) -> dict[str, Any]:
    points = scene.points[:, :2]
    in_range = (np.abs(points) < 32767 / CENTIMETRES).all(1)  # False for NaN
    points = thin_points(points[in_range], max_points)
    return {
        "frame": int(number),
        "name": scene.name,
        "pointsTotal": len(scene.points),
        "points": blobs.add(np.round(points * CENTIMETRES), "<i2"),
        "truth": blobs.add(scene.truth, "<f4"),
        "truthLabels": blobs.add(scene.truth_labels, "<i2"),
    }


def _pack_method(blobs: Blobs, method: Method, frames: Sequence[int]) -> dict[str, Any]:
    records = method.records
    u = np.asarray(records.uncertainty, dtype=float)
    mean = clipped_mean(u)
    accurate = accuracy_codes(records)
    return {
        "name": method.name,
        "note": method.note,
        "threshold": mean if np.isfinite(mean) else None,  # the paper's; JSON has no infinity
        "uncertainty": blobs.add(u, "<f8"),  # in full: the page must count as Python counts
        "accurate": {name: blobs.add(codes, "<i1") for name, codes in accurate.items()},
        "frame": blobs.add(records.frame, "<i4"),
        "shown": {str(n): _pack_boxes(blobs, records[records.frame == n]) for n in frames},
    }


def accuracy_codes(records: Records) -> dict[str, Array]:
    """Return, per error, 1 for accurate rows (n,), 0 for inaccurate ones, -1 if not counted."""
    l2 = np.full(len(records), -1)
    l2[records.paired] = accurate_l2(records.l2[records.paired])
    return dict(zip(ERRORS, (accurate_iou(records.iou).astype(int), l2)))


def _pack_boxes(blobs: Blobs, records: Records) -> dict[str, Any]:
    packed = {
        "boxes": blobs.add(records.boxes, "<f4"),
        "errors": blobs.add(records.errors, "<f4"),
        "scores": blobs.add(records.scores, "<f4"),
        "labels": blobs.add(records.labels, "<i2"),
        "iou": blobs.add(records.iou, "<f4"),
        "l2": blobs.add(records.l2, "<f4"),
    }
    if records.covariance is not None:
        deviations, correlations = deviations_and_correlations(records.covariance)
        packed["std"] = blobs.add(deviations, "<f4")
        packed["correlations"] = blobs.add(np.round(correlations * 32767), "<i2")
    if records.predictive is not None:
        deviations, _ = deviations_and_correlations(records.predictive)
        packed["predictive"] = blobs.add(deviations, "<f4")
    return packed


def deviations_and_correlations(covariance: Array) -> tuple[Array, Array]:
    """Return standard deviations (n, D) and the correlations below the diagonal, row by row.

    A negative or NaN variance has a deviation of NaN. Undefined correlations are 0.

    >>> deviations, correlations = deviations_and_correlations(np.array([[[4.0, 3.0], [3.0, 9.0]]]))
    >>> deviations.tolist(), correlations.tolist()
    ([[2.0, 3.0]], [[0.5]])
    """
    variances = np.diagonal(covariance, axis1=1, axis2=2)
    deviations = np.sqrt(np.where(variances >= 0, variances, np.nan))
    row, column = np.tril_indices(covariance.shape[1], -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        correlations = covariance[:, row, column] / (deviations[:, row] * deviations[:, column])
    return deviations, np.where(np.isfinite(correlations), correlations, 0.0).clip(-1, 1)


_CELLS = {
    "AC": "accurate, certain",
    "IC": "inaccurate, certain",
    "AU": "accurate, uncertain",
    "IU": "inaccurate, uncertain",
}
_RATES = {"AvU": "AvU", "PAC": "P(A|C)", "PUI": "P(U|I)"}

_STAGE_BAR = """<div class="bar screen">
<span class="group"><button id="previous" aria-label="previous frame">←</button>
<select id="scene" aria-label="frame"></select>
<button id="next" aria-label="next frame">→</button></span>
<span class="group"><button id="zoom-in" aria-label="zoom in">+</button>
<button id="zoom-out" aria-label="zoom out">−</button>
<button id="zoom-all">all</button></span>
<label><input type="checkbox" id="show-points" checked>points</label>
<label><input type="checkbox" id="show-truth" checked>ground truth</label>
<label><input type="checkbox" id="show-sigma" checked>ellipses</label>
<label><input type="checkbox" id="show-numbers" checked>numbers</label>
</div>"""

_BAR = """<div class="bar">
<label>Method <select id="method"></select></label>
<label>Error <select id="error">
<option value="IoU">IoU</option><option value="l2">ℓ₂</option></select></label>
</div>
<div class="bar">
<label>Uncertainty threshold
<input type="range" id="slider" class="screen" min="0" max="1000" step="1" value="0"
 aria-label="threshold, by share of boxes below"></label>
<span class="group"><input type="number" id="threshold" step="any" aria-label="threshold">
<button id="mean" class="screen" title="the paper's threshold">mean of u</button></span>
<span id="share" class="quiet"></span>
</div>
<p id="method-note" class="quiet"></p>"""

_STAGE = """<div>
<div id="stage"><canvas id="points"></canvas>
<svg id="boxes"><g id="world"></g><g id="labels"></g></svg></div>
<div class="key"><span class="k-truth">ground truth</span>
<span class="k-found">prediction with its u</span>
<span class="k-doubt">above the threshold</span><span class="k-wrong">filled: inaccurate</span>
<span class="k-sigma">1 and 3 σ of the position</span></div>
<p class="quiet"><span id="points-note"></span>
<span class="screen">Drag to move, wheel or + − to zoom, ← → for frames.</span></p>
</div>"""


def viewer_html(with_stage: bool) -> str:
    """Return the controls and counts, and the stage if there is a scene to draw."""
    counts = _counts_html("all", "All frames")
    if not with_stage:
        side = f'<aside><div class="pairs">{counts}</div></aside>'
        return f'{_BAR}\n<div class="split counts-only">{side}</div>'
    counts += _counts_html("shown", "This frame")
    details = '<div id="details" aria-live="polite"></div>'
    side = f'<aside><div class="pairs">{counts}</div>{details}</aside>'
    return f'{_BAR}{_STAGE_BAR}\n<div class="split">{_STAGE}{side}</div>'


def _counts_html(scope: str, title: str) -> str:
    cell = {
        kind: f'<td class="{kind}" title="{words}">'
        f'<b id="{scope}-{kind}">–</b><small>{kind}</small></td>'
        for kind, words in _CELLS.items()
    }
    rates = "".join(f'<dt>{name}</dt><dd id="{scope}-{key}">–</dd>' for key, name in _RATES.items())
    return f"""<div><table class="counts"><caption>{title}</caption>
<tr><th></th><th>certain</th><th>uncertain</th></tr>
<tr><th>accurate</th>{cell["AC"]}{cell["AU"]}</tr>
<tr><th>inaccurate</th>{cell["IC"]}{cell["IU"]}</tr></table><dl class="rates">{rates}</dl></div>"""
