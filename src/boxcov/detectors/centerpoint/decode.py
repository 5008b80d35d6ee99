"""From the head's maps to boxes x y z w l h yaw vx vy, differentiable; and which of them are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boxcov.detector import Candidates, Selection
from boxcov.detectors.centerpoint.config import Config
from boxcov.detectors.centerpoint.head import TaskMaps
from boxcov.detectors.centerpoint.nms import Pairs, circle_rivals, greedy, rotated_rivals


@dataclass(frozen=True)
class Where:
    """The cells of m instances."""

    frame: Tensor  # (m,)
    task: Tensor  # (m,)
    row: Tensor  # (m,)
    column: Tensor  # (m,)

    def __getitem__(self, index: Tensor) -> Where:
        return Where(self.frame[index], self.task[index], self.row[index], self.column[index])


def values_at(tasks: Sequence[TaskMaps], where: Where, names: Sequence[str]) -> dict[str, Tensor]:
    """What the branches ``names`` say (m, n) at the instances' cells, each in its own task.

    >>> maps = [{"reg": torch.zeros(1, 2, 4, 4)}, {"reg": torch.ones(1, 2, 4, 4)}]
    >>> values_at(maps, Where(*torch.tensor([[0], [1], [3], [3]])), ["reg"])["reg"]
    tensor([[1., 1.]])
    """
    each = torch.arange(len(where.task), device=where.task.device)
    out = {}
    for name in names:
        all_tasks = torch.stack(
            [maps[name][where.frame, :, where.row, where.column] for maps in tasks]
        )  # (tasks, m, n)
        out[name] = all_tasks[where.task, each]
    return out


def logits_at(tasks: Sequence[TaskMaps], selection: Selection, config: Config) -> Tensor:
    """The heat map's logit (m,) of each instance's class at its cell.

    >>> config = Config.small()
    >>> maps = [{"heatmap": torch.zeros(1, len(names), 4, 4)} for names in config.tasks]
    >>> maps[1]["heatmap"][0, 1, 2, 3] = 5.0
    >>> one = torch.tensor([0])
    >>> logits_at(maps, Selection(one, one, one + config.first_class(1) + 1, Where(one, one + 1, one + 2, one + 3)), config)
    tensor([5.])
    """
    where = selection.where
    heat = torch.cat(
        [maps["heatmap"][where.frame, :, where.row, where.column] for maps in tasks], 1
    )  # (m, classes)
    return heat.gather(1, selection.labels[:, None])[:, 0]


def boxes_of(values: Mapping[str, Tensor], row: Tensor, column: Tensor, config: Config) -> Tensor:
    """Boxes (m, 9), or (m, 7) without velocity, from the head's values (m, n) at their cells.

    >>> values = {"reg": torch.zeros(1, 2), "height": torch.ones(1, 1), "dim": torch.zeros(1, 3), "rot": torch.tensor([[0.0, 1.0]])}
    >>> boxes_of({**values, "vel": torch.zeros(1, 2)}, torch.tensor([64]), torch.tensor([64]), Config.mmdet3d_pillar())
    tensor([[0., 0., 1., 1., 1., 1., 0., 0., 0.]])
    """
    # plain numbers, no tensors made of them: those would have to travel to a GPU
    x, y = (
        (at + values["reg"][:, i]) * config.cell[i] + config.point_range[i]
        for i, at in enumerate((column, row))
    )
    centre = torch.stack([x, y], 1)
    l, w, h = values["dim"].exp().unbind(1)
    yaw = torch.atan2(values["rot"][:, 0], values["rot"][:, 1])
    parts = [centre, values["height"], torch.stack([w, l, h, yaw], 1)]
    return torch.cat([*parts, values["vel"]] if config.velocity else parts, 1)


def select(tasks: Sequence[TaskMaps], config: Config) -> Selection:
    """The instances that are reported: of each task the best candidates above the threshold that survive NMS, frame by frame, by falling score.

    >>> config = Config.mmdet3d_pillar()
    >>> maps = [{name: torch.zeros(1, n, 128, 128) for name, n in config.branches.items()} for _ in config.tasks]
    >>> for task, names in zip(maps, config.tasks):
    ...     task["heatmap"] = torch.full((1, len(names), 128, 128), -9.0)
    >>> maps[2]["heatmap"][0, 1, 5, 6] = 3.0
    >>> found = select(maps, config)
    >>> [config.classes[label] for label in found.labels], found.where.column
    (['trailer'], tensor([6]))
    """
    found = ranked(tasks, config)
    return found.selection(
        found.reported(greedy(*_rivals(found, config), found.valid), config.reporting.most)
    )


def candidates(tasks: Sequence[TaskMaps], config: Config) -> Candidates:
    """What NMS chooses from, in the order of ``select``, and the best reported box that suppresses each.

    >>> config = Config.small()
    >>> maps = [{name: torch.zeros(1, n, 128, 128) for name, n in config.branches.items()} for _ in config.tasks]
    >>> for task, names in zip(maps, config.tasks):
    ...     task["heatmap"] = torch.full((1, len(names), 128, 128), -9.0)
    >>> maps[0]["heatmap"][0, 0, 5, 6:8] = torch.tensor([3.0, 2.0])
    >>> maps[0]["dim"] += 1  # boxes of 2.7 m, 0.8 m apart
    >>> found = candidates(maps, config)
    >>> found.where.column, found.removed_by
    (tensor([6, 7]), tensor([-1,  0]))
    """
    found = ranked(tasks, config)
    first, second = _rivals(found, config)
    kept = found.reported(greedy(first, second, found.valid), config.reporting.most)
    row = torch.full(
        (found.valid.numel() + 1,), -1, device=kept.device
    )  # in the report; the last one stands for nobody
    row[kept] = torch.arange(len(kept), device=kept.device)
    counts = row[first] >= 0
    nobody = torch.full_like(row[:-1], len(row) - 1)
    best = nobody.scatter_reduce(
        0, second[counts], first[counts], "amin"
    )  # the lower the number, the higher the score
    every = found.ordered(found.valid.flatten().nonzero()[:, 0])
    plain = found.selection(every)
    return Candidates(plain.frame, plain.scores, plain.labels, plain.where, row[best[every]])


@dataclass(frozen=True)
class Ranked:
    """The best candidates of every frame and task (G = B tasks), by falling score, before NMS."""

    scores: Tensor  # (G, k)
    labels: Tensor  # (G k,)
    valid: Tensor  # (G, k) above the threshold
    where: Where  # G k of them
    boxes: Tensor  # (G, k, D)
    beyond: Tensor  # () how many more are above the threshold, in all groups

    def reported(self, stays: Tensor, most: int) -> Tensor:
        """Numbers of those that are reported of what NMS left (G, k), in the order of the report."""
        return self.ordered((stays & (stays.cumsum(1) <= most)).flatten().nonzero()[:, 0])

    def ordered(self, index: Tensor) -> Tensor:
        """Frame by frame, by falling score."""
        index = index[self.scores.flatten()[index].argsort(descending=True, stable=True)]
        return index[self.where.frame[index].argsort(stable=True)]

    def selection(self, index: Tensor) -> Selection:
        where = self.where[index]
        return Selection(where.frame, self.scores.flatten()[index], self.labels[index], where)


def ranked(tasks: Sequence[TaskMaps], config: Config, most: int | None = None) -> Ranked:
    """The best ``most`` candidates of every frame and task; as many as there are above the threshold in the fullest task unless given.

    >>> config = Config.small()
    >>> maps = [{name: torch.zeros(1, n, 16, 16) for name, n in config.branches.items()} for _ in config.tasks]
    >>> for task, names in zip(maps, config.tasks):
    ...     task["heatmap"] = torch.full((1, len(names), 16, 16), -9.0)
    >>> ranked(maps, config).scores.shape, ranked(maps, config, most=5).scores.shape
    (torch.Size([6, 0]), torch.Size([6, 5]))
    """
    found = [_candidates(maps, config) for maps in tasks]
    scores, classes, cells = (
        torch.stack(parts, 1) for parts in zip(*found)
    )  # (B, tasks, K) each, by falling score
    valid = scores > config.reporting.threshold
    most = int(valid.sum(2).amax()) if most is None else most
    beyond = valid[:, :, most:].sum()
    scores, classes, cells, valid = (
        t[:, :, :most].flatten(0, 1) for t in (scores, classes, cells, valid)
    )  # (B tasks, k)
    group = torch.arange(len(scores), device=scores.device).unsqueeze(1).expand_as(scores)
    columns = tasks[0]["reg"].shape[3]
    where = Where(
        *(
            t.flatten()
            for t in (group // len(tasks), group % len(tasks), cells // columns, cells % columns)
        )
    )
    boxes = boxes_of(
        values_at(tasks, where, list(config.branches)), where.row, where.column, config
    )
    first = torch.tensor([config.first_class(i) for i in range(len(tasks))], device=scores.device)
    return Ranked(
        scores,
        first[where.task] + classes.flatten(),
        valid,
        where,
        boxes.unflatten(0, scores.shape),
        beyond,
    )


def _candidates(maps: TaskMaps, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, classes and cells (B, K) of the best candidates of a task; those off the range have a score of 0."""
    rules = config.reporting
    heat = maps["heatmap"].sigmoid()
    rows, columns = heat.shape[2:]
    scores = (heat * _in_range(maps, config)).flatten(2)  # (B, classes, cells)
    labels = torch.arange(scores.shape[1], device=heat.device).reshape(1, -1, 1).expand_as(scores)
    if not rules.per_class:
        scores, labels = scores.max(1, keepdim=True)
    scores, index = scores.flatten(1).topk(min(rules.candidates, scores[0].numel()))
    missing = (
        rules.candidates - scores.shape[1]
    )  # on a small map one task may have fewer than another
    labels, cells = labels.flatten(1).gather(1, index), index % (rows * columns)
    pad = [torch.nn.functional.pad(t, (0, missing)) for t in (scores, labels, cells)]
    return pad[0], pad[1], pad[2]


def _in_range(maps: TaskMaps, config: Config) -> Tensor:
    """Whether the centre that each cell predicts is in the range of reported boxes (B, 1, h, w)."""
    low, high = config.reporting.centre_range[:3], config.reporting.centre_range[3:]
    x, y = maps["reg"].unbind(1)
    x = (x + torch.arange(x.shape[2], device=x.device)) * config.cell[0] + config.point_range[0]
    y = (y + torch.arange(y.shape[1], device=y.device).unsqueeze(1)) * config.cell[
        1
    ] + config.point_range[1]
    inside = [(lo <= v) & (v <= hi) for v, lo, hi in zip((x, y, maps["height"][:, 0]), low, high)]
    return (inside[0] & inside[1] & inside[2]).unsqueeze(1)


def _rivals(found: Ranked, config: Config) -> Pairs:
    """Which candidate would suppress which, as numbers among all G k."""
    rules, boxes = config.reporting, found.boxes
    if rules.nms == "circle":
        bound = boxes.new_tensor(rules.radii).repeat(len(boxes) // len(config.tasks))
        return circle_rivals(boxes[:, :, :2], found.valid, bound)
    return rotated_rivals(boxes[:, :, [0, 1, 3, 4, 6]], found.valid, rules.overlap)
