"""Labels that do not belong to the frames: the message names what is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, BoxcovWarning, Detections, ExactGLM, Posterior, calibrate
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from helpers.export_boxes import in_space, with_error_model


def test_frames_without_objects_are_named(small: TinyCenter, small_posterior: Posterior) -> None:
    model = ExactGLM(small, small_posterior)
    target = {"boxes": torch.zeros(0, 5), "labels": torch.zeros(0, dtype=torch.long)}
    empty = [(inputs, [target]) for inputs, _ in shapes.frames(count=5, seed=11)]
    with pytest.raises(BoxcovError, match="none of the 5 frames has a labelled object"):
        calibrate(model, empty)


def test_few_boxes_on_objects_ask_for_the_conventions(
    small: TinyCenter, small_posterior: Posterior
) -> None:
    """The boxes of all but three frames are in centimetres."""
    frames = list(shapes.frames(count=40, seed=11))
    for _, targets in frames[3:]:
        targets[0]["boxes"] = 100 * targets[0]["boxes"]
    with pytest.raises(BoxcovError, match=r"too few .*: \d+ of \d+, .* compare the order of"):
        calibrate(ExactGLM(small, small_posterior), frames)


def test_labels_in_another_convention_calibrate_with_one_warning(
    tiny: TinyCenter, posterior: Posterior, short: None
) -> None:
    frames = list(shapes.frames(count=20, seed=11))
    for _, targets in frames:
        targets[0]["boxes"] = targets[0]["boxes"][:, [0, 1, 3, 2, 4]]
    with pytest.warns(BoxcovWarning) as found:
        calibrate(ExactGLM(tiny, posterior), frames, copies=0)
    assert len(found) == 1
    assert "another convention than the boxes: w and l are swapped" in str(found[0].message)
    assert found[0].filename == __file__


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (["car", "car"], r"\['car', 'car'\]"),
        ([0, 0.7], r"\[0, 0.7\]"),
        (torch.tensor([0, 0.5]), r"\[0.0, 0.5\]"),
        (np.array(["car", "car"]), r"\['car', 'car'\]"),
    ],
    ids=["names", "fractions", "tensor", "array"],
)
def test_labels_are_numbers_of_classes(labels: Any, shown: str) -> None:
    frames = [([], [{"boxes": torch.zeros(2, 5), "labels": labels}])]
    with pytest.raises(BoxcovError, match=f"the labels of item 0 are {shown}: give the number"):
        GroundTruth.from_frames(frames)


@pytest.mark.parametrize("labels", [torch.tensor([0.0]), np.zeros(1, np.uint8), [0]])
def test_labels_of_any_number_type_are_read_back(labels: Any, tmp_path: Path) -> None:
    """The frame without objects has an empty list, which torch takes for floats."""
    frames = [([], [{"boxes": torch.zeros(1, 5), "labels": labels}, {"boxes": [], "labels": []}])]
    truth = GroundTruth.from_frames(frames)
    truth.save(tmp_path / "truth", {})
    assert GroundTruth.load(tmp_path / "truth")[0].labels.tolist() == [0]
    assert (truth.boxes.shape, truth.frames) == ((1, 5), 2)


def test_objects_of_no_frame_fit_any_detector() -> None:
    truth = GroundTruth.from_frames([([], [{"boxes": [], "labels": []}])])
    assert truth.columns(("x", "y", "w", "l", "yaw")).shape == (0, 5)


@pytest.mark.parametrize("boxes", [torch.zeros(1, 4), torch.zeros(1)])
def test_objects_of_other_shapes_are_named(boxes: torch.Tensor) -> None:
    frames = [([], [{"boxes": b, "labels": [0]}]) for b in (torch.zeros(1, 5), boxes)]
    with pytest.raises(BoxcovError, match=r"4 to 5 fields|item 1 have shape"):
        GroundTruth.from_frames(frames)


def test_boxes_that_need_a_gradient_are_labels() -> None:
    boxes = torch.ones(1, 5, dtype=torch.bfloat16).requires_grad_()
    assert GroundTruth.from_frames([([], [{"boxes": boxes, "labels": [0]}])]).boxes.sum() == 5


def test_labels_below_zero_do_not_begin_at_one(
    small: TinyCenter, small_posterior: Posterior, image: torch.Tensor
) -> None:
    truth = GroundTruth(np.zeros((2, 5)), np.array([-1, 0]), np.array([0, 0]), 1)
    found = ExactGLM(small, small_posterior)(image)
    with pytest.raises(BoxcovError, match=r"are -1 to 0, .*: leave out other objects"):
        match_detections(found, truth)


@pytest.mark.parametrize(
    ("fields", "box", "message"),
    [
        (("x", "y", "w", "l", "yaw"), [1, torch.nan, 1, 2, 0], "1 of 2 .* in frame 3: y is nan"),
        (("x", "y", "w", "l", "yaw"), [1, 1, -1.5, 2, 0], "1 of 2 .* in frame 3: w is -1.5"),
        (("x1", "y1", "x2", "y2"), [5, 6, 2, 3], r"frame 3: x2 - x1 is -3: give the fields x1 y1"),
    ],
)
def test_objects_that_no_box_can_meet_are_named(
    fields: tuple[str, ...], box: list[float], message: str
) -> None:
    good = [0.0, 0.0, *[1.0] * (len(fields) - 2)]
    truth = GroundTruth(np.array([good, box]), np.array([0, 0]), np.array([0, 3]), 4)
    one = torch.zeros(1, dtype=torch.long)
    boxes, covariance = torch.tensor([good]), torch.eye(len(fields))[None]
    found = Detections(boxes, torch.ones(1), one, one, fields, ("car",), covariance)
    with pytest.raises(BoxcovError, match=message):
        match_detections(found, truth)


def test_an_error_model_without_scales_is_named() -> None:
    found = replace(with_error_model(in_space(3)), scale=None)
    truth = GroundTruth(np.zeros((0, 9)), np.zeros(0, int), np.zeros(0, int), 1)
    with pytest.raises(BoxcovError, match="these detections have no scale"):
        match_detections(found, truth)


def test_names_of_signals_without_signals_are_ignored() -> None:
    """As in a file that another program wrote."""
    one, zero, C = torch.ones(1), torch.zeros(1, dtype=torch.long), torch.eye(4)[None]
    meta = {"signals": ["peak"]}
    fields = ("x1", "y1", "x2", "y2")
    found = Detections(torch.ones(1, 4), one, zero, zero, fields, ("car",), C, meta=meta)
    truth = GroundTruth(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0, int), 1)
    assert match_detections(found, truth).signals is None


def test_scores_that_are_no_probabilities_are_refused(
    small: TinyCenter, small_posterior: Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Percent, for example: the error model would take each score for 0.9999."""
    select = TinyCenter.select

    def percent(self: TinyCenter, raw: Any) -> Any:
        found = select(self, raw)
        return replace(found, scores=100 * found.scores)

    monkeypatch.setattr(TinyCenter, "select", percent)
    model = ExactGLM(small, small_posterior)
    with pytest.raises(BoxcovError, match=r"scores are not between 0 and 1, .* probabilities"):
        calibrate(model, list(shapes.frames(count=5, seed=11)))
