from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from boxcov import GLM, MCGLM, MCI, BoxcovError, ExactGLM, FitOptions, Posterior, fit
from boxcov.detectors.tiny import TinyCenter
from boxcov.error_model.model_file import error_model_text
from boxcov.posterior.compress import difference, pack
from boxcov.posterior.kronecker_block import Eigendecomposition
from helpers.error_models import make_error_model
from helpers.nets import CASES
from oracles.dense import dense_covariance, relative

GROUPED, TRANSPOSED = (
    next(case for case in CASES if case.name == name) for name in ("conv2d grouped", "transposed")
)


@pytest.fixture(scope="module")
def smaller(posterior: Posterior) -> Posterior:
    return posterior.compress(0.01)


def change(new: torch.Tensor, old: torch.Tensor) -> float:
    """Return the largest relative change of a variance over all directions."""
    L = torch.linalg.cholesky(old.double())
    half = torch.linalg.solve_triangular(L, new.double(), upper=False)
    ratios = torch.linalg.eigvalsh(torch.linalg.solve_triangular(L, half.T, upper=False))
    return float((ratios - 1).abs().max())


@pytest.mark.parametrize("error", [0.3, 0.01, 1e-4])
@pytest.mark.parametrize("case", [GROUPED, TRANSPOSED], ids=lambda case: case.name)
def test_variances_change_by_at_most_the_bound(case, error: float) -> None:
    """Compare dense covariances, under priors from weak to strong."""
    detector = case.detector()
    whole = fit(detector, [case.frames(detector)], n_data=40, prior_precision=1.0)
    for tau in (1e-2, 1.0, 1e2, 1e4):
        under = whole.with_prior(tau)
        found = under.compress(error)
        changes = [
            change(dense_covariance(found, name), dense_covariance(under, name))
            for name in under.blocks
        ]
        assert max(changes) <= found.error * (1 + 1e-6) + 1e-12
        assert found.error <= error


def test_the_bound_is_tight(posterior: Posterior, smaller: Posterior) -> None:
    """Some variance changes by a large part of the stated bound."""
    name = "head.branches.size.3"
    exact, found = posterior.restricted([name]), smaller.restricted([name])
    own = posterior.restricted([name]).compress(0.01)
    changed = change(dense_covariance(found, name), dense_covariance(exact, name))
    assert changed <= smaller.error + 1e-5  # covariances in float32
    assert change(dense_covariance(own, name), dense_covariance(exact, name)) > 0.3 * own.error


def test_every_predictor_stays_within_the_bound(
    tiny: TinyCenter, posterior: Posterior, smaller: Posterior, image
) -> None:
    exact, found = (ExactGLM(tiny, p)(image) for p in (posterior, smaller))
    assert len(exact)
    assert torch.equal(exact.boxes, found.boxes)
    diagonal = [d.covariance.diagonal(dim1=1, dim2=2) for d in (found, exact)]
    assert float((diagonal[0] / diagonal[1] - 1).abs().max()) <= smaller.error + 1e-5
    assert relative(GLM(tiny, smaller)(image).covariance, found.covariance) < 1e-4
    traces = MCGLM(tiny, smaller, samples=200)(image).uncertainty / found.uncertainty
    # five standard errors of a variance from 200 samples
    assert float((traces - 1).abs().max()) < 0.5
    assert bool((MCI(tiny, smaller.with_prior(1e4), samples=3)(image).uncertainty > 0).all())


def test_a_strong_prior_leaves_little_to_store(posterior: Posterior) -> None:
    sizes = [
        posterior.with_prior(tau).compress(0.01).storage().stored for tau in (1e-4, 1.0, 1e4, 1e12)
    ]
    assert sizes == sorted(sizes, reverse=True)
    # under a weak prior the reflections alone save almost half
    assert sizes[0] < 0.55 * posterior.storage().stored
    assert sizes[1] < 0.3 * posterior.storage().stored
    nothing = posterior.with_prior(1e12).compress(0.01)
    assert all(block.Q.packed.rank == 0 for block in nothing.blocks.values())
    assert torch.allclose(
        nothing.sample(1)["head.shared.0.weight"].std(), torch.tensor(1e-6), rtol=0.1
    )


def test_a_smaller_bound_keeps_more(posterior: Posterior) -> None:
    ranks = [posterior.compress(e).blocks["head.shared.0"].Q.packed.rank for e in (0.3, 0.01, 1e-4)]
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[2]


def test_shared_factors_stay_shared_and_files_give_the_same(
    tmp_path, tiny: TinyCenter, posterior: Posterior, smaller: Posterior
) -> None:
    calibrated = smaller.with_error_model(make_error_model(tiny.box_fields, tiny.classes))
    calibrated.save(tmp_path / "p")
    again = Posterior.load(tmp_path / "p", tiny)
    assert (tmp_path / "p").stat().st_size < 0.3 * posterior.storage().stored
    assert again.error == smaller.error
    assert again.error_model is not None
    assert error_model_text(again.error_model) == error_model_text(calibrated.error_model)
    assert again.blocks["head.branches.size.0"].Q is again.blocks["head.branches.rot.0"].Q
    for name, block in smaller.blocks.items():
        assert torch.equal(again.blocks[name].Q.vectors, block.Q.vectors)
        assert torch.equal(again.variances(name), smaller.variances(name))
    again.save(tmp_path / "q")
    assert (tmp_path / "q").read_bytes() == (tmp_path / "p").read_bytes()


def test_another_prior_has_another_bound(
    tmp_path, tiny: TinyCenter, posterior: Posterior, smaller: Posterior
) -> None:
    name = "head.branches.size.3"
    for tau in (0.25, 4.0):
        under = smaller.with_prior(tau)
        assert (under.error > smaller.error) == (tau < 1)
        exact = posterior.with_prior(tau)
        assert change(dense_covariance(under, name), dense_covariance(exact, name)) <= under.error
    lost = smaller.with_prior(1e-6)
    assert lost.error == float("inf")
    lost.save(tmp_path / "p")
    assert Posterior.load(tmp_path / "p", tiny).error == float("inf")


def test_operations_on_a_compressed_posterior(
    tiny: TinyCenter, posterior: Posterior, smaller: Posterior, train_frames: list
) -> None:
    assert smaller.restricted(["head.shared.0"]).error == smaller.error
    assert (
        smaller.to("cpu").blocks["head.shared.0"].Q.packed
        is smaller.blocks["head.shared.0"].Q.packed
    )
    with pytest.raises(BoxcovError, match="lost the small eigenvalues"):
        smaller.paper()
    with pytest.raises(BoxcovError, match="already compressed"):
        smaller.compress()
    shared = fit(tiny, train_frames[:1], depth=["head.shared.0"], options=FitOptions(ekfac=True))
    with pytest.raises(BoxcovError, match=r"Fisher of head\.shared\.0 comes from a second pass"):
        shared.compress()
    with pytest.raises(BoxcovError, match="compressing needs form='eigen'"):
        posterior.paper().compress()
    with pytest.raises(BoxcovError, match=r"above 0 and below 1, got 0"):
        posterior.compress(0)


def test_any_reflections_give_an_orthonormal_basis(posterior: Posterior) -> None:
    factor = posterior.blocks["head.shared.0"].Q
    n = factor.values.shape[1]
    packed = pack(
        factor.vectors.flip(2)[:, :, :40], factor.values.flip(1)[:, :40], torch.zeros(1), exact=3
    )
    damaged = replace(
        packed, rounded=torch.randint(-32768, 32767, packed.rounded.shape).to(torch.int16)
    )
    for each in (packed, damaged):
        vectors, values = each.unpack()
        assert (
            relative(vectors[0].T.double() @ vectors[0].double(), torch.eye(n, dtype=torch.float64))
            < 1e-6
        )
        assert bool((values.diff() >= 0).all())
    top = packed.unpack()[0][:, :, -40:]
    assert float(((top * factor.vectors[:, :, -40:]).sum(1).abs() - 1).abs().max()) < 1e-6


def test_the_bound_notices_a_wrong_basis(posterior: Posterior) -> None:
    """The stated bound is computed from the stored basis."""
    factor = posterior.blocks["head.shared.0"].Q
    floor = torch.full((1,), 1e-3, dtype=torch.float64)
    turned = Eigendecomposition(factor.vectors.roll(1, 2), factor.values)
    assert difference(factor, factor, floor) < 1e-4
    assert difference(factor, turned, floor) > 0.1


@pytest.mark.parametrize(
    "damage", ["short", "more", "type", "nan", "huge", "lacking", "rank", "layer", "twice"]
)
def test_damaged_packed_files_are_refused(
    tmp_path, tiny: TinyCenter, smaller: Posterior, damage: str
) -> None:
    path = tmp_path / "p.safetensors"
    smaller.restricted(["head.shared.0", "head.branches.size.3"]).save(path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(file.metadata()["boxcov.posterior"])
    first = {name: f"factor.0.{name}" for name in ("exact", "rounded", "scale", "values", "rest")}
    if damage == "short":
        tensors[first["rounded"]] = tensors[first["rounded"]][:, :-1].clone()
    elif damage == "more":
        tensors[first["scale"]] = torch.zeros(1, 10_000)
    elif damage == "type":
        tensors[first["rounded"]] = tensors[first["rounded"]].float()
    elif damage == "nan":
        tensors[first["values"]][0, 0] = float("nan")
    elif damage == "huge":
        tensors[first["scale"]][0, 0] = 1e30
    elif damage == "lacking":
        del tensors[first["rest"]]
    elif damage == "rank":
        tensors[first["values"]] = torch.zeros(1)
    elif damage == "layer":  # a file of kilobytes that claims a factor of terabytes
        about["blocks"][0]["shape"] = [16, 2**20, 3, 3]
        for name in ("exact", "rounded", "scale", "values"):
            tensors[first[name]] = tensors[first[name]][:, :0].clone()
    else:
        about["blocks"].append(about["blocks"][0])
    save_file(tensors, path, {"boxcov.posterior": json.dumps(about)})
    with pytest.raises(
        BoxcovError, match=r"p\.safetensors: not a boxcov posterior, or a damaged one"
    ):
        Posterior.load(path, tiny)
