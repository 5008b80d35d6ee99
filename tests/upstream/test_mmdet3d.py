"""boxcov's CenterPoint beside the code of mmdetection3d 1.4, from its wheel on PyPI.

``make test-upstream`` installs it. mmcv-lite lacks mmcv's compiled operators, so these do not run
here: hard voxelisation, sparse convolutions, rotated NMS, deformable convolutions. Pillars are
filled by a plain loop instead, and rotated NMS is replaced by polygons of shapely inside
mmdetection3d's own selection. Everything else is upstream's: configurations, pillar encoder,
scatter, SECOND, SECONDFPN, head, box coder, circle NMS, targets and loss.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from shapely.geometry import Polygon
from torch import Tensor, nn

from boxcov import BoxcovError
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint import CenterPoint, Config
from boxcov.detectors.centerpoint.upstream_config import named_config
from boxcov.outlines import corners
from helpers.centerpoint_cases import task_targets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "mmdet3d" not in sys.modules and not __import__("importlib.util").util.find_spec("mmdet3d"),
        reason="mmdet3d is not installed: make test-upstream",
    ),
]
PARTS = ("pts_voxel_encoder", "pts_backbone", "pts_neck", "pts_bbox_head")
FILE = "centerpoint_{}_second_secfpn_{}8xb4-cyclic-20e_nus-3d.py"
PILLARS, CIRCLE = FILE.format("pillar02", ""), FILE.format("pillar02", "head-circlenms_")


class MissingOperators(ModuleType):
    """Stands for the compiled part of mmcv: everything can be imported, nothing called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def operator(*given: Any, **named: Any) -> None:
            raise NotImplementedError(f"mmcv-lite has no compiled {name}")

        return operator


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder of upstream's configurations, with its models registered."""
    sys.modules.setdefault("mmcv._ext", MissingOperators("mmcv._ext"))
    import mmdet3d.models
    from mmengine.registry import DefaultScope

    DefaultScope.get_instance("upstream", scope_name="mmdet3d")
    return Path(mmdet3d.__file__).parent / ".mim/configs/centerpoint"


class Upstream:
    """mmdetection3d's network of one configuration, with random weights."""

    def __init__(self, file: Path, dtype: torch.dtype = torch.float64) -> None:
        from mmdet3d.registry import MODELS
        from mmengine import Config as Settings

        self.settings = Settings.fromfile(file)
        model = self.settings.model
        torch.manual_seed(0)
        head = {
            **model.pts_bbox_head,
            "train_cfg": model.train_cfg.pts,
            "test_cfg": model.test_cfg.pts,
        }
        parts = {name: head if name == PARTS[-1] else model[name] for name in PARTS}
        self.net = nn.ModuleDict({name: MODELS.build(part) for name, part in parts.items()})
        self.middle = MODELS.build(model.pts_middle_encoder)
        if list(self.middle.parameters()):
            self.net["pts_middle_encoder"] = self.middle
        randomize(self.net)
        self.net.to(dtype).eval()

    @property
    def head(self) -> Any:
        return self.net["pts_bbox_head"]

    def save(self, path: Path) -> Path:
        """Write a checkpoint as mmengine's runner does, with the configuration in its meta data."""
        meta = {
            "mmengine_version": "0.10.7",
            "cfg": self.settings.pretty_text,
            "time": "20240108_120000",
        }
        torch.save({"meta": meta, "state_dict": self.net.state_dict(), "message_hub": {}}, path)
        return path

    def maps(self, bev: Tensor) -> list[list[dict[str, Tensor]]]:
        """The head's maps of a map of the encoder."""
        return self.head(self.net["pts_neck"](self.net["pts_backbone"](bev)))


def randomize(net: nn.Module) -> None:
    """Give norms statistics and heat maps enough high scores."""
    for name, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.8, 1.2)
            nn.init.normal_(module.bias, std=0.2)
        if name.endswith("heatmap.1"):
            nn.init.normal_(module.weight, std=0.1)
            nn.init.constant_(module.bias, -3.0)


def cloud(config: Config, count: int = 6000) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    low, high = (torch.tensor(side) for side in (config.point_range[:3], config.point_range[3:]))
    xyz = low + (high - low) * torch.rand(count, 3, generator=generator)
    xyz[: count // 2] = xyz[: count // 2] * 0.05  # crowded pillars
    rest = torch.rand(count, 2, generator=generator) * torch.tensor([255.0, 0.5])
    return torch.cat([xyz, rest], 1).double()


def fill_pillars(points: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Points (P, 20, 5), their numbers (P,) and places (P, 4) frame z y x, in order of arrival."""
    low, size = torch.tensor(config.point_range[:3]), torch.tensor(config.voxel_size)
    cells = ((points[:, :3].float() - low) / size).floor().long()
    pillars: dict[tuple[int, ...], list[Tensor]] = {}
    for point, cell in zip(points, cells.tolist()):
        if all(0 <= c < n for c, n in zip(cell, config.grid)):
            held = pillars.setdefault(tuple(cell), [])
            if len(held) < 20:
                held.append(point)
    filled = points.new_zeros(len(pillars), 20, 5)
    for row, held in zip(filled, pillars.values()):
        row[: len(held)] = torch.stack(held)
    places = torch.tensor([(0, z, y, x) for x, y, z in pillars])
    return filled, torch.tensor([len(held) for held in pillars.values()]), places


@pytest.fixture(scope="module")
def pillars(folder: Path) -> Upstream:
    return Upstream(folder / PILLARS)


@pytest.fixture(scope="module")
def loaded(pillars: Upstream, tmp_path_factory: pytest.TempPathFactory) -> CenterPoint:
    """boxcov's network of the checkpoint: grid and generation come from its meta data."""
    path = pillars.save(tmp_path_factory.mktemp("mm") / "epoch_20.pth")
    detector = centerpoint.load(path).double()
    assert detector.config == named_config("pillar02", "mmdet3d")
    return detector


@pytest.fixture(scope="module")
def frame(pillars: Upstream, loaded: CenterPoint) -> tuple[Tensor, list, dict]:
    """The encoder's map and the head's maps of upstream, and boxcov's map and raw outputs."""
    points = cloud(loaded.config)
    filled, numbers, places = fill_pillars(points, loaded.config)
    with torch.no_grad():
        features = pillars.net["pts_voxel_encoder"](filled, numbers, places)
        bev = pillars.middle(features, places, 1)
        own = {"bev": loaded.encoder([points]), **loaded([points])}
        return bev, pillars.maps(bev), own


def copied(maps: list[list[dict[str, Tensor]]]) -> list[list[dict[str, Tensor]]]:
    """A copy of the head's maps: upstream's loss and selection change them in place."""
    return [[{name: value.clone() for name, value in task[0].items()}] for task in maps]


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def own_boxes(boxes: Tensor) -> Tensor:
    """Upstream's boxes, bottom centre and l w h, in boxcov's convention."""
    x, y, z, l, w, h, *rest = boxes.unbind(1)
    return torch.stack([x, y, z + h / 2, w, l, h, *rest], 1)


def test_the_network_agrees_to_rounding(frame: tuple) -> None:
    bev, maps, raw = frame
    assert difference(raw["bev"], bev) < 1e-6  # upstream computes the pillars' centres in float32
    for task, own in zip(maps, raw["tasks"]):
        for name, value in own.items():
            assert difference(value, task[0][name]) < 1e-6


def test_boxes_before_nms_agree(pillars: Upstream, loaded: CenterPoint, frame: tuple) -> None:
    _, maps, _ = frame
    tasks = [task[0] for task in maps]
    own = loaded.candidates({"tasks": tasks})
    boxes, counts = loaded.decode({"tasks": tasks}, own), []
    for number, task in enumerate(tasks):
        found = pillars.head.bbox_coder.decode(
            task["heatmap"].sigmoid(),
            task["rot"][:, :1],
            task["rot"][:, 1:],
            task["height"],
            task["dim"].exp(),
            task["vel"],
            reg=task["reg"],
            task_id=number,
        )[0]
        rows = own.where.task == number
        counts.append(int(rows.sum()))
        assert len(found["scores"]) == counts[-1]
        centred = found["bboxes"].clone()
        centred[:, 2] -= centred[:, 5] / 2  # the coder returns centres of gravity
        torch.testing.assert_close(own.scores[rows], found["scores"])
        torch.testing.assert_close(boxes[rows], own_boxes(centred).to(boxes))
    assert max(counts) == 500  # the limit of the box coder


def rotated_nms(boxes: Tensor, scores: Tensor, thresh: float, **limits: int) -> Tensor:
    """``nms_bev`` of upstream by polygons: boxes are x1 y1 x2 y2 yaw around their centres."""
    order = scores.argsort(descending=True)[: limits["pre_max_size"]]
    shapes = []
    for x1, y1, x2, y2, yaw in boxes[order].tolist():
        l, w, turn = (
            x2 - x1,
            y2 - y1,
            np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]]),
        )
        square = np.array([[l, w], [-l, w], [-l, -w], [l, -w]]) / 2
        shapes.append(Polygon(square @ turn.T + [(x1 + x2) / 2, (y1 + y2) / 2]))
    kept: list[int] = []
    for i, shape in enumerate(shapes):
        overlaps = (shape.intersection(shapes[j]).area / shape.union(shapes[j]).area for j in kept)
        if all(iou <= thresh for iou in overlaps):
            kept.append(i)
    return order[kept][: limits["post_max_size"]]


@pytest.mark.parametrize("kind", ["circle", "rotate"])
def test_reported_boxes_agree(
    kind: str, folder: Path, frame: tuple, loaded: CenterPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmdet3d.models.dense_heads import centerpoint_head
    from mmdet3d.structures import LiDARInstance3DBoxes

    monkeypatch.setattr(centerpoint_head, "nms_bev", rotated_nms)
    upstream = Upstream(folder / (CIRCLE if kind == "circle" else PILLARS))
    assert upstream.head.test_cfg["nms_type"] == kind
    meta = [{"box_type_3d": LiDARInstance3DBoxes}]
    tasks = copied(frame[1])
    found = upstream.head.predict_by_feat(tasks, meta)[0]
    config = named_config("pillar02-circlenms" if kind == "circle" else "pillar02", "mmdet3d")
    twin = CenterPoint(config).double().eval()
    raw = {"tasks": [task[0] for task in frame[1]]}
    selection = twin.select(raw)
    assert len(selection) == len(found.scores_3d) > 50
    order, theirs = selection.scores.argsort(), found.scores_3d.argsort()  # no two are equal
    torch.testing.assert_close(selection.scores[order], found.scores_3d[theirs])
    assert selection.labels[order].tolist() == found.labels_3d[theirs].tolist()
    boxes = own_boxes(found.bboxes_3d.tensor).to(selection.scores)
    torch.testing.assert_close(twin.decode(raw, selection)[order], boxes[theirs])


@pytest.fixture(scope="module")
def objects(loaded: CenterPoint) -> dict[str, Tensor]:
    """Objects of all classes, some outside the range and just outside the border."""
    generator = torch.Generator().manual_seed(2)
    n = 120
    boxes = torch.randn(n, 9, generator=generator, dtype=torch.float64)
    boxes[:, :2] *= 30
    boxes[:4, 0] = torch.tensor([-51.5, -51.9, 51.19, 51.3])
    boxes[:, 3:6] = 0.4 + 5 * torch.rand(n, 3, generator=generator)
    boxes[:, 7:] *= 3
    return {"boxes": boxes, "labels": torch.arange(n) % 10}


def instances(objects: dict[str, Tensor]) -> Any:
    """Objects as upstream's loss gets them: its pipeline drops those with a centre out of range."""
    from mmdet3d.structures import LiDARInstance3DBoxes
    from mmengine.structures import InstanceData

    x, y, z, w, l, h, *rest = objects["boxes"].unbind(1)
    boxes = torch.stack([x, y, z - h / 2, l, w, h, *rest], 1)
    inside = LiDARInstance3DBoxes(boxes, box_dim=9).in_range_bev([-51.2, -51.2, 51.2, 51.2])
    held = LiDARInstance3DBoxes(boxes[inside], box_dim=9)
    return InstanceData(bboxes_3d=held, labels_3d=objects["labels"][inside])


def test_targets_agree(pillars: Upstream, loaded: CenterPoint, objects: dict) -> None:
    heat, values, cells, masks = pillars.head.get_targets([instances(objects)])
    own = loaded.encode([objects], heat[0])
    for task, target in enumerate(task_targets(own)):
        torch.testing.assert_close(target.heat, heat[task].to(target.heat), atol=1e-6, rtol=1e-6)
        used = masks[task][0].bool()
        place = target.row * heat[task].shape[3] + target.column
        order, theirs = place.argsort(stable=True), cells[task][0][used].argsort(stable=True)
        assert place[order].tolist() == cells[task][0][used][theirs].tolist()
        expected = values[task][0][used][theirs].to(target.values)
        torch.testing.assert_close(target.values[order], expected, atol=1e-5, rtol=1e-5)


def test_the_loss_agrees(
    pillars: Upstream, loaded: CenterPoint, objects: dict, frame: tuple
) -> None:
    tasks = copied(frame[1])
    losses = pillars.head.loss_by_feat(tasks, [instances(objects)])
    own = loaded.loss({"tasks": [task[0] for task in frame[1]]}, [objects])
    assert float(own) == pytest.approx(float(sum(losses.values())), rel=1e-5)


@pytest.mark.parametrize("size", ["voxel01", "voxel0075"])
def test_voxel_networks_load_and_their_dense_part_agrees(
    size: str, folder: Path, tmp_path: Path
) -> None:
    upstream = Upstream(folder / FILE.format(size, ""), torch.float32)
    detector = centerpoint.load(upstream.save(tmp_path / "epoch_20.pth"))
    assert detector.config == named_config(size, "mmdet3d")
    bev = torch.randn(1, 256, 32, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        own = detector.head(detector.neck(detector.backbone(bev)))
        for task, maps in zip(upstream.maps(bev), own):
            for name, value in maps.items():
                assert difference(value, task[0][name]) < 1e-4


def test_every_published_configuration_is_read_or_refused(folder: Path) -> None:
    from mmengine import Config as Settings

    from boxcov.detectors.centerpoint.config_file import read_settings
    from boxcov.detectors.centerpoint.upstream_config import config_of

    files = sorted(folder.glob("*.py"))
    assert len(files) > 10
    for file in files:
        if "dcn" in file.name:
            with pytest.raises(BoxcovError, match="deformable"):
                config_of(read_settings(file), "mmdet3d")
            continue
        config, model = config_of(read_settings(file), "mmdet3d"), Settings.fromfile(file).model
        coder, test = model.pts_bbox_head.bbox_coder, model.test_cfg.pts
        layer = model.data_preprocessor.voxel_layer
        assert list(config.voxel_size) == list(layer.voxel_size)
        assert list(config.point_range) == list(layer.point_cloud_range)
        assert config.encoder.max_cells == tuple(layer.max_voxels)
        assert config.stride == coder.out_size_factor
        assert config.reporting.nms == {"circle": "circle", "rotate": "rotated"}[test.nms_type]
        assert config.reporting.threshold == max(coder.score_threshold, test.score_threshold)


def test_corners_follow_the_same_conventions(objects: dict) -> None:
    held = instances(objects).bboxes_3d
    own = corners(own_boxes(held.tensor)[:, [0, 1, 3, 4, 6]].double().numpy())[:, :4]
    theirs = held.corners[:, [0, 3, 4, 7], :2].double().numpy()  # bottom corners
    gaps = np.linalg.norm(own[:, :, None] - theirs[:, None], axis=3)  # (n, 4, 4)
    assert gaps.min(1).max() < 1e-4
    assert gaps.min(2).max() < 1e-4
