from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from boxcov import BoxcovError
from boxcov.data.poses import BOX_FIELDS, Pose, rotation_matrix, transform_detections
from boxcov.export.kalman import measurements
from helpers.export_boxes import in_space, with_error_model


def test_fields_come_in_the_order_of_the_filter() -> None:
    found = in_space()
    made = measurements(found, ("yaw", "y", "x"))
    at = [6, 1, 0]
    assert torch.equal(made.z, found.boxes[:, at])
    assert torch.equal(made.R, found.predictive[:, at][:, :, at])
    assert (made.fields, made.residual) == (("yaw", "y", "x"), "predictive")
    assert torch.equal(measurements(found).R, found.predictive)


def test_a_residual_by_field_or_as_a_matrix() -> None:
    found = in_space(calibrated=False)
    variances = {name: 0.1 * (i + 1) for i, name in enumerate(BOX_FIELDS)}
    made = measurements(found, ("x", "vy"), residual=variances)
    expected = (
        found.covariance + torch.diag(torch.tensor(list(variances.values()), dtype=torch.float64))
    )[:, [0, 8]][:, :, [0, 8]]
    torch.testing.assert_close(made.R, expected, rtol=1e-6, atol=1e-9)
    assert made.residual == "given"
    whole = torch.eye(9, dtype=torch.float64)
    torch.testing.assert_close(measurements(found, residual=whole).R, found.covariance + whole)
    torch.testing.assert_close(
        measurements(found, residual=whole.expand(5, 9, 9)).R, found.covariance + whole
    )


def test_another_frame_of_reference() -> None:
    found = in_space()
    pose = Pose(
        rotation_matrix(torch.tensor([0.9, 0.0, 0.0, 0.3], dtype=torch.float64)),
        torch.tensor([5.0, -2.0, 1.0], dtype=torch.float64),
    )
    made = measurements(found, ("x", "y", "yaw"), pose=pose)
    at = [0, 1, 6]

    def there(box: Tensor) -> Tensor:
        centre = pose.R @ box[:3] + pose.t
        heading = pose.R @ torch.stack([box[6].cos(), box[6].sin(), box[6] * 0])
        return torch.stack([centre[0], centre[1], torch.atan2(heading[1], heading[0])])

    for i, box in enumerate(found.boxes):
        J = torch.autograd.functional.jacobian(there, box)
        torch.testing.assert_close(made.R[i], J @ found.predictive[i] @ J.T)
    torch.testing.assert_close(made.z, transform_detections(found, pose).boxes[:, at])


def test_measurements_carry_risk_for_the_gate() -> None:
    found = with_error_model(in_space())
    turn = Pose(rotation_matrix(torch.tensor([0.9, 0.0, 0.0, 0.3]).double()), torch.zeros(3))
    for pose in (None, turn):
        made = measurements(found, ("x", "y", "yaw"), pose=pose)
        assert torch.equal(made.risk, found.risk)
        assert torch.equal(made.no_object, found.no_object)
        assert torch.equal(made.flipped, found.flipped)
    assert torch.equal(measurements(found).R, found.predictive.double())
    plain = measurements(in_space())
    assert (plain.risk, plain.no_object, plain.flipped) == (None, None, None)


def test_a_missing_residual_is_refused() -> None:
    found = in_space(calibrated=False)
    with pytest.raises(
        BoxcovError, match="the epistemic covariance alone is no measurement noise R"
    ):
        measurements(found)
    with pytest.raises(
        BoxcovError, match="calibrated: their predictive covariance contains the residual"
    ):
        measurements(in_space(), residual={"x": 1.0})
    with pytest.raises(BoxcovError, match="plain detections"):
        measurements(replace(found, covariance=None), residual={"x": 1.0})


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        ({"x": 1.0}, "and has x$"),
        ({**dict.fromkeys(BOX_FIELDS, 1.0), "speed": 1.0}, "and has .*, speed$"),
        (dict.fromkeys(BOX_FIELDS, -1.0), "finite and at least 0"),
        (torch.eye(4), r"residual has shape \(4, 4\), expected \(9, 9\) or \(5, 9, 9\)"),
    ],
)
def test_invalid_residuals_are_refused(residual: object, message: str) -> None:
    with pytest.raises(BoxcovError, match=message):
        measurements(in_space(calibrated=False), residual=residual)  # type: ignore[arg-type]


def test_unknown_predictive_fields_are_named() -> None:
    found = in_space()
    found.predictive[:, 7:] = found.predictive[:, :, 7:] = torch.nan
    with pytest.raises(BoxcovError, match=r"covariance of vx, vy is NaN: .* with fields="):
        measurements(found)
    known = found.fields[:7]
    torch.testing.assert_close(measurements(found, known).R, measurements(in_space(), known).R)


def test_unknown_velocities_are_no_measurements() -> None:
    found = in_space(2, calibrated=False)
    boxes = found.boxes.clone()
    boxes[1, found.fields.index("vx")] = torch.nan
    residual = torch.eye(len(found.fields))
    with pytest.raises(BoxcovError, match=r"^vx of some boxes is not finite: leave out these"):
        measurements(replace(found, boxes=boxes), residual=residual)
    z = measurements(replace(found, boxes=boxes), ("x", "vy"), residual=residual).z
    assert torch.equal(z, found.boxes[:, [0, found.fields.index("vy")]].double())


def test_singular_noise_is_refused() -> None:
    found = in_space()
    found.predictive[2] = 0
    with pytest.raises(BoxcovError, match=r"R of 1 boxes is not positive definite \(box 2"):
        measurements(found)
    with pytest.raises(BoxcovError, match="cannot measure the fields speed"):
        measurements(in_space(), ("x", "speed"))


def test_no_boxes() -> None:
    none = in_space()[:0]
    assert measurements(none, ("x", "y")).R.shape == (0, 2, 2)
