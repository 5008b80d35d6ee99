from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from boxcov import BoxcovError, FitOptions, Posterior, fit
from boxcov.detectors.tiny import TinyCenter
from boxcov.posterior.kronecker_block import Eigendecomposition
from helpers.nets import CASES
from oracles.dense import dense_covariance, flat, log_evidence, relative

GROUPED, TRANSPOSED = (
    next(case for case in CASES if case.name == name) for name in ("conv2d grouped", "transposed")
)


def posterior_of(case, **options) -> Posterior:
    detector = case.detector()
    return fit(
        detector,
        [case.frames(detector)],
        n_data=40,
        prior_precision=0.5,
        options=FitOptions(**options),
    )


def empirical(posterior: Posterior, name: str, count: int, seed: int = 0) -> torch.Tensor:
    draws = posterior.sample(count, torch.Generator().manual_seed(seed))
    rows = flat(posterior.blocks[name], draws)
    return rows.T @ rows / count


@pytest.mark.parametrize("form", ["eigen", "paper"])
@pytest.mark.parametrize("case", [GROUPED, TRANSPOSED], ids=lambda case: case.name)
def test_covariance_of_20000_samples_is_sigma(case, form: str) -> None:
    posterior = posterior_of(case, form=form, jitter=0.1)
    for name, block in posterior.blocks.items():
        found, expected = empirical(posterior, name, 20_000), dense_covariance(posterior, name)
        # in whitened coordinates every entry has a standard error of at most sqrt(2 / 20000) = 0.01
        L = torch.linalg.cholesky(expected)
        white = torch.linalg.solve_triangular(
            L, torch.linalg.solve_triangular(L, found, upper=False).T, upper=False
        )
        off = (white - torch.eye(len(white), dtype=white.dtype)).abs()
        assert float(off.max()) < 0.06
        # 0.0075 is expected, with a standard error of a tenth of it for the smallest layer
        assert float(off.square().mean().sqrt()) < 0.0098
        assert len(white) == block.size


def test_cholesky_and_eigenbasis_samplers_agree_in_law() -> None:
    """Equal mean squares in random directions, for a pure Kronecker covariance."""
    paper = posterior_of(GROUPED, form="paper", jitter=0.1)
    name = next(iter(paper.blocks))
    block = paper.blocks[name]
    generator = torch.Generator().manual_seed(5)
    by_cholesky = flat(block, paper.sample(20_000, generator))
    xi = torch.randn(
        20_000, 2, block.layer.n_out, block.layer.n_in, generator=generator, dtype=torch.float64
    )
    by_eigenbasis = block.unrotate(xi * paper.variances(name).sqrt()).flatten(1)
    directions = torch.randn(block.size, 20, generator=generator, dtype=torch.float64)
    ratio = (by_cholesky @ directions).square().mean(0) / (
        by_eigenbasis @ directions
    ).square().mean(0)
    assert float((ratio - 1).abs().max()) < 0.06  # the standard error of each is 0.014


def test_cholesky_factors_match_the_paper() -> None:
    paper = posterior_of(GROUPED, form="paper", jitter=0.1)
    for block in paper.blocks.values():
        L_Q, L_H = block.Q.cholesky(0.1), block.H.cholesky(0.1)
        for L, factor in ((L_Q, block.Q), (L_H, block.H)):
            n = L.shape[1]
            jitter = (
                0.1
                * factor.matrix.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
                * torch.eye(n, dtype=L.dtype)
            )
            assert relative(L @ L.transpose(1, 2), factor.matrix + jitter) < 1e-12
            assert torch.equal(L, L.tril())


def test_samples_follow_the_generator_and_nothing_else() -> None:
    posterior = posterior_of(GROUPED)
    torch.manual_seed(1)
    first = posterior.sample(3, torch.Generator().manual_seed(9))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = posterior.sample(3, torch.Generator().manual_seed(9))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)
    other = posterior.sample(3, torch.Generator().manual_seed(10))
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("form", ["eigen", "paper"])
def test_quadratic_forms(form: str) -> None:
    posterior = posterior_of(TRANSPOSED, form=form, jitter=0.1)
    J = {
        name: torch.randn(2, 3, *eta.shape[1:], dtype=torch.float64)
        for name, eta in posterior.sample(1).items()
    }
    expected = sum(
        flat(block, J) @ dense_covariance(posterior, name) @ flat(block, J).transpose(1, 2)
        for name, block in posterior.blocks.items()
    )
    assert relative(posterior.quadratic(J), expected) < 1e-9


def test_the_evidence_is_that_of_the_dense_gaussian() -> None:
    posterior = posterior_of(GROUPED)
    expected = 0.0
    detector = GROUPED.detector()
    theta = {name: p.detach() for name, p in detector.named_parameters()}
    for name, block in posterior.blocks.items():
        w, tau = flat(block, theta), posterior.tau(name)
        precision = torch.linalg.inv(dense_covariance(posterior, name))
        expected += 0.5 * float(
            len(w) * torch.tensor(tau).log() - tau * w @ w - torch.linalg.slogdet(precision)[1]
        )
    assert log_evidence(posterior) == pytest.approx(expected, rel=1e-8)


def test_tuning_finds_the_maximum() -> None:
    posterior = posterior_of(GROUPED)
    tuned = posterior.optimize_prior_precision()
    best = log_evidence(tuned)
    assert isinstance(tuned.prior_precision, float)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert log_evidence(posterior.with_prior(factor * tuned.prior_precision)) < best
    layered = posterior.optimize_prior_precision(per_layer=True)
    assert set(layered.prior_precision) == set(posterior.blocks)
    assert log_evidence(layered) >= best


def test_a_dead_output_has_the_variance_of_the_prior() -> None:
    posterior = posterior_of(GROUPED)
    name = "net.1" if "net.1" in posterior.blocks else next(iter(posterior.blocks))
    block = posterior.blocks[name]
    dead = replace(block, H=Eigendecomposition(block.H.vectors, torch.zeros_like(block.H.values)))
    flat_posterior = replace(posterior, blocks={name: dead})
    assert torch.allclose(flat_posterior.variances(name), torch.tensor(2.0, dtype=torch.float64))
    with pytest.raises(BoxcovError, match="is zero and has no inverse: exclude the layer, or use"):
        flat_posterior.paper()


def test_eigenvalues_are_never_negative() -> None:
    x = torch.randn(3, 50, dtype=torch.float64)
    # rank 3 of 50: rounding alone would give negative ones
    eigen = Eigendecomposition.of((x.T @ x)[None], torch.float32)
    assert float(eigen.values.min()) == 0


# files


def test_save_and_load_give_the_same_posterior(
    tmp_path, tiny: TinyCenter, posterior: Posterior
) -> None:
    path = tmp_path / "p.safetensors"
    posterior.save(path)
    again = Posterior.load(path, tiny)
    assert again.n_data == posterior.n_data
    assert (again.form, again.fisher, again.frames, again.loss, again.depth) == (
        "eigen",
        "empirical",
        200,
        posterior.loss,
        "head",
    )
    for name, block in posterior.blocks.items():
        assert torch.equal(again.variances(name), posterior.variances(name))
        assert again.blocks[name].layer == block.layer
    draws = [p.sample(2, torch.Generator().manual_seed(0)) for p in (posterior, again)]
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in draws[0])
    first, second = again.blocks["head.branches.size.0"], again.blocks["head.branches.rot.0"]
    assert first.Q is second.Q
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]


def test_storage_counts_what_is_stored(tmp_path, posterior: Posterior) -> None:
    storage = posterior.storage()
    inputs, outputs = [288, 4 * [144], 4 * [144]], [16, 4 * [16], [2, 2, 2, 2]]
    flat_in, flat_out = [288, *inputs[1], *inputs[2]], [16, *outputs[1], *outputs[2]]
    assert storage.factors == 4 * sum(n * n for n in flat_in + flat_out)
    posterior.save(tmp_path / "p")
    assert 0 <= (tmp_path / "p").stat().st_size - storage.stored < 20_000  # the header
    assert storage.stored < storage.factors  # three of four equal factors are not stored again


def test_layerwise_prior_and_paper_form_survive_a_file(
    tmp_path, tiny: TinyCenter, posterior: Posterior
) -> None:
    layered = posterior.with_prior({name: float(i + 1) for i, name in enumerate(posterior.blocks)})
    layered.save(tmp_path / "l")
    assert Posterior.load(tmp_path / "l", tiny).prior_precision == layered.prior_precision
    posterior.paper(jitter=1e-3).save(tmp_path / "p")
    assert Posterior.load(tmp_path / "p", tiny).jitter == 1e-3


def test_a_posterior_of_other_weights_is_refused(
    tmp_path, tiny: TinyCenter, posterior: Posterior
) -> None:
    posterior.save(tmp_path / "p")
    other = TinyCenter(seed=1)
    with pytest.raises(BoxcovError) as error:
        Posterior.load(tmp_path / "p", other)
    from boxcov._torch.modules import fingerprint

    assert fingerprint(tiny)[:12] in str(error.value)
    assert fingerprint(other)[:12] in str(error.value)
    assert str(tmp_path / "p") in str(error.value)


@pytest.mark.parametrize(
    "damage", ["missing", "empty", "text", "truncated", "other safetensors", "folder"]
)
def test_damaged_files_are_named(
    tmp_path, tiny: TinyCenter, posterior: Posterior, damage: str
) -> None:
    path = tmp_path / "p.safetensors"
    if damage == "empty":
        path.touch()
    elif damage == "text":
        path.write_text("not a posterior")
    elif damage == "truncated":
        posterior.save(path)
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "other safetensors":
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(1)}, path)
    elif damage == "folder":
        path.mkdir()
    reasons = "no such file|not a boxcov posterior|a safetensors file of another program"
    with pytest.raises(BoxcovError, match=rf"p\.safetensors: ({reasons})"):
        Posterior.load(path, tiny)


def test_a_failed_write_leaves_no_file(tmp_path, posterior: Posterior) -> None:
    with pytest.raises(BoxcovError, match="cannot be written"):
        posterior.save(tmp_path / "absent" / "p")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BoxcovError, match="cannot be written"):
        posterior.save(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_moving_keeps_factors_shared(posterior: Posterior) -> None:
    moved = posterior.to("meta")
    assert moved.device.type == "meta"
    assert moved.blocks["head.branches.size.0"].Q is moved.blocks["head.branches.rot.0"].Q


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_samples_are_the_same_on_the_gpu(posterior: Posterior) -> None:
    here = posterior.sample(2, torch.Generator().manual_seed(0))
    there = posterior.to("cuda").sample(2, torch.Generator().manual_seed(0))
    assert all(relative(there[name].cpu(), here[name]) < 1e-4 for name in here)


# samples form a sequence


def test_fewer_samples_are_the_first_of_more(posterior) -> None:
    many, few = (posterior.sample(k, torch.Generator().manual_seed(5)) for k in (9, 4))
    for name, eta in few.items():
        torch.testing.assert_close(eta, many[name][:4])


def test_samples_of_a_layer_do_not_depend_on_other_layers(posterior) -> None:
    names = list(posterior.blocks)[2:4]
    whole, part = (
        p.sample(3, torch.Generator().manual_seed(5))
        for p in (posterior, posterior.restricted(names))
    )
    assert part
    for name, eta in part.items():
        torch.testing.assert_close(eta, whole[name])


def test_a_generator_gives_new_samples_each_time(posterior) -> None:
    generator = torch.Generator().manual_seed(5)
    first, second = (next(iter(posterior.sample(2, generator).values())) for _ in range(2))
    assert not torch.allclose(first, second)


def test_repr_is_at_most_ten_lines() -> None:
    posterior = posterior_of(GROUPED, ekfac=True)
    assert len(repr(posterior).splitlines()) <= 10
    assert "EKFAC: 2 layers" in repr(posterior)
    assert "n_data=40" in repr(posterior)
