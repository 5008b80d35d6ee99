from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Candidates, Detections, Selection
from boxcov.concatenation import concatenate, join_frames
from boxcov.evaluate.ground_truth import GroundTruth


def some(m: int = 4, D: int = 3, seed: int = 0) -> Detections:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(m, D, D, generator=generator)
    return Detections(
        boxes=torch.randn(m, D, generator=generator),
        scores=torch.rand(m, generator=generator),
        labels=torch.arange(m) % 2,
        frame=torch.arange(m) // 3,
        fields=("x", "y", "yaw")[:D],
        classes=("car", "bus"),
        covariance=A @ A.transpose(1, 2),
        predictive=2 * A @ A.transpose(1, 2),
        meta={"method": "exact", "samples": None},
    )


@pytest.mark.parametrize(
    "rows",
    [
        1,
        -1,
        slice(1, 3),
        torch.tensor([True, False, True, False]),
        torch.tensor([3, 0]),
        [2, 1],
        np.array([0, 3]),
    ],
    ids=str,
)
def test_indexing_applies_to_every_array(rows) -> None:
    found = some()
    part = found[rows]
    index = torch.arange(4)[rows if not isinstance(rows, int) else [rows]]
    assert len(part) == len(index)
    for name in (
        "boxes",
        "scores",
        "labels",
        "frame",
        "covariance",
        "predictive",
        "uncertainty",
    ):
        assert torch.equal(getattr(part, name), getattr(found, name)[index])
    assert part.meta == found.meta


def test_rows_past_the_end_are_refused() -> None:
    with pytest.raises(IndexError):
        some()[4]
    assert len(list(some())) == 4


def test_named_fields() -> None:
    found = some()
    assert torch.equal(found.field("y"), found.boxes[:, 1])
    assert torch.allclose(found.std("yaw") ** 2, found.covariance[:, 2, 2])
    assert torch.allclose(found.uncertainty, found.covariance.diagonal(dim1=1, dim2=2).sum(1))
    with pytest.raises(BoxcovError, match="no field 'z': the boxes have x, y, yaw"):
        found.field("z")


def test_frames() -> None:
    parts = some().frames()
    assert [len(part) for part in parts] == [3, 1]
    assert [len(part) for part in some().frames(4)] == [3, 1, 0, 0]
    assert some(0).frames() == []


def test_shapes_are_checked() -> None:
    found = some()
    with pytest.raises(
        BoxcovError, match=r"covariance has shape \(4, 2, 2\), expected \(4, 3, 3\)"
    ):
        replace(found, covariance=torch.zeros(4, 2, 2))
    with pytest.raises(BoxcovError, match=r"boxes has shape \(4, 2\)"):
        Detections(
            found.boxes[:, :2], found.scores, found.labels, found.frame, found.fields, found.classes
        )
    with pytest.raises(
        BoxcovError, match=r"predictive has shape \(4, 2, 2\), expected \(4, 3, 3\)"
    ):
        replace(found, predictive=torch.zeros(4, 2, 2))


def test_plain_detections_have_no_uncertainty() -> None:
    found = some()
    plain = Detections(
        found.boxes, found.scores, found.labels, found.frame, found.fields, found.classes
    )
    with pytest.raises(BoxcovError, match="have no covariance"):
        _ = plain.uncertainty
    assert "uncertainty" not in plain.numpy()


def test_numpy_and_device() -> None:
    arrays = some().to("cpu").numpy()
    assert set(arrays) == {
        "boxes",
        "scores",
        "labels",
        "frame",
        "covariance",
        "predictive",
        "uncertainty",
    }
    assert all(isinstance(array, np.ndarray) for array in arrays.values())


@pytest.mark.parametrize("m", [0, 1, 500])
def test_save_and_load_round_trip(tmp_path, m: int) -> None:
    found = some(m)
    found.save(tmp_path / "d.safetensors")
    again = Detections.load(tmp_path / "d.safetensors")
    assert again.fields == found.fields
    assert again.classes == found.classes
    assert again.meta == found.meta
    for name in ("boxes", "scores", "labels", "frame", "covariance", "predictive"):
        assert torch.equal(getattr(again, name), getattr(found, name))
    assert b"pickle" not in (tmp_path / "d.safetensors").read_bytes()


def test_tensors_of_other_versions_are_ignored(tmp_path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path, found = tmp_path / "d.safetensors", some()
    found.save(path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file({**load_file(path), "factor": torch.ones(4, 3, 5)}, path, metadata=about)
    assert torch.equal(Detections.load(path).covariance, found.covariance)


@pytest.mark.parametrize("damage", ["missing", "text", "truncated", "foreign", "half"])
def test_damaged_files_are_named(tmp_path, damage: str) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "d.safetensors"
    some().save(path)
    if damage == "missing":
        path.unlink()
    elif damage == "text":
        path.write_text("{}")
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "foreign":
        save_file({"boxes": torch.zeros(1)}, path)
    else:  # the header of one, the arrays of another
        save_file(
            {"boxes": torch.zeros(1, 3)},
            path,
            metadata={"boxcov.detections": '{"fields": ["x"], "classes": [], "meta": {}}'},
        )
    reasons = "no such file|not a file of boxcov detections|a safetensors file of another program"
    with pytest.raises(BoxcovError, match=rf"d\.safetensors: ({reasons})"):
        Detections.load(path)


def test_parts_are_concatenated_in_order() -> None:
    found = some(7)
    parts = [found[:0], found[:3], found[3:3], found[3:]]
    again = concatenate(parts)
    for name in ("boxes", "scores", "labels", "frame", "covariance", "predictive"):
        assert torch.equal(getattr(again, name), getattr(found, name))
    assert again.meta == found.meta


def test_parts_that_differ_are_refused() -> None:
    found = some()
    plain = Detections(
        found.boxes, found.scores, found.labels, found.frame, found.fields, found.classes
    )
    with pytest.raises(
        BoxcovError,
        match=r"part 1 has the tensors \['boxes', 'scores', 'labels', 'frame'\], part 0 \['boxes'",
    ):
        concatenate([found, plain])
    with pytest.raises(BoxcovError, match=r"part 1 has the classes \('other',\)"):
        concatenate([found, replace(found, classes=("other",))])
    with pytest.raises(BoxcovError, match="nothing to concatenate"):
        concatenate([])


def test_frames_are_joined_with_their_numbers() -> None:
    found = some(3)
    one = replace(found, frame=torch.zeros(3, dtype=torch.long))
    joined = join_frames([one, one[:0], one[:1], one[:0]])
    assert (joined.frame.tolist(), joined.meta["frames"]) == ([0, 0, 0, 2], 4)
    assert torch.equal(joined.frames(4)[2].boxes, one[:1].boxes)
    assert len(join_frames(part for part in (one, one))) == 6  # a generator
    named = replace(one, meta={"method": "exact", "names": ["a"], "source": {"seed": 0}})
    assert join_frames([named, named]).meta == {"method": "exact", "frames": 2}
    batch = replace(found, frame=torch.tensor([0, 1, 1]))
    assert join_frames([one, *batch.frames(2)]).frame.tolist() == [0, 0, 0, 1, 2, 2]
    with pytest.raises(BoxcovError, match="part 1: boxes of several frames"):
        join_frames([one, batch])


def test_repr_shows_no_tiny_numbers() -> None:
    zero = torch.zeros(1, dtype=torch.long)
    boxes = torch.tensor([[-6.5e-8, 1.23456]])
    text = repr(Detections(boxes, torch.ones(1), zero, zero, ("vx", "y"), ("car",)))
    assert "car 1.00: vx=0 y=1.235" in text


def test_repr_is_short_for_any_number_of_boxes() -> None:
    many = random_many(1000)
    assert len(repr(many).splitlines()) <= 10
    assert "1000 boxes" in repr(many)
    assert "0 boxes" in repr(many[[]])


def random_many(count: int) -> Detections:
    zeros = torch.zeros(count, dtype=torch.long)
    boxes, eye = torch.randn(count, 2), torch.eye(2).expand(count, 2, 2)
    return Detections(boxes, torch.rand(count), zeros, zeros, ("x", "y"), ("car",), eye)


def test_repr_of_selections_and_objects_holds_no_numbers() -> None:
    rows = torch.zeros(500, dtype=torch.long)
    selection = Selection(rows, rows / 1, rows, (rows,))
    assert repr(selection) == "Selection(500 instances, where: tuple)"
    found = Candidates(rows, rows / 1, rows, rows, removed_by=rows)
    assert repr(found) == "Candidates(500 instances, where: Tensor)"
    labels = np.zeros(500, int)
    assert repr(GroundTruth(np.zeros((500, 9)), labels, labels, 7)) == (
        "GroundTruth(500 objects in 7 frames)"
    )
