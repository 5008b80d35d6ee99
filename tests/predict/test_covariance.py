from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from boxcov import GLM, MCGLM, MCI, BoxcovError, Detections, ExactGLM, FitOptions, fit
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.errors import NotFiniteError
from boxcov.predict.covariance import _properties, check_covariance, tolerance


def found(C: torch.Tensor) -> Detections:
    m, D = C.shape[:2]
    fields = tuple("abcdefghi"[:D])
    return Detections(
        torch.zeros(m, D), torch.ones(m), torch.zeros(m), torch.zeros(m), fields, ("car",), C
    )


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
        check_covariance(found(random_covariances(50, 9, rank, dtype) * scale), "m", {})


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
    good = _properties(C)["positive semi-definite"]
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
        check_covariance(found(C), "m", {})


@pytest.mark.parametrize("name", ["score_variance", "score_covariance"])
def test_the_logits_row_must_be_finite(name) -> None:
    row = {"score_variance": torch.ones(3), "score_covariance": torch.zeros(3, 2)}
    row[name][2] = float("nan")
    with pytest.raises(NotFiniteError, match="1 of 3 boxes is not finite with the score's logit"):
        check_covariance(replace(found(random_covariances(3, 2, 2)), **row), "m", {})


def test_no_boxes() -> None:
    check_covariance(found(torch.zeros(0, 3, 3)), "m", {})


@pytest.mark.parametrize("method", [MCGLM, GLM, ExactGLM])
def test_every_method_checks_its_covariances(method, tiny, posterior, image, monkeypatch) -> None:
    model = method(tiny, posterior)
    before = model.predict

    def spoiled(point):
        result = before(point)
        assert result.covariance is not None
        result.covariance[0].neg_()
        return result

    assert len(model(image))
    monkeypatch.setattr(model, "predict", spoiled)
    with pytest.raises(BoxcovError, match="is not positive semi-definite"):
        model(image)


# determinism


def test_same_seed_same_bytes(tmp_path) -> None:
    """Both the posterior's file and the predictions, on a CPU."""
    frames, image = shapes.frames(count=4), shapes.frames(count=1, seed=7)[0][0]
    written = []
    for run in ("a", "b"):
        detector = TinyCenter(seed=0)
        posterior = fit(
            detector,
            frames,
            prior_precision=1.0,
            options=FitOptions(seed=3),
            fisher="mc",
            n_data=100,
        )
        posterior.save(tmp_path / f"{run}.posterior")
        models = (
            MCGLM(detector, posterior, seed=1),
            ExactGLM(detector, posterior),
            MCI(detector, seed=1),
            GLM(detector, posterior, max_boxes=2),
        )
        for number, model in enumerate(models):
            model(image).save(tmp_path / f"{run}.{number}")
        written.append(
            [(tmp_path / f"{run}.{part}").read_bytes() for part in ("posterior", 0, 1, 2, 3)]
        )
    assert written[0] == written[1]
    other = fit(
        TinyCenter(seed=0),
        frames,
        prior_precision=1.0,
        options=FitOptions(seed=4),
        fisher="mc",
        n_data=100,
    )
    other.save(tmp_path / "c.posterior")
    assert (tmp_path / "c.posterior").read_bytes() != written[0][0]
