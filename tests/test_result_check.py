"""Every number that leaves is in range: covariances, probabilities, scales, regions, labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from boxcov import Detections
from boxcov.errors import NotFiniteError
from boxcov.result_check import check_result, properties, tolerance
from helpers.error_models import make_error_model


def found(C: torch.Tensor) -> Detections:
    m, D = C.shape[:2]
    fields, zero = tuple("abcdefghi"[:D]), torch.zeros(m, dtype=torch.long)
    return Detections(torch.zeros(m, D), torch.ones(m), zero, zero, fields, ("car",), C)


def random_covariances(
    m: int, D: int, rank: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * D + rank)
    scales = torch.logspace(-4, 4, D)  # a heading in radians beside a position in metres, and worse
    A = torch.randn(m, D, rank, generator=generator).double() * scales[:, None]
    return (A @ A.transpose(1, 2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 2, 9])
def test_a_covariance_of_any_rank_and_scale_passes(rank, dtype) -> None:
    for scale in (1e-12, 1.0, 1e12):
        check_result(found(random_covariances(50, 9, rank, dtype) * scale), "m")


@pytest.mark.parametrize("seed", range(20))
def test_the_check_agrees_with_the_eigenvalues(seed) -> None:
    """Against numpy's eigenvalues of the correlation, except where rounding decides."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(40, 5, 5, generator=generator, dtype=torch.float64)
    C = A @ A.transpose(1, 2)
    C = C - torch.rand(40, 1, 1, generator=generator, dtype=torch.float64) * 0.3 * torch.diag_embed(
        C.diagonal(dim1=1, dim2=2)
    )
    spread = C.diagonal(dim1=1, dim2=2).sqrt()
    least = torch.linalg.eigvalsh(C / spread[:, :, None] / spread[:, None])[:, 0]
    good = properties(C)["positive semi-definite"]
    assert good[least > -0.9 * tolerance(C)].all()
    assert not good[least < -1.1 * tolerance(C)].any()
    assert 0 < int(good.sum()) < 40


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda C: C[1, 0, 0].fill_(float("nan")), "finite"),
        (lambda C: C[1, 0, 1].fill_(float("inf")), "finite"),
        (lambda C: C[1, 0, 1].add_(0.1 * (C[1, 0, 0] * C[1, 1, 1]).sqrt()), "symmetric"),
        (lambda C: C[1, 2, 2].neg_(), "positive semi-definite"),
        (
            lambda C: C[1, 2, 2].zero_(),
            "positive semi-definite",
        ),  # no variance, yet a covariance with others
        (lambda C: C[1].neg_(), "positive semi-definite"),
    ],
)
def test_the_violated_property_is_named(spoil, what) -> None:
    C = random_covariances(3, 3, 3)
    spoil(C)
    with pytest.raises(
        NotFiniteError, match=rf"m: the covariance of 1 of 3 boxes is not {what} \(box 1: "
    ):
        check_result(found(C), "m")


@pytest.mark.parametrize("name", ["score_variance", "score_covariance"])
def test_the_logits_row_must_be_finite(name) -> None:
    row = {"score_variance": torch.ones(3), "score_covariance": torch.zeros(3, 2)}
    row[name][2] = float("nan")
    with pytest.raises(NotFiniteError, match="1 of 3 boxes is not finite with the score's logit"):
        check_result(replace(found(random_covariances(3, 2, 2)), **row), "m")


def test_no_boxes() -> None:
    check_result(found(torch.zeros(0, 3, 3)), "m")


def calibrated() -> Detections:
    """Three boxes with the results of an error model that knows nothing about the field b."""
    plain = found(random_covariances(3, 3, 3))
    model = make_error_model(plain.fields, plain.classes)
    unit = model.unit.clone()
    unit[1] = torch.nan
    return replace(model, unit=unit).apply(plain)


def test_results_of_an_error_model_pass() -> None:
    assert check_result(calibrated(), "m")
    assert check_result(calibrated()[:0], "m")


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("predictive", float("nan"), "predictive covariance of 1 of 3 boxes is not finite"),
        ("predictive", float("inf"), "predictive covariance of 1 of 3 boxes is not finite"),
        ("predictive", -5.0, "predictive covariance of 1 of 3 boxes is not positive semi"),
        ("scale", 0.0, "scale of the error of 1 of 3 boxes is not finite and above 0"),
        ("scale", float("nan"), "scale of the error of 1 of 3 boxes is not finite and above 0"),
        ("scale", float("inf"), "scale of the error of 1 of 3 boxes is not finite and above 0"),
        ("region_widths", -0.1, "half width of the region of 1 of 3 boxes is not at least 0"),
        ("joint_widths", float("nan"), "half width of the region of 1 of 3 boxes is not at least"),
        ("no_object", 1.1, "probability of 1 of 3 boxes is not between 0 and 1"),
        ("iou_below", float("nan"), "probability of 1 of 3 boxes is not between 0 and 1"),
        ("labels", -1, "label of 1 of 3 boxes is not the number of a class"),
        ("labels", 1, "label of 1 of 3 boxes is not the number of a class"),
        ("boxes", float("nan"), "position or size of 1 of 3 boxes is not finite"),
        ("boxes", float("inf"), "position or size of 1 of 3 boxes is not finite"),
        ("scores", float("nan"), "score of 1 of 3 boxes is not finite"),
    ],
)
def test_a_number_out_of_range_is_named(name, value, what) -> None:
    values = getattr(calibrated(), name).clone()
    values[(2,) + (0,) * (values.dim() - 1)] = value
    with pytest.raises(NotFiniteError, match=f"m: the {what}"):
        check_result(replace(calibrated(), **{name: values}), "m")


def test_known_fields_may_not_be_unknown() -> None:
    """A model says which fields it knows; a single box alone could not tell."""
    one, unknown = calibrated()[0], torch.tensor([False, True, False])
    assert check_result(one, "m", unknown=unknown)
    with pytest.raises(NotFiniteError, match="scale of the error"):
        check_result(replace(one, scale=torch.full((1, 3), torch.nan)), "m", unknown=unknown)


def test_variances_below_zero_are_refused() -> None:
    C = torch.diag(torch.tensor([1.0, -1e-16])).expand(2, 2, 2)
    with pytest.raises(NotFiniteError, match="covariance of 2 of 2 boxes is not free of negative"):
        check_result(found(C), "m")


def test_a_flag_is_read_together_with_the_numbers() -> None:
    assert check_result(calibrated(), "m", also=torch.tensor(True))
    assert not check_result(calibrated(), "m", also=torch.tensor(False))
    assert not check_result(calibrated()[:0], "m", also=torch.tensor(False))


@pytest.mark.parametrize("fields", [("x", "y", "vx", "vy"), ("vx", "x", "vy", "y")])
@pytest.mark.parametrize("unknown", ["vx", "y"])
def test_only_velocities_may_be_unknown(fields: tuple[str, ...], unknown: str) -> None:
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.long)
    boxes = torch.ones(1, 4)
    boxes[0, fields.index(unknown)] = torch.nan
    detections = Detections(boxes, one, zero, zero, fields, ("car",))
    if unknown == "vx":
        check_result(detections, "m")
    else:
        with pytest.raises(NotFiniteError, match="position or size"):
            check_result(detections, "m")
