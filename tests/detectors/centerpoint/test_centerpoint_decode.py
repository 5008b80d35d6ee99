"""Decoding and its Jacobian against closed forms, the selection against a loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from boxcov.detectors.centerpoint.decode import CellIndex, boxes_of, values_at
from boxcov.detectors.centerpoint.loss import encode
from boxcov.detectors.nms import rotated_iou
from helpers.centerpoint_cases import cloud, detector_of, pillar_config, target, task_targets

CONFIG = pillar_config()


def test_the_decode_jacobian_is_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 10, generator=generator, dtype=torch.float64)
    row, column = torch.arange(5), torch.arange(5, 10)

    def decode(v):
        parts = dict(zip(("reg", "height", "dim", "rot", "vel"), v.split((2, 1, 3, 2, 2), 1)))
        return boxes_of(parts, row, column, CONFIG)

    found = torch.autograd.functional.jacobian(decode, values)[
        torch.arange(5), :, torch.arange(5)
    ]  # (5, 9, 10)
    boxes = decode(values)
    s, c = values[:, 6], values[:, 7]
    expected = torch.zeros(5, 9, 10, dtype=torch.float64)
    expected[:, 0, 0], expected[:, 1, 1] = CONFIG.cell
    expected[:, 2, 2] = 1
    expected[:, 3, 4], expected[:, 4, 3], expected[:, 5, 5] = boxes[:, 3], boxes[:, 4], boxes[:, 5]
    expected[:, 6, 6], expected[:, 6, 7] = c / (s**2 + c**2), -s / (s**2 + c**2)
    expected[:, 7, 8] = expected[:, 8, 9] = 1
    torch.testing.assert_close(found, expected)


def test_decoding_undoes_encoding():
    targets = target(CONFIG)
    targets["boxes"] = targets["boxes"].double()
    encoded = encode([targets], CONFIG, torch.zeros(1, dtype=torch.float64))
    for t, task in enumerate(task_targets(encoded)):
        parts = dict(zip(CONFIG.branches, task.values.split(tuple(CONFIG.branches.values()), 1)))
        boxes = boxes_of(parts, task.row, task.column, CONFIG)
        mine = torch.tensor(
            [CONFIG.classes[label] in CONFIG.tasks[t] for label in targets["labels"].tolist()]
        )
        expected = targets["boxes"][mine].clone()
        expected[:, 6] = torch.atan2(expected[:, 6].sin(), expected[:, 6].cos())
        torch.testing.assert_close(boxes, expected, equal_nan=True)


def slow_select(raw, config):
    """Select frame by frame and task by task: sort, cut and suppress candidates one by one."""
    rules, out = config.reporting, []
    for b in range(len(raw["features"])):
        kept = []
        for t, maps in enumerate(raw["tasks"]):
            heat = maps["heatmap"][b].sigmoid()
            first = sum(len(names) for names in config.tasks[:t])
            found = []
            for i in range(heat.shape[1]):
                for j in range(heat.shape[2]):
                    best = int(heat[:, i, j].argmax())
                    found += [
                        (float(heat[c, i, j]), first + c, i, j)
                        for c in range(len(heat))
                        if rules.per_class or c == best
                    ]
            found = sorted(found, key=lambda f: -f[0])
            if not rules.per_class:  # det3d drops what is out of range before it cuts the list
                found = [f for f in found if _inside(_box(raw, config, b, t, *f[2:]), rules)]
            found = [f for f in found[: rules.candidates] if f[0] > rules.threshold]
            boxes = [_box(raw, config, b, t, i, j) for _, _, i, j in found]
            chosen = []
            for n, box in enumerate(boxes):
                if not _inside(box, rules):
                    continue
                if not chosen or _apart(box, torch.stack([boxes[m] for m in chosen]), t, rules):
                    chosen.append(n)
            kept += [(*found[n][:2], t, *found[n][2:]) for n in chosen[: rules.max_boxes]]
        out += [(b, *k) for k in sorted(kept, key=lambda k: -k[0])]
    return out


def _inside(box, rules):
    low, high = rules.centre_range[:3], rules.centre_range[3:]
    return all(lo <= v <= hi for lo, v, hi in zip(low, box[:3].tolist(), high))


def _box(raw, config, b, t, i, j):
    where = CellIndex(*torch.tensor([[b], [t], [i], [j]]))
    return boxes_of(
        values_at(raw["tasks"], where, list(config.branches)), where.row, where.column, config
    )[0]


def _apart(box, others, t, rules):
    if rules.nms == "circle":
        return bool(((box[:2] - others[:, :2]).square().sum(1) > rules.radii[t]).all())
    flat = others[:, [0, 1, 3, 4, 6]]
    return bool((rotated_iou(flat, box[[0, 1, 3, 4, 6]].expand_as(flat)) <= rules.overlap).all())


RULES = {
    "mmdet3d": {},
    "det3d": {"per_class": False},
    "circle": {"nms": "circle"},
    "few candidates": {"candidates": 20},
    "few boxes": {"max_boxes": 3},
    "near boxes only": {"centre_range": (-3, -3, -1, 3, 3, 1)},
    "few, then near": {"candidates": 10, "centre_range": (-5, -5, -1, 5, 5, 1)},
    "near, then few": {"candidates": 10, "centre_range": (-5, -5, -1, 5, 5, 1), "per_class": False},
    "threshold": {"threshold": 0.35},
}


@pytest.mark.parametrize("change", RULES.values(), ids=RULES)
def test_the_selection_is_that_of_the_loop(change):
    base = replace(CONFIG.reporting, max_boxes=83, threshold=0.2)
    config = replace(CONFIG, reporting=replace(base, **change))
    detector = detector_of(config, seed=1)
    with torch.no_grad():
        for t in detector.head.branches():  # sizes and scores that differ
            t["dim"][-1].weight *= 3
            t["heatmap"][-1].weight *= 4
            t["reg"][-1].weight *= 3
        raw = detector([cloud(config, 0), cloud(config, 1)])
        found = detector.select(raw)
    where = found.where
    as_list = list(
        zip(
            where.frame.tolist(),
            found.scores.tolist(),
            found.labels.tolist(),
            where.task.tolist(),
            where.row.tolist(),
            where.column.tolist(),
        )
    )
    assert as_list == slow_select(raw, config)
    assert len(as_list) > 5
    assert torch.equal(found.frame, where.frame)
