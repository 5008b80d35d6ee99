"""EKFAC against per-frame gradients in float64."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from boxcov import BoxcovError, FitOptions, Posterior, fit
from boxcov.data import batched, shapes
from boxcov.detectors.tiny import TinyCenter
from helpers.nets import CASES, Case
from oracles.dense import eigenbasis_covariance, flat, frame_gradients, log_evidence, relative

GROUPED = next(case for case in CASES if case.name == "conv2d grouped")


def exact_fisher(block, gradients: dict[str, Tensor]) -> Tensor:
    """The Fisher of one layer (w, w), with zeros between its groups."""
    g = flat(block, gradients).unflatten(1, (block.layer.geometry.groups, -1))  # (B, G, w)
    return torch.block_diag(*torch.einsum("bgi,bgj->gij", g, g) / len(g))


def basis(block) -> Tensor:
    """The eigenbasis of one layer (w, w), with zeros between its groups."""
    return torch.block_diag(*map(torch.kron, block.H.vectors, block.Q.vectors))


def approximation(block) -> Tensor:
    return (basis(block) * block.curvature.flatten()) @ basis(block).T


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ekfac_is_the_diagonal_of_the_fisher_in_the_eigenbasis(case: Case) -> None:
    detector = case.detector()
    inputs, targets = case.frames(detector, count=7)
    frames = [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]
    plain = fit(detector, frames)
    posterior = fit(detector, frames, options=FitOptions(ekfac=True))
    gradients = frame_gradients(detector, inputs, targets)
    for name, block in posterior.blocks.items():
        F = exact_fisher(block, gradients)
        B = basis(block)
        assert relative(block.curvature.flatten(), (B.T @ F @ B).diagonal()) < 1e-10
        assert float((approximation(block) - F).norm()) <= float(
            (approximation(plain.blocks[name]) - F).norm()
        )
        assert float(block.curvature.sum()) == pytest.approx(float(F.trace()))


def refined_posterior(**more) -> Posterior:
    detector = GROUPED.detector()
    return fit(
        detector,
        [GROUPED.frames(detector)],
        n_data=40,
        prior_precision=0.5,
        options=FitOptions(ekfac=True, **more),
    )


def dense(posterior: Posterior, name: str) -> Tensor:
    """The inverse of the dense precision."""
    F = approximation(posterior.blocks[name])
    return torch.linalg.inv(
        posterior.n_data * F + posterior.tau(name) * torch.eye(len(F), dtype=F.dtype)
    )


def test_samples_quadratic_forms_and_evidence_match_dense() -> None:
    posterior = refined_posterior()
    assert all(block.ekfac_eigenvalues is not None for block in posterior.blocks.values())
    draws = posterior.sample(20_000, torch.Generator().manual_seed(0))
    J = {
        name: torch.randn(2, 3, *eta.shape[1:], dtype=torch.float64) for name, eta in draws.items()
    }
    theta = {name: p.detach() for name, p in GROUPED.detector().named_parameters()}
    quadratic, evidence = 0, 0.0
    for name, block in posterior.blocks.items():
        expected = dense(posterior, name)
        assert relative(eigenbasis_covariance(posterior, name), expected) < 1e-9
        rows, w = flat(block, draws), flat(block, theta)
        L = torch.linalg.cholesky(expected)
        white = torch.linalg.solve_triangular(L, (rows.T @ rows) / len(rows), upper=False)
        white = torch.linalg.solve_triangular(L, white.T, upper=False)
        # the standard error is at most 0.01
        assert float((white - torch.eye(len(white), dtype=white.dtype)).abs().max()) < 0.06
        quadratic = quadratic + flat(block, J) @ expected @ flat(block, J).transpose(1, 2)
        evidence += 0.5 * float(
            len(w) * torch.tensor(0.5).log() - 0.5 * w @ w + torch.linalg.slogdet(expected)[1]
        )
    assert relative(posterior.quadratic(J), quadratic) < 1e-9
    assert log_evidence(posterior) == pytest.approx(evidence, rel=1e-8)
    tuned = posterior.optimize_prior_precision()
    for factor in (0.8, 1.25):
        other = posterior.with_prior(factor * tuned.prior_precision)
        assert log_evidence(other) < log_evidence(tuned)
    layered = posterior.optimize_prior_precision(per_layer=True)
    assert log_evidence(layered) >= log_evidence(tuned)


@pytest.mark.parametrize("sizes", [[1] * 6, [4, 2], [6]], ids=str)
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_fit_does_both_passes_over_the_same_frames(fisher: str, sizes: list[int]) -> None:
    detector = TinyCenter().double()
    frames = [(inputs.double(), targets) for inputs, targets in shapes.frames(count=6)]
    items = (
        [batched(frames, 6)[0]]
        if sizes == [6]
        else [batched(frames[:4], 4)[0], batched(frames[4:], 2)[0]]
        if len(sizes) == 2
        else frames
    )
    told = []
    posterior = fit(
        detector,
        items,
        options=FitOptions(ekfac=True),
        depth=["head.branches.size"],
        fisher=fisher,
        progress=lambda *x: told.append(x),
    )
    assert told == [(i + 1, 2 * len(items)) for i in range(2 * len(items))]
    assert all(float(block.ekfac_eigenvalues.sum()) > 0 for block in posterior.blocks.values())
    if fisher == "empirical":  # the batch size does not matter
        single = fit(detector, frames, options=FitOptions(ekfac=True), depth=["head.branches.size"])
        for name, block in posterior.blocks.items():
            assert float(block.ekfac_eigenvalues.sum()) == pytest.approx(
                float(single.blocks[name].ekfac_eigenvalues.sum())
            )


def test_a_fraction_takes_the_same_share_twice() -> None:
    detector, frames = (
        GROUPED.detector(),
        [GROUPED.frames(GROUPED.detector(), count=1, seed=seed) for seed in range(10)],
    )
    posterior = fit(detector, frames, options=FitOptions(fraction=0.3, seed=4, ekfac=True))
    order = sorted(torch.randperm(10, generator=torch.Generator().manual_seed(4))[:3].tolist())
    drawn = (
        sum(
            float(g.square().sum())
            for i in order
            for g in frame_gradients(detector, *frames[i]).values()
        )
        / 3
    )
    assert sum(
        float(block.ekfac_eigenvalues.sum()) for block in posterior.blocks.values()
    ) == pytest.approx(drawn)
    assert posterior.n_data == 10


# files


def test_save_and_load(tmp_path) -> None:
    posterior = refined_posterior()
    posterior.save(tmp_path / "p")
    again = Posterior.load(tmp_path / "p", GROUPED.detector())
    for name in posterior.blocks:
        assert torch.equal(again.variances(name), posterior.variances(name))
        # a product of the same numbers in another memory layout may be summed in another order
        before, after = (eigenbasis_covariance(one, name) for one in (posterior, again))
        torch.testing.assert_close(after, before)
    assert (
        posterior.storage().stored > replace(posterior, blocks=fit_plain().blocks).storage().stored
    )
    assert posterior.to("meta").blocks["net.2"].ekfac_eigenvalues.device.type == "meta"


def fit_plain() -> Posterior:
    detector = GROUPED.detector()
    return fit(detector, [GROUPED.frames(detector)], n_data=40, prior_precision=0.5)


def rewritten(path, change) -> None:
    """Write the file again with a changed header or changed tensors."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["boxcov.posterior"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(about, tensors)
    save_file(tensors, path, {"boxcov.posterior": json.dumps(about)})


def test_old_files_load_and_readers_of_old_files_refuse_new_ones(tmp_path) -> None:
    plain, path = fit_plain(), tmp_path / "p"
    plain.save(path)
    formats = []
    rewritten(path, lambda about, _: formats.append(about["format"]) or about.pop("skipped"))
    assert Posterior.load(path, GROUPED.detector()).skipped == 0
    refined_posterior().save(path)
    rewritten(path, lambda about, _: formats.append(about["format"]))
    assert formats == [1, 2]  # readers of format 1 must refuse corrected eigenvalues
    rewritten(path, lambda about, _: about.update(format=4))
    with pytest.raises(BoxcovError, match="in format 4, this version reads up to 3"):
        Posterior.load(path, GROUPED.detector())


def test_wrong_shapes_are_damage(tmp_path) -> None:
    path = tmp_path / "p"
    refined_posterior().save(path)
    rewritten(
        path,
        lambda _, tensors: tensors.update(
            {"corrected.net.0": tensors["corrected.net.0"][:, :1].clone()}
        ),
    )
    with pytest.raises(BoxcovError, match=r"damaged one .*corrected eigenvalues of net\.0"):
        Posterior.load(path, GROUPED.detector())


# refusals


def test_the_papers_form_refuses_a_correction() -> None:
    with pytest.raises(
        BoxcovError,
        match=r"Fisher of net\.0, net\.2 comes from a second pass: use form='eigen'",
    ):
        refined_posterior().paper()
    with pytest.raises(BoxcovError, match="ekfac needs form='eigen'"):
        refined_posterior(form="paper")


def test_posteriors_that_cannot_be_refined_are_refused() -> None:
    detector = GROUPED.detector()
    item = GROUPED.frames(detector)
    with pytest.raises(
        BoxcovError, match="reads the frames twice, but a generator can be read only once"
    ):
        fit(detector, (item for _ in range(2)), options=FitOptions(ekfac=True))
    with pytest.raises(BoxcovError, match="fisher='identity' has none"):
        fit(detector, [item], options=FitOptions(ekfac=True), fisher="identity")
