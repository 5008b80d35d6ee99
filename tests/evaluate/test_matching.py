from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxcov.box_layout import IMAGE
from boxcov.data.poses import BOX_FIELDS
from boxcov.errors import BoxcovError
from boxcov.evaluate import match
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.evaluate.matching import iou_2d, iou_3d, iou_bev, pair_classes

CLASSES = ("car", "bus", "pedestrian")


def scene(rng, n: int, k: int) -> dict:
    """n predictions and k objects with 9 fields in four frames and three classes, some close."""
    truth = np.concatenate(
        [
            rng.uniform(-6, 6, (k, 2)),
            rng.normal(size=(k, 1)),
            rng.uniform(1, 4, (k, 3)),
            rng.normal(size=(k, 3)),
        ],
        1,
    )
    truth[::4, 7:] = np.nan
    boxes = np.nan_to_num(truth[rng.integers(0, k, n)]) + rng.normal(scale=0.6, size=(n, 9)) * [
        1,
        1,
        1,
        0.1,
        0.1,
        0.1,
        0.2,
        1,
        1,
    ]
    root = rng.normal(size=(n, 9, 9))
    return {
        "boxes": boxes,
        "scores": rng.integers(0, 20, n) / 20,
        "labels": rng.integers(0, 3, n),
        "frame": rng.integers(0, 4, n),
        "truth_boxes": truth,
        "truth_labels": rng.integers(0, 3, k),
        "truth_frame": rng.integers(0, 4, k),
        "uncertainty": rng.random(n),
        "covariance": root @ root.transpose(0, 2, 1),
    }


@pytest.mark.parametrize("seed", range(5))
def test_rows_equal_brute_force(seed: int) -> None:
    given = scene(np.random.default_rng(seed), 80, 60)
    found = match(**given, fields=BOX_FIELDS, classes=CLASSES)
    kept = [i for i in range(80) if given["scores"][i] > 0.1]
    assert len(found) == len(kept) < 80
    taken: dict[int, int] = {}
    for i in sorted(kept, key=lambda i: -given["scores"][i]):
        rivals = [
            (np.hypot(*(given["truth_boxes"][k, :2] - given["boxes"][i, :2])), k)
            for k in range(60)
            if k not in taken.values()
            and given["truth_labels"][k] == given["labels"][i]
            and given["truth_frame"][k] == given["frame"][i]
        ]
        if rivals and min(rivals)[0] < 2.0:
            taken[i] = min(rivals)[1]
    assert 10 < len(taken) < len(kept)
    for row, i in enumerate(kept):
        for name in ("boxes", "scores", "labels", "frame", "uncertainty", "covariance"):
            assert np.array_equal(getattr(found, name)[row], given[name][i])
        if i not in taken:
            assert found.iou[row] == 0
            assert np.isnan(found.l2[row])
            assert np.isnan(found.truth[row]).all()
            continue
        box, truth = given["boxes"][i], given["truth_boxes"][taken[i]]
        assert np.array_equal(found.truth[row], truth, equal_nan=True)
        assert found.l2[row] == pytest.approx(sum((box[:3] - truth[:3]) ** 2) ** 0.5)
        assert found.iou[row] == pytest.approx(iou_3d(box[None], truth[None])[0])
    assert np.isnan(found.errors[found.paired][:, 7]).any()  # an unknown velocity stays unknown
    assert not np.isnan(found.errors[found.paired][:, :7]).any()


@pytest.mark.parametrize("fields", [BOX_FIELDS[:7], ("x1", "y1", "x2", "y2")])
@pytest.mark.parametrize("column", [0, 1])
def test_a_centre_of_nan_hides_no_other_object(fields, column: int) -> None:
    box = np.array([[1.0, 2, 3, 4, 5, 6, 0.5]])[:, : len(fields)]
    unknown = box.copy()
    unknown[0, column] = np.nan
    zeros = np.zeros(2, dtype=int)
    for number, truth in enumerate(([unknown, box], [box, unknown])):
        found = match(
            np.concatenate([box, unknown]),
            np.array([0.9, 0.8]),
            zeros,
            zeros,
            np.concatenate(truth),
            zeros,
            zeros,
            fields=fields,
            classes=CLASSES,
            uncertainty=np.ones(2),
        )
        assert found.pair.tolist() == [1 - number, -1]


def test_fewer_fields_in_another_order() -> None:
    rng = np.random.default_rng(0)
    given = scene(rng, 50, 40)
    whole = match(**given, fields=BOX_FIELDS, classes=CLASSES)
    for fields in (BOX_FIELDS[:7], ("x", "y", "w", "l", "yaw"), ("yaw", "l", "w", "y", "x")):
        columns = [BOX_FIELDS.index(name) for name in fields]
        cut = (
            given
            | {name: given[name][:, columns] for name in ("boxes", "truth_boxes")}
            | {"covariance": None}
        )
        found = match(**cut, fields=fields, classes=CLASSES)
        assert np.array_equal(found.paired, whole.paired)
        mine, theirs = whole.boxes[whole.paired], whole.truth[whole.paired]
        iou, centre = (iou_3d, 3) if "z" in fields else (iou_bev, 2)
        assert np.allclose(found.iou[found.paired], iou(mine, theirs))
        assert np.allclose(
            found.l2[found.paired], np.linalg.norm((mine - theirs)[:, :centre], axis=1)
        )


def test_boxes_in_images() -> None:
    rng = np.random.default_rng(0)
    corner = rng.integers(0, 40, (30, 2))
    truth = np.concatenate([corner, corner + rng.integers(5, 20, (30, 2))], 1).astype(float)
    boxes, numbers = truth + rng.normal(scale=2, size=(30, 4)), np.arange(30)
    found = match(
        boxes,
        rng.random(30) + 0.3,
        numbers % 2,
        numbers % 5,
        truth,
        numbers % 2,
        numbers % 5,
        ("x1", "y1", "x2", "y2"),
        "ab",
        boxes[:, 0],
    )
    assert 5 < found.paired.sum() < 30
    assert (found.iou[found.paired] >= 0.5).all()
    assert np.allclose(
        found.iou[found.paired], iou_2d(found.boxes[found.paired], found.truth[found.paired])
    )
    middle = [(b[:2] + b[2:] - t[:2] - t[2:]) / 2 for b, t in zip(found.boxes, found.truth)]
    assert np.allclose(found.l2, np.linalg.norm(middle, axis=1), equal_nan=True)


def test_no_predictions_and_no_objects() -> None:
    given = scene(np.random.default_rng(0), 9, 5)
    nothing = given | {
        name: given[name][:0]
        for name in ("boxes", "scores", "labels", "frame", "uncertainty", "covariance")
    }
    assert len(match(**nothing, fields=BOX_FIELDS, classes=CLASSES)) == 0
    empty = given | {
        name: given[name][:0] for name in ("truth_boxes", "truth_labels", "truth_frame")
    }
    assert not match(**empty, fields=BOX_FIELDS, classes=CLASSES).paired.any()
    assert len(match(**given, fields=BOX_FIELDS, classes=CLASSES, threshold=2.0)) == 0
    assert not match(**given, fields=BOX_FIELDS, classes=CLASSES, limit=0.0).paired.any()


def test_wrong_shapes_are_named() -> None:
    given = scene(np.random.default_rng(0), 9, 5)
    with pytest.raises(BoxcovError, match="takes boxes of x y w l yaw or x1 y1 x2 y2"):
        match(**given, fields=("x", "y"), classes=CLASSES)
    with pytest.raises(BoxcovError, match=r"truth_boxes has shape \(5, 7\), expected \(5, 9\)"):
        match(
            **(given | {"truth_boxes": given["truth_boxes"][:, :7]}),
            fields=BOX_FIELDS,
            classes=CLASSES,
        )
    with pytest.raises(BoxcovError, match="covariance has shape"):
        match(
            **(given | {"covariance": given["covariance"][:, :7]}),
            fields=BOX_FIELDS,
            classes=CLASSES,
        )
    with pytest.raises(BoxcovError, match="uncertainty has shape"):
        match(**(given | {"uncertainty": np.zeros(3)}), fields=BOX_FIELDS, classes=CLASSES)
    with pytest.raises(BoxcovError, match=r"labels of the objects are 1 to \d, .* begin at 1\?"):
        match(
            **(given | {"truth_labels": given["truth_labels"] % len(CLASSES) + 1}),
            fields=BOX_FIELDS,
            classes=CLASSES,
        )


def test_stated_pairs_may_be_a_list() -> None:
    given = scene(np.random.default_rng(0), 9, 5)
    pair = [-1, 3, *[-1] * 7]
    found = match(**given, fields=BOX_FIELDS, classes=CLASSES, threshold=-1.0, pair=pair)
    assert found.pair.tolist() == pair
    assert found.paired.tolist() == [False, True, *[False] * 7]


def slow_iou(a, b) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def slow_coco(boxes, scores, frame, truth, truth_frame, limit):
    """The loop of COCO's evaluation, image by image: a later object wins a tie."""
    pairs = [-1] * len(boxes)
    for image in set(frame.tolist()):
        taken = set()
        mine = [i for i in range(len(boxes)) if frame[i] == image]
        for i in sorted(mine, key=lambda i: -scores[i]):
            best, match = limit, -1
            for k in range(len(truth)):
                if truth_frame[k] != image or k in taken:
                    continue
                iou = slow_iou(boxes[i], truth[k])
                if iou < best:
                    continue
                best, match = iou, k
            if match >= 0:
                pairs[i] = match
                taken.add(match)
    return pairs


def upright(rng, n: int) -> np.ndarray:
    corner = rng.integers(0, 3, (n, 2))
    return np.concatenate([corner, corner + rng.integers(1, 4, (n, 2))], 1).astype(float)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 14), st.integers(0, 9))
def test_pairs_by_overlap_equal_brute_force(seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    boxes, truth = (
        upright(rng, n),
        upright(rng, k),
    )  # on a small grid: equal overlaps, and some of exactly one half
    scores, frame, truth_frame = (
        rng.integers(0, 4, n) / 4,
        rng.integers(0, 3, n),
        rng.integers(0, 3, k),
    )
    predictions, objects = (boxes, scores, 0 * frame, frame), (truth, 0 * truth_frame, truth_frame)
    found = pair_classes(IMAGE, predictions, objects, 0.0)
    assert found.tolist() == slow_coco(boxes, scores, frame, truth, truth_frame, 0.5)


def test_an_iou_of_one_half_is_enough() -> None:
    zero, one = np.zeros(1, int), np.ones(1, int)
    box, half = (np.array([[0.0, 0, 2, 2]]), np.ones(1), zero, zero), np.array([[0.0, 0, 2, 1]])
    assert pair_classes(IMAGE, box, (half, zero, zero), 0.0).tolist() == [0]
    assert pair_classes(IMAGE, box, (half, zero, one), 0.0).tolist() == [-1]  # in another frame


def test_objects_of_the_plane_are_not_read_as_objects_of_space() -> None:
    """Of x y w l yaw, the columns of x y z w l would be taken for a detector of x y w l."""
    truth = GroundTruth(np.ones((1, 5)), np.zeros(1, int), np.zeros(1, int), 1)
    with pytest.raises(BoxcovError, match="the objects of the data have 5 fields"):
        truth.columns(("x", "y", "w", "l"))
    assert truth.columns(("x", "y", "w", "l", "yaw")).shape == (1, 5)
