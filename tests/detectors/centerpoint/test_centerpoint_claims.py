"""Counts that a CenterPoint file states, and candidates in bounded memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from boxcov import BoxcovError
from boxcov.detectors import centerpoint, nms
from boxcov.detectors.centerpoint.config import Config
from helpers.centerpoint_cases import detector_of, pillar_config

MANY = 100_000


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any], Any]:
    path = tmp_path_factory.mktemp("net") / "net.safetensors"
    centerpoint.save(detector_of(pillar_config()), path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return path, tensors, json.loads(file.metadata()["boxcov.centerpoint"])


@pytest.mark.parametrize(
    ("part", "entries", "message"),
    [
        ("", {"tasks": [["a"]] * MANY}, "tensors for"),
        ("", {"tasks": [["a"] * 30_000]}, "another shape"),
        ("", {"tasks": [[3]]}, r"tasks\[0\]\[0\] is 3"),
        ("", {"tasks": "car"}, "config.tasks is 'car'"),
        ("", {"speed": 1}, "config has an unknown entry 'speed'"),
        ("", {"voxel_size": [1e-6, 1e-6, 8.0]}, "number of cells along x must be 1 to 8192"),
        ("", {"voxel_size": [-0.2, 0.2, 8.0]}, "number of cells along x must be"),
        ("", {"voxel_size": [0.0, 0.2, 8.0]}, "no voxel_size .* may be 0"),
        ("encoder", {"widths": [8] * MANY}, "number of encoder layers must be 1 to 256"),
        ("encoder", {"widths": [-8]}, "smallest width or stride must be 1"),
        ("encoder", {"widths": [2**62]}, "another shape|overflowed"),
        (
            "dense",
            dict.fromkeys(["widths", "layers", "strides", "up_widths", "up_strides"], [1] * MANY),
            "number of blocks must be 1 to 256",
        ),
        ("dense", {"layers": [10**12, 1, 1]}, "number of layers must be 0 to 256"),
        ("dense", {"layers": [10**12, -(10**12), 1]}, "smallest number of layers must be 0"),
        ("dense", {"layers": [1.5, 1, 1]}, r"layers\[0\] is 1.5"),
        ("reporting", {"candidates": 10**12}, "number of candidates must be 1 to 4096"),
        ("reporting", {"max_boxes": 10**12}, "number of boxes must be 1 to 4096"),
        ("reporting", {"nms": []}, "reporting.nms is"),
        ("reporting", {"threshold": "0.1"}, "reporting.threshold is '0.1'"),
    ],
)
def test_counts_are_compared_with_the_tensors(stored, part, entries, message) -> None:
    path, tensors, about = stored
    claims = {**about, **entries} if not part else {**about, part: {**about[part], **entries}}
    save_file(tensors, path, {"boxcov.centerpoint": json.dumps(claims)})
    with pytest.raises(BoxcovError, match=rf"net\.safetensors: .*({message})"):
        centerpoint.load(path)


def test_a_config_of_every_kind_is_read_again() -> None:
    for config in (Config.small(), Config.voxel(), Config.pillar("det3d"), Config.kitti()):
        assert Config.from_json(config.to_json()) == config


def decided(pairs: nms.Pairs, valid: torch.Tensor, most: int) -> list[list[int]]:
    """Which boxes greedy NMS reports, and which of them removed each other one."""
    kept = nms.greedy_nms(*pairs, valid)
    reported = (kept & (kept.cumsum(1) <= most)).flatten().nonzero()[:, 0]
    return [reported.tolist(), nms.removed_by(pairs, reported, valid.numel()).tolist()]


@pytest.mark.parametrize("most", [1, 4, 40])
@pytest.mark.parametrize("limit", [1, 7, 200, 1000])
def test_nms_in_chunks_decides_the_same(monkeypatch, limit, most) -> None:
    torch.manual_seed(0)
    boxes = torch.rand(3, 40, 5) * torch.tensor([20.0, 20, 3, 5, 6])
    boxes[1, :, :2] /= 10  # crowded
    valid = torch.rand(3, 40) > 0.2
    bound, centres = torch.tensor([1.0, 4.0, 9.0]), boxes[..., :2]
    whole = [nms.rotated_pairs(boxes, valid, 0.1), nms.circle_pairs(centres, valid, bound)]
    monkeypatch.setattr(nms, "_PAIRS", limit)
    monkeypatch.setattr(nms, "_DISTANCES", 16 * limit)
    found = [
        nms.rotated_pairs(boxes, valid, 0.1, most),
        nms.circle_pairs(centres, valid, bound, most),
    ]
    for one, other in zip(whole, found):
        assert decided(one, valid, most) == decided(other, valid, most)
        assert len(one[0]) > 10
    empty = nms.rotated_pairs(boxes[:, :0], valid[:, :0], 0.1)
    assert [len(side) for side in empty] == [0, 0]


def test_nms_of_boxes_at_one_place_is_not_quadratic(monkeypatch) -> None:
    """A long chain of suppressions that ends in a heap: neither pairs nor rounds multiply."""
    K, compared = 2048, []
    boxes = torch.tensor([0.0, 0.0, 2.0, 4.0, 0.0]).repeat(2, K, 1)
    boxes[0, : K // 2, 0] = 1.5 * torch.arange(K // 2)  # each suppresses the next
    boxes[0, K // 2 :, 0] = 1.5 * (K // 2)
    plain = nms.rotated_iou
    monkeypatch.setattr(nms, "rotated_iou", lambda a, b: compared.append(len(a)) or plain(a, b))
    valid = torch.ones(2, K, dtype=torch.bool)
    pairs = nms.rotated_pairs(boxes, valid, 0.2)
    assert nms.greedy_nms(*pairs, valid).sum(1).tolist() == [K // 4 + 1, 1]
    assert max(compared) <= 1 << 18
    assert sum(compared) < K * K / 2  # of the K (K - 1) pairs in two groups
    assert len(pairs[0]) < 4 * K


def test_nms_stops_after_the_boxes_that_are_reported(monkeypatch) -> None:
    """Long thin boxes in all directions: all are near each other, and none overlaps much."""
    torch.manual_seed(0)
    boxes = torch.rand(1, 2000, 5) * torch.tensor([5.0, 5, 0, 0, 3]) + torch.tensor(
        [0, 0, 0.01, 10, 0]
    )
    plain, compared = nms.rotated_iou, []
    monkeypatch.setattr(nms, "rotated_iou", lambda a, b: compared.append(len(a)) or plain(a, b))
    nms.rotated_pairs(boxes, torch.ones(1, 2000, dtype=torch.bool), 0.2, most=83)
    assert sum(compared) <= 1 << 18


def test_a_list_that_holds_itself_many_times_is_no_setting(tmp_path) -> None:
    """Its text or a copy of it would fill any memory, also in a message."""
    from boxcov.detectors.centerpoint.config_file import read_settings

    lines = ["x0 = [1]", *(f"x{i + 1} = [x{i}, x{i}]" for i in range(60)), "y = [1, [2, 3]]"]
    (tmp_path / "net.py").write_text("\n".join([*lines, "_base_ = [x60]"]))
    settings = read_settings(tmp_path / "net.py")
    assert settings.at("y") == [1, [2, 3]]
    with pytest.raises(BoxcovError, match="a setting of more than 10000 values"):
        settings.get("x60")
    lines = ["x0: &x0 [1]", *(f"x{i + 1}: &x{i + 1} [*x{i}, *x{i}]" for i in range(60))]
    (tmp_path / "net.yaml").write_text("\n".join([*lines, "y: {z: [{NAME: *x60}]}"]))
    settings = read_settings(tmp_path / "net.yaml")
    assert len(settings.at("y.z")) == 1
    with pytest.raises(BoxcovError, match="a setting of more than 10000 values"):
        settings.get("y.z")


@pytest.mark.parametrize("suffix", [".py", ".yaml"])
def test_a_large_configuration_is_refused(tmp_path, suffix) -> None:
    """Parsing takes 250 times the bytes in memory."""
    from boxcov.detectors.centerpoint.config_file import read_settings

    path = tmp_path / f"net{suffix}"
    path.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(BoxcovError, match="1048577 bytes, at most 1048576 are read"):
        read_settings(path)


def test_base_files_that_multiply_are_refused(tmp_path) -> None:
    """Nine files, each the base of the one before a hundred times over, would be 10^16 readings."""
    from boxcov.detectors.centerpoint.config_file import read_settings

    for i in range(2):
        (tmp_path / f"{i}.py").write_text(f"_base_ = {[f'{i + 1}.py'] * 50}\nx = {i}\n")
    (tmp_path / "2.py").write_text("y = 1\n")
    assert read_settings(tmp_path / "1.py").get("y") == 1
    with pytest.raises(BoxcovError, match="more than 100 base files"):
        read_settings(tmp_path / "0.py")
