"""Do boxes look right? They fit the labels; those of a CenterPoint have usual sizes and scores.

A checkpoint that is read with the wrong grid or the wrong conventions loads without an error, and
so do labels in another convention. The boxes show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from boxcov._torch.modules import move, shadow
from boxcov.checks.report import Finding
from boxcov.concatenation import concatenate
from boxcov.data.points import count_points
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.detectors.centerpoint.detector import CenterPoint
from boxcov.errors import BoxcovError, join_names
from boxcov.evaluate.ground_truth import GroundTruth, check_targets
from boxcov.evaluate.label_convention import CONFIDENT, MIN_AGREEMENT, MIN_PAIRS, compare_labels

# Mean w, l and h of the classes of nuScenes in metres
_SIZES = {
    "car": (1.96, 4.62, 1.73),
    "truck": (2.51, 6.93, 2.84),
    "construction_vehicle": (2.85, 6.37, 3.19),
    "bus": (2.94, 11.19, 3.47),
    "trailer": (2.90, 12.29, 3.87),
    "barrier": (2.53, 0.50, 0.98),
    "motorcycle": (0.77, 2.11, 1.47),
    "bicycle": (0.60, 1.70, 1.28),
    "pedestrian": (0.67, 0.73, 1.77),
    "traffic_cone": (0.41, 0.41, 1.07),
}
_FEW = 5  # boxes below which nothing is said
_SPEED = 2.0  # m/s from which the velocity tells the heading
_NEAR = 1.0  # metres between the centres of a box and its object
_RATIOS = (0.75, 4 / 3)  # of other grids: 0.075 m and 0.1 m differ by these
LABEL_FRAMES = 20  # at most, to compare boxes with labels
_ENOUGH = 60  # confident boxes and objects


def label_convention(detector: Detector, frames: Sequence[Any]) -> Finding:
    """Return whether the labels of the first frames are in the convention of the boxes.

    The detector must keep the contract, and stays as it is.
    """
    device, model = next(detector.parameters()).device, shadow(detector)
    found: list[Detections] = []
    targets: list[tuple[None, Any]] = []
    count = comparable = 0
    passed: bool | None = None
    seen = todo = ""
    try:
        while len(found) < min(LABEL_FRAMES, len(frames)) and comparable < _ENOUGH:
            inputs, target = frames[len(found)]
            check_targets(target, len(found))
            boxes = model.detect(move(inputs, device))
            found.append(replace(boxes, frame=boxes.frame + count))
            targets.append((None, target))
            count += len(target)
            confident = int((boxes.scores > CONFIDENT).sum())
            comparable += min(confident, sum(len(one["labels"]) for one in target))
        compared = compare_labels(concatenate(found), GroundTruth.from_frames(targets))
    except BoxcovError as error:  # such labels cannot be compared with boxes
        return Finding("labels: convention", None, str(error))
    if compared is None:
        seen = f"boxes of {' '.join(detector.box_fields)} are not compared"
    elif compared.seen:
        passed, seen, todo = False, compared.seen, compared.todo
    elif compared.pairs < MIN_PAIRS:
        seen = f"too few pairs to tell: {compared.counts}"
    elif compared.agreement < MIN_AGREEMENT:
        share = f"{100 * compared.agreement:.0f} %"
        seen = f"boxes and labels agree to {share}, too little to tell: {compared.counts}"
    else:
        passed, seen = True, f"{compared.counts}, and no other reading of the labels fits better"
    return Finding("labels: convention", passed, seen, todo)


def observe(detector: CenterPoint, frames: Sequence[Any]) -> list[Finding]:
    """Return what the boxes of some frames ``(inputs, targets)`` of one cloud each look like.

    The detector must be in eval mode and stays as it is. Each frame costs a few plain passes.
    """
    device = detector.first_classes.device
    found, holds = [], []
    for inputs, _ in frames:
        cloud = move(inputs, device)[0]
        found.append(detector.detect([cloud]))
        holds.append(_holds_points(found[-1].boxes, cloud))
    scores = torch.cat([frame.scores for frame in found])
    order = scores.argsort(descending=True)[: max(_FEW, len(scores) // 2)]  # the better half
    boxes = torch.cat([frame.boxes for frame in found])[order]
    labels = torch.cat([frame.labels for frame in found])[order]
    table = torch.tensor([_SIZES.get(name, (torch.nan,) * 3) for name in detector.classes])
    usual = table.to(labels.device)[labels]  # mean w, l, h of each box's class; NaN if unknown
    known = usual.isfinite().all(1)
    off = (boxes[known, 3:6] / usual[known].to(boxes)).log().abs()  # (n, 3)
    highest = float(scores.max()) if len(scores) else 0.0
    looks = [
        Finding(
            "boxes: scores",
            highest >= 0.3,
            f"{len(scores) / len(frames):.0f} boxes per frame, highest score {highest:.2f}",
            "almost no box has a score: does the configuration (grid, sweeps, intensity) fit?",
        ),
        _most(
            "boxes: on points",
            torch.cat(holds)[order],
            "of the better half of the boxes hold a point",
            "boxes in empty space: give the grid of the checkpoint, config= or --config",
        ),
        _most(
            "boxes: sizes",
            (off < 0.7).all(1),  # up to a factor of 2
            "of the boxes have the size of their class, up to a factor of 2",
            "sizes do not fit the classes: give the configuration of the checkpoint (grid, order "
            "of the classes), config= or --config",
        ),
        _orientation(boxes, usual),
        _classes([frame for _, frame in frames], found, detector.classes),
        _grid(detector, frames),
    ]
    return [look if look.passed is False else replace(look, todo="") for look in looks]


def _most(name: str, mask: Tensor, seen: str, todo: str) -> Finding:
    """Return whether something holds for most boxes."""
    passed = None if len(mask) < _FEW else _share(mask) >= 0.5
    return Finding(name, passed, f"{100 * _share(mask):.0f} % {seen}", todo)


def _orientation(boxes: Tensor, usual: Tensor) -> Finding:
    """Compare the boxes with the same raw outputs read by the other conventions.

    mmdetection3d before 1.0 and det3d have (w, l, h) and -yaw - pi / 2 where 1.0 has (l, w, h) and
    the yaw. Cars are longer than wide, and move along their long side.
    """
    long = usual[:, 1] > 1.5 * usual[:, 0]  # False where the class is unknown
    w, l, yaw = boxes[long, 3], boxes[long, 4], boxes[long, 6]
    is_longer = _share(l > w)
    seen = f"{100 * is_longer:.0f} % of {len(l)} vehicles are longer than wide"
    passed = None if len(l) < _FEW else is_longer >= 0.5
    if boxes.shape[1] == 9:
        v = boxes[long, 7:9]
        moving = v.norm(dim=1) > _SPEED
        apart = (torch.atan2(v[:, 1], v[:, 0]) - yaw)[moving]
        along = _share(apart.cos().abs() > 0.7)
        seen += f", {100 * along:.0f} % of {len(apart)} that move do so along their heading"
        if passed and len(apart) >= _FEW:
            passed = along >= 0.5
    todo = "width and length or the heading are read by the wrong conventions: for mmdetection3d "
    todo += "give the other generation, legacy= or --legacy / --no-legacy"
    return Finding("boxes: orientation", passed, seen, todo)


def _classes(
    targets: Sequence[Any], found: Sequence[Detections], classes: Sequence[str]
) -> Finding:
    """Compare the classes of labelled objects with those of the boxes nearest to them.

    Sizes do not tell bicycles from motorcycles if a file has its classes in another order.
    """
    table = torch.zeros(len(classes), len(classes), dtype=torch.long)  # labelled, reported
    for target, frame in zip(targets, found):
        if target and "boxes" in target[0] and len(frame):
            objects, labels = (target[0][name].cpu() for name in ("boxes", "labels"))
            boxes = frame.boxes.cpu()
            away, nearest = torch.cdist(objects[:, :2].float(), boxes[:, :2].float()).min(1)
            near = away < _NEAR
            pairs = (labels[near], frame.labels.cpu()[nearest[near]])
            table.index_put_(pairs, torch.tensor(1), accumulate=True)
    total, (count, reported) = table.sum(1), table.max(1)
    known = total >= _FEW
    wrong = known & (reported != torch.arange(len(classes))) & (2 * count > total)
    pairs_wrong = zip(wrong.nonzero()[:, 0].tolist(), reported[wrong].tolist())
    names = [f"{classes[own]} are reported as {classes[other]}" for own, other in pairs_wrong]
    counts = f"{int(table.trace())} of {int(table.sum())} labelled objects"
    return Finding(
        "boxes: classes",
        not names if bool(known.any()) else None,
        f"{counts} have the class of the box nearest to them",
        f"most objects of {join_names(names)}: give the checkpoint's order of the classes by its "
        "configuration file, config= or --config",
    )


def _grid(detector: CenterPoint, frames: Sequence[Any]) -> Finding:
    """Compare the loss of the labelled objects with that of the same weights on other grids.

    Boxes on a wrong grid still look right, because the points are in metres; the loss tells.
    """
    low, high = (torch.tensor(detector.config.point_range[i : i + 2]) for i in (0, 3))
    losses, objects = dict.fromkeys((1.0, *_RATIOS), 0.0), 0
    for inputs, targets in frames:
        if not targets or "boxes" not in targets[0]:
            continue
        boxes, labels = targets[0]["boxes"].cpu(), targets[0]["labels"].cpu()
        # objects on all of the grids
        inside = ((boxes[:, :2] > low * min(_RATIOS)) & (boxes[:, :2] < high * min(_RATIOS))).all(1)
        target = {"boxes": boxes[inside], "labels": labels[inside]}
        objects += int(inside.sum())
        for ratio in losses:
            losses[ratio] += _loss_on_grid(detector, ratio, inputs, target)
    best = min(losses, key=lambda ratio: losses[ratio])
    size = detector.config.voxel_size[0]
    seen = ", ".join(f"{loss:.1f} at {ratio * size:.3g} m" for ratio, loss in losses.items())
    return Finding(
        "boxes: grid",
        None if objects < _FEW else losses[best] > 0.85 * losses[1.0],
        f"loss of {objects} labelled objects: {seen}",
        f"the weights fit cells of {best * size:.3g} m better: give the grid of the checkpoint, "
        "config= or --config",
    )


def _loss_on_grid(
    detector: CenterPoint, ratio: float, inputs: Sequence[Tensor], target: dict[str, Tensor]
) -> float:
    """Return the loss of the same weights with cells and ranges ``ratio`` times as wide."""
    config, device = detector.config, detector.first_classes.device
    scales = (ratio, ratio, 1.0)
    size = tuple(s * scale for s, scale in zip(config.voxel_size, scales))
    reach = tuple(s * scale for s, scale in zip(config.point_range, scales * 2))
    with torch.device("meta"):
        twin = CenterPoint(replace(config, voxel_size=size, point_range=reach))
    twin.load_state_dict(detector.state_dict(), assign=True)  # the same tensors
    twin.first_classes = detector.first_classes
    with torch.no_grad():
        return float(twin.eval().loss(twin(move(inputs, device)), [move(target, device)]))


def _share(mask: Tensor) -> float:
    return float(mask.float().mean()) if len(mask) else 0.0


def _holds_points(boxes: Tensor, cloud: Tensor) -> Tensor:
    """Return which boxes (m, 7 or more), larger by 0.2 m per side, hold a new point."""
    newest = cloud[cloud[:, 4] <= cloud[:, 4].min() + 0.01] if len(cloud) else cloud
    larger = boxes[:, :7] + 0.4 * boxes.new_tensor([0, 0, 0, 1, 1, 1, 0])
    return count_points(newest, larger) > 0
