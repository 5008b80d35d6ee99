"""Boxes of a checkpoint that is read rightly look right, and those of a wrong reading do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import boxcov
from boxcov.checks import Finding
from boxcov.checks.plausibility import label_convention, observe
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint import CenterPoint, Config
from boxcov.pipeline import bench, detectors
from boxcov.pipeline.frame_files import Entry, FrameReader, look_at_first
from boxcov.pipeline.options import BenchCommand
from helpers.centerpoint_files import exported, saved


@pytest.fixture(scope="module")
def frames():
    both = simulated.frames("clear", seed=1000, count=2)
    return [both[0], both[1]]


@pytest.fixture(scope="module")
def legacy_weights(tmp_path_factory):
    state = exported(centerpoint.load("small"), "mmdet3d", legacy=True)
    meta = {"mmdet3d_version": "0.16.0"}  # of either generation
    return saved({"state_dict": state, "meta": meta}, tmp_path_factory.mktemp("weights"))


def looks(detector, frames):
    return {look.name.partition(": ")[2]: look.passed for look in observe(detector, frames)}


def test_the_right_reading_looks_right(legacy_weights, frames):
    detector = centerpoint.load(legacy_weights, Config.small(), legacy=True)
    before = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
    assert set(looks(detector, frames[:1]).values()) == {True}
    after = detector.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not detector.training
    assert all(p.requires_grad for p in detector.parameters())


def test_the_other_generation_is_seen_by_its_boxes(legacy_weights, frames):
    detector = centerpoint.load(legacy_weights, Config.small(), legacy=False)
    seen = looks(detector, frames[:1])
    assert (seen["orientation"], seen["sizes"], seen["grid"]) == (False, False, True)


@pytest.mark.parametrize("ratio", [0.75, 4 / 3])
def test_another_grid_is_seen_by_its_loss(ratio, legacy_weights, frames):
    small, scales = Config.small(), (ratio, ratio, 1.0)
    config = replace(
        small,
        voxel_size=tuple(s * r for s, r in zip(small.voxel_size, scales)),
        point_range=tuple(s * r for s, r in zip(small.point_range, scales * 2)),
    )
    grid = observe(centerpoint.load(legacy_weights, config, legacy=True), frames)[-1]
    assert (grid.name, grid.passed) == ("boxes: grid", False)
    assert "fit cells of 0.4 m better" in grid.todo


def test_another_order_of_classes_is_seen(legacy_weights, frames):
    detector = centerpoint.load(legacy_weights, Config.small(), legacy=True)
    with torch.no_grad():  # as for a file whose last task is (traffic_cone, pedestrian)
        for parameter in detector.head.tasks[5]["heatmap"][3].parameters():
            parameter.copy_(parameter.clone().flip(0))
    look = {look.name: look for look in observe(detector, frames)}["boxes: classes"]
    assert look.passed is False
    assert "pedestrian are reported as traffic_cone" in look.todo


def test_random_weights_give_dead_scores(frames):
    seen = looks(CenterPoint(Config.small()).eval(), frames[:1])
    assert (seen["scores"], seen["on points"]) == (False, False)


def test_too_few_boxes_give_no_verdict():
    seen = looks(centerpoint.load("small"), [([torch.zeros(0, 5)], None)])
    assert [name for name, passed in seen.items() if passed is not None] == ["scores"]


def test_foreign_checkpoints_are_looked_at_once(legacy_weights, frames, monkeypatch):
    wrong = Finding("boxes: sizes", False, "3% of the boxes", "give --config")
    monkeypatch.setattr(detectors, "observe", lambda *given: [wrong])
    detectors.warn_if_implausible(centerpoint.load("small"), frames)  # boxcov's own file
    foreign = centerpoint.load(legacy_weights, Config.small(), legacy=True)
    with pytest.warns(boxcov.BoxcovWarning, match=r"not look right: .* 3% .*\(give --config\)"):
        detectors.warn_if_implausible(foreign, frames)


def test_files_are_looked_at_before_the_first_frame(legacy_weights, frames, tmp_path):
    paths = [tmp_path / name for name in ("a.bin", "b.bin", "c.bin")]
    paths[0].write_bytes(b"123")
    for path, (inputs, _) in zip(paths[1:], frames):
        inputs[0].numpy().astype("<f4").tofile(path)
    wrong, right = (
        centerpoint.load(legacy_weights, Config.small(), legacy=legacy) for legacy in (False, True)
    )
    entries = [list(FrameReader(net, "plain").entries(tmp_path)) for net in (wrong, right)]
    seen = look_at_first(wrong, entries[0])
    assert next(seen).name == str(paths[0])  # its own line names what is wrong with it
    with pytest.warns(boxcov.BoxcovWarning, match="not look right: .*orientation"):
        assert next(seen).name == str(paths[1])
    assert [entry.name for entry in seen] == [str(paths[2])]
    assert list(look_at_first(right, entries[1])) == entries[1]


def test_files_of_an_own_network_are_read_once():
    def read():
        raise AssertionError("read twice")

    detector, entries = centerpoint.load("small"), [Entry("x.bin", read)]
    assert list(look_at_first(detector, entries)) == entries


def test_bench_looks_at_its_frames(legacy_weights, monkeypatch):
    wrong = centerpoint.load(legacy_weights, Config.small(), legacy=False)
    monkeypatch.setattr(bench, "load_detector", lambda options, device: wrong)
    monkeypatch.setattr(bench, "fit", lambda *given, **options: 1 / 0)
    command = BenchCommand(detector="centerpoint:x", data="simulated:clear", count=1)
    with (
        pytest.warns(boxcov.BoxcovWarning, match="not look right"),
        pytest.raises(ZeroDivisionError),
    ):
        bench.run(command)


def test_labels_of_another_convention_are_found(frames):
    detector = centerpoint.load("small").train()
    assert label_convention(detector, frames).passed is True
    lower = [(inputs, [{**target[0], "boxes": bottom(target[0])}]) for inputs, target in frames]
    found = label_convention(detector, lower)
    assert (found.name, found.passed) == ("labels: convention", False)
    assert "z is at the bottom of objects (" in found.seen
    assert found.todo == "give z at half height"
    assert detector.training


def bottom(target):
    return target["boxes"] - target["boxes"][:, 5:6] / 2 * (torch.arange(9) == 2)


def test_two_objects_are_too_few_to_compare(frames):
    inputs, (target,) = frames[0]
    few = {name: value[:2] for name, value in target.items()}
    found = label_convention(centerpoint.load("small"), [(inputs, [few])])
    assert found.passed is None
    assert found.seen.startswith("too few pairs to tell: ")


def test_boxes_far_from_their_labels_tell_nothing(frames):
    draw = torch.Generator().manual_seed(0)
    noise = torch.tensor([1.0, 1, 0, 0, 0, 0, 9, 0, 0])
    moved = []
    for inputs, (target,) in frames:
        error = torch.randn(target["boxes"].shape, generator=draw) * noise
        moved.append((inputs, [{**target, "boxes": target["boxes"] + error}]))
    found = label_convention(centerpoint.load("small"), moved)
    assert found.passed is None
    assert "too little to tell: " in found.seen


def test_labels_that_are_no_boxes_are_not_compared(frames):
    found = label_convention(centerpoint.load("small"), [(frames[0][0], None)])
    assert found.passed is None
    assert "no list of one dict per frame" in found.seen


def test_no_more_frames_are_read_than_needed(frames):
    class Endless:
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            assert index < 4
            return frames[index % 2]

    assert label_convention(centerpoint.load("small"), Endless()).passed is True
