"""Frames that an error model is fitted on, and changed copies of them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from boxcov import MCI, BoxcovError, BoxcovWarning, ExactGLM, Posterior, calibrate, fit
from boxcov.data import batched, shapes
from boxcov.detector import Detector
from boxcov.detectors.tiny import TinyCenter
from boxcov.error_model import network
from boxcov.error_model.calibrate import fit_error_model
from boxcov.error_model.labelled_frames import (
    CopiedBoxes,
    changed_copies,
    predict_copies,
    predict_frames,
)
from boxcov.error_model.network import TrainingOptions, fit_network
from boxcov.errors import NotFiniteError
from boxcov.evaluate.ground_truth import GroundTruth, match_detections

ABOUT = {"estimator": "exact", "fingerprint": "", "options": TrainingOptions(widths=(0,))}


def test_copies_have_the_number_of_their_frame(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list, monkeypatch
) -> None:
    model = ExactGLM(small, small_posterior)
    items = list(batched(calibration_frames[:6], 2))
    found, truth = predict_frames(model, items)
    copies = predict_copies(model, items, 2)
    assert copies.found.frame.max() == 11  # each copy is a frame of its own
    order = [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
    assert copies.source.tolist() == [order[i] for i in copies.found.frame]
    records = match_detections(found, truth, threshold=-1.0)
    for number in range(6):  # the toy finds about as many objects in a mirrored image
        own, other = records.frame == number, (copies.source == number).numpy()
        assert abs(copies.records.paired[other].sum() / 2 - records.paired[own].sum()) <= 1
    assert predict_copies(model, items, 0) is None
    monkeypatch.setattr(TinyCenter, "augment", Detector.augment)
    assert predict_copies(model, items, 2) is None


def test_a_batch_with_targets_of_one_frame_is_refused(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list
) -> None:
    """Its second frame would count as the first one of the next item."""
    inputs, targets = next(iter(batched(calibration_frames[:2], 2)))
    items = [(inputs, targets[:1]), (inputs, targets)]
    with pytest.raises(BoxcovError, match="item 0 has boxes in 2 frames, but targets of 1"):
        predict_frames(ExactGLM(small, small_posterior), items)


def test_only_the_network_learns_from_copies(collected: Any, short: None) -> None:
    """Copies with errors of a hundred times decide no unit, region, noise or tail."""
    found, records = collected
    source = found.frame
    wide = replace(records, truth=records.boxes + 100 * (records.truth - records.boxes))
    about = {**ABOUT, "fingerprint": "x"}
    alone = fit_error_model(found, records, **about)
    copies = CopiedBoxes(found, wide, source)
    with_copies = fit_error_model(found, records, **about, copies=copies)
    assert with_copies.provenance["copies"] == 0
    for name, tensor in alone.tensors().items():
        assert torch.equal(tensor, with_copies.tensors()[name]), name


def test_copies_share_the_fold_of_their_frame(
    small: TinyCenter,
    small_posterior: Posterior,
    calibration_frames: list,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies of a frame without boxes of its own have no fold, and are left out."""
    frames = calibration_frames[:25]
    model = ExactGLM(small, small_posterior)
    found, truth = predict_frames(model, frames)
    found = found[found.frame != 7]
    records = match_detections(found, truth, threshold=-1.0)
    copies = predict_copies(model, frames, 2)
    seen: dict[str, torch.Tensor] = {}

    def watched(x: Any, targets: Any, folds: torch.Tensor, *args: Any) -> Any:
        seen["folds"] = folds
        return fit_network(x, targets, folds, *args)

    monkeypatch.setattr("boxcov.error_model.calibrate.fit_network", watched)
    monkeypatch.setattr(network, "EPOCHS", 1)
    fit_error_model(found, records, **ABOUT, copies=copies)
    source = copies.source[copies.source != 7]
    frame, folds = torch.cat([found.frame, source]), seen["folds"]
    assert len(folds) == len(frame)
    assert folds[: len(found)].unique().tolist() == [0, 1, 2, 3, 4]
    for number in frame.unique():
        assert len(folds[frame == number].unique()) == 1


def test_a_copy_that_is_not_finite_is_left_out(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list, monkeypatch
) -> None:
    model, real = ExactGLM(small, small_posterior), ExactGLM.with_signals
    calls = iter(range(100))

    def fails(self: ExactGLM, inputs: Any) -> Any:
        if next(calls) in (1, 2):
            raise NotFiniteError("1 of 9 covariances")
        return real(self, inputs)

    monkeypatch.setattr(ExactGLM, "with_signals", fails)
    copies = predict_copies(model, calibration_frames[:3], 2)
    assert copies.found.frame.unique().tolist() == [0, 1, 2, 3]  # of 6
    assert copies.source.unique().tolist() == [0, 1, 2]
    first = copies.source[copies.found.frame == 0]
    assert first.tolist() == [0] * len(first)


def _other_boxes(targets: Any, change: Any) -> list:
    return [{**target, "boxes": change(target["boxes"])} for target in targets]


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        (lambda *given: None, r"item 0: augment\(\) returns NoneType, expected a pair"),
        (lambda self, *given: given, r"item 0: augment\(\) returns 3 values, expected a pair"),
        (lambda self, x, t, g: (x, t[0]), r"item 0: the targets of item 0 are no list"),
        (lambda self, x, t, g: (x, []), r"item 0: augment\(\) returns the targets of 0 frames for"),
        (lambda self, x, t, g: (x * torch.nan, t), "item 0: inputs holds .* NaN"),
        (
            lambda self, x, t, g: (x, _other_boxes(t, lambda b: b * torch.nan)),
            "copies: .* no place",
        ),
        (lambda self, x, t, g: (x, _other_boxes(t, lambda b: b[:, :4])), "copies: .* 4 fields"),
    ],
)
def test_a_wrong_augment_is_named(
    small: TinyCenter,
    small_posterior: Posterior,
    calibration_frames: list,
    monkeypatch: pytest.MonkeyPatch,
    augment: Any,
    said: str,
) -> None:
    monkeypatch.setattr(TinyCenter, "augment", augment)
    with pytest.raises(BoxcovError, match=rf"{said}.*correct augment\(\), .*--copies 0"):
        predict_copies(ExactGLM(small, small_posterior), calibration_frames[:3], 2)


def test_an_error_of_frames_and_copies_blames_no_augment(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list, monkeypatch
) -> None:
    def fails(self: ExactGLM, inputs: Any) -> Any:
        raise BoxcovError("the weights changed: build a new predictor")

    monkeypatch.setattr(ExactGLM, "with_signals", fails)
    with pytest.raises(BoxcovError, match=r"^the weights changed: build a new predictor$"):
        predict_copies(ExactGLM(small, small_posterior), calibration_frames[:3], 2)


def test_an_augment_in_place_changes_no_frame(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list, monkeypatch
) -> None:
    """Otherwise each copy would be made from the copy before, and the caller's frames be lost."""

    def darker(self: TinyCenter, inputs: Any, targets: Any, generator: torch.Generator) -> Any:
        targets[0]["boxes"] = targets[0]["boxes"][:1]
        targets[0]["labels"] = targets[0]["labels"][:1]
        return inputs.mul_(0.9), targets

    monkeypatch.setattr(TinyCenter, "augment", darker)
    frames = deepcopy(calibration_frames[:3])
    copies = predict_copies(ExactGLM(small, small_posterior), frames, 2)
    for (inputs, targets), (same, objects) in zip(frames, calibration_frames):
        assert torch.equal(inputs, same)
        assert torch.equal(targets[0]["boxes"], objects[0]["boxes"])
    number = copies.found.frame
    assert torch.equal(copies.found.boxes[number == 0], copies.found.boxes[number == 1])


def test_an_augment_in_place_changes_no_array(small: TinyCenter, monkeypatch) -> None:
    def moved(self: TinyCenter, inputs: Any, targets: Any, generator: torch.Generator) -> Any:
        targets[0]["boxes"] += 1
        return inputs, targets

    monkeypatch.setattr(TinyCenter, "augment", moved)
    targets = [{"boxes": np.zeros((2, 5)), "labels": np.zeros(2, int)}]
    copies = list(changed_copies(small, torch.ones(1), targets, 0, 2))
    assert [objects[0]["boxes"].max() for _, objects in copies] == [1, 1]
    assert not targets[0]["boxes"].any()


def test_arrays_of_numpy_can_be_changed(small: TinyCenter, calibration_frames: list) -> None:
    inputs, targets = calibration_frames[0]
    arrays = [{name: np.asarray(value) for name, value in target.items()} for target in targets]
    expected = list(changed_copies(small, inputs, targets, 0, 3))
    for (x, objects), (y, others) in zip(changed_copies(small, inputs, arrays, 0, 3), expected):
        assert torch.equal(x, y)
        assert torch.equal(objects[0]["boxes"], others[0]["boxes"])


def test_what_augment_raises_is_one_line(small: TinyCenter, monkeypatch) -> None:
    monkeypatch.setattr(
        TinyCenter, "augment", lambda self, x, t, g: (x, [{"boxes": t[0]["boxes"].flip(0)}])
    )
    targets = [{"boxes": np.zeros((2, 5)), "labels": np.zeros(2, int)}]
    with pytest.raises(BoxcovError, match=r"augment\(\) raises AttributeError: .* as the frames"):
        next(changed_copies(small, torch.ones(1), targets, 0, 1))


def test_copies_without_a_finite_covariance_are_warned_of(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list, monkeypatch
) -> None:
    def fails(self: ExactGLM, inputs: Any) -> Any:
        raise NotFiniteError("9 of 9 covariances")

    model = ExactGLM(small, small_posterior)
    monkeypatch.setattr(ExactGLM, "with_signals", fails)
    with pytest.warns(BoxcovWarning, match="no copy of the 3 frames .* has finite covariances"):
        assert predict_copies(model, calibration_frames[:3], 2) is None


@pytest.mark.parametrize("copies", [-1, 1.5, "3", None, float("nan")])
def test_a_wrong_number_of_copies_is_refused(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list, copies: Any
) -> None:
    seen: list[int] = []
    with pytest.raises(BoxcovError, match=r"copies must be a whole number of at least 0, got"):
        calibrate(
            ExactGLM(small, small_posterior),
            calibration_frames,
            copies=copies,
            progress=lambda done, of: seen.append(done),
        )
    assert not seen  # before the work


def test_one_frame_in_place_of_a_list_is_named(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list
) -> None:
    with pytest.raises(BoxcovError, match="frame 0 is a Tensor, not a pair of inputs and targets"):
        calibrate(ExactGLM(small, small_posterior), calibration_frames[0])


def test_items_that_are_no_pairs_are_named(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list
) -> None:
    named = [(*item, f"frame-{i}") for i, item in enumerate(calibration_frames[:8])]
    for frames in (named, "a name of frames"):
        with pytest.raises(BoxcovError, match=r"frame 0 is a (tuple|str), not a pair of inputs"):
            calibrate(ExactGLM(small, small_posterior), frames)


def assert_refused(model: ExactGLM, frames: Any, said: str, **options: Any) -> None:
    seen: list[int] = []
    with pytest.raises(BoxcovError, match=said):
        calibrate(model, frames, progress=lambda done, of: seen.append(done), **options)
    assert not seen  # before the work


def test_targets_without_objects_by_name_are_refused(small, small_posterior) -> None:
    model = ExactGLM(small, small_posterior)
    items = [(inputs, targets) for inputs, targets in shapes.frames(count=6)]
    said = r"the targets of item 0 are no list of one dict per frame with boxes \(n, D\), lab"
    one = torch.zeros(1, 5)
    wrong_length = [{"boxes": one, "labels": torch.zeros(2)}]
    wrong_points = [{"boxes": one, "labels": [0], "points": torch.zeros(2)}]
    for wrong in (
        *(None, {"boxes": one, "labels": [0]}, [{"boxes": one}], one),
        *(wrong_length, wrong_points),
    ):
        assert_refused(model, [(inputs, wrong) for inputs, _ in items], said)
    assert_refused(
        model, (item for item in items), r"another sequence of frames, got a generator: giv"
    )
    assert_refused(model, items, r"frames, got a generator", stress=(item for item in items))
    loader = DataLoader(items, batch_size=None)  # has a length, but no items
    assert_refused(
        model, loader, r"another sequence of frames, got a DataLoader: give list\(frames\)"
    )


def test_targets_may_be_arrays_and_lists() -> None:
    _, (target,) = shapes.frames(count=1)[0]
    expected = GroundTruth.from_frames([(None, [target])])
    for change in (lambda t: t.numpy(), lambda t: t.tolist()):
        found = GroundTruth.from_frames([(None, ({k: change(v) for k, v in target.items()},))])
        assert (found.labels == expected.labels).all()
        assert (found.boxes == expected.boxes).all()


def test_too_few_frames_are_refused_before_the_work(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list
) -> None:
    model = ExactGLM(small, small_posterior)
    calls: list[int] = []
    model.with_signals = lambda inputs: calls.append(1)
    with pytest.raises(BoxcovError, match="4 frames are too few"):
        calibrate(model, calibration_frames[:4])
    with pytest.raises(BoxcovError, match="threshold must be one of"):
        calibrate(model, calibration_frames, threshold=0.45)
    with pytest.raises(BoxcovError, match="no posterior"):
        calibrate(MCI(small, samples=2), calibration_frames)
    assert not calls


@pytest.mark.usefixtures("short")
def test_batches_count_as_their_frames(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list, collected: Any
) -> None:
    model = ExactGLM(small, small_posterior)
    frames = batched(calibration_frames[:40], 20)
    items = [frames[i] for i in range(2)]
    found, truth = predict_frames(model, items)
    alone = collected[0][collected[0].frame < 40]
    assert truth.frames == 40
    assert found.frame.tolist() == alone.frame.tolist()


@pytest.mark.usefixtures("short")
def test_frames_without_boxes_do_no_harm(
    small: TinyCenter, small_posterior: Posterior, calibration_frames: list
) -> None:
    empty = (torch.zeros(1, 1, 64, 64), [{"boxes": torch.zeros(0, 5), "labels": torch.zeros(0)}])
    frames = [empty, *calibration_frames[:20], empty, *calibration_frames[20:40], empty]
    detector = deepcopy(small)
    detector.threshold = 0.2
    model = calibrate(ExactGLM(detector, fit(detector, calibration_frames[:8])), frames)
    nothing = model(empty[0])
    assert len(nothing) == 0
    assert nothing.risk.shape == (0,)
    assert nothing.region(0.9).shape == (0, 5)
    assert nothing.predictive.shape == (0, 5, 5)
    assert model.error_model.provenance["frames"] == 40
    assert len(model(calibration_frames[50][0]).risk)
