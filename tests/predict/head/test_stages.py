"""Covariances by stages against those by instance, for boxes of every number and position."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import boxcov
from boxcov import GLM, MCGLM, BoxcovError, EngineOptions, ExactGLM
from boxcov.predict.forward_mode.derivatives import directional_derivatives, sample_covariance
from boxcov.predict.head import cells, covariance, stages, weight_stacks
from boxcov.predict.head.cells import group_by_kind, plan_own_cells, window_tables
from boxcov.predict.head.separable_variances import Separable, fit_separable
from boxcov.predict.head.stages import head_covariance
from boxcov.predict.route.verification import State
from helpers.centerpoint_cases import frames, pillar_config
from helpers.chosen_cells import TASKS, chosen
from oracles.dense import relative


@pytest.fixture(scope="module")
def data():
    return frames(pillar_config(tasks=TASKS))


@pytest.fixture(scope="module")
def posterior(data):
    return boxcov.fit(chosen(1), data, n_data=1e6, prior_precision=1.0)


def both_ways(detector, posterior, inputs) -> tuple[Tensor, Tensor]:
    """Covariances by stages, from a verified model, and by instances."""
    model = ExactGLM(detector, posterior)
    model(inputs)
    assert model.router.stages_check.state is State.VERIFIED
    fast = model(inputs)
    assert torch.equal(fast.boxes, detector.detect(inputs).boxes)
    with torch.no_grad():
        plain = model.router._head_by_instance(model.linearized.at(inputs)).covariance
    return fast.covariance, plain


@pytest.mark.parametrize("count", [1, 2, 60, 500])
def test_any_number_of_boxes_on_the_whole_map(posterior, data, count: int) -> None:
    fast, plain = both_ways(chosen(count), posterior, data[0][0])
    assert len(fast) == count
    assert (
        float(((fast - plain).flatten(1).norm(dim=1) / plain.flatten(1).norm(dim=1)).max()) < 1e-4
    )


@pytest.mark.parametrize("only", [0, 2])
def test_boxes_of_one_kind_alone(posterior, data, only: int) -> None:
    assert relative(*both_ways(chosen(20, only), posterior, data[0][0])) < 1e-4


def test_several_frames_in_a_batch(posterior, data) -> None:
    assert relative(*both_ways(chosen(30), posterior, data[0][0] + data[1][0])) < 1e-4


@pytest.mark.parametrize(
    "form",
    [
        "eigen",
        "tau of each layer",
        "no prior",
        "paper",
        "corrected",
    ],
)
def test_forms_of_the_posterior(data, form: str) -> None:
    detector = chosen(12, dtype=torch.float64)
    inputs = [points.double() for points in data[0][0]]
    labelled = [([points.double()], targets) for (points,), targets in data]

    def fit(**options) -> boxcov.Posterior:
        chosen = boxcov.FitOptions(**options)
        return boxcov.fit(detector, labelled, n_data=1e4, prior_precision=1.0, options=chosen)

    posterior = {
        "eigen": fit,
        "tau of each layer": lambda: fit().with_prior(
            {name: 1.0 + i for i, name in enumerate(fit().blocks)}
        ),
        "no prior": lambda: fit().with_prior(1e-9),
        "paper": lambda: fit().paper(jitter=1e-2),
        "corrected": lambda: fit(ekfac=True),
    }[form]()
    fast, plain = both_ways(detector, posterior, inputs)
    assert relative(fast, plain) < 1e-9
    # and through the separable form, in the same precision
    found = fit_separable(posterior, ["head.shared.0"], 1e-5)
    if found is not None:
        v = posterior.variances("head.shared.0")[0]
        assert float((variances(found) / v - 1).abs().max()) < 1.1e-5


@pytest.mark.parametrize(
    "depth", [["head.shared"], ["head.tasks"], ["head.tasks.1.reg", "head.shared"], "neck"]
)
def test_posteriors_of_part_of_the_head_and_of_more(data, depth) -> None:
    detector = chosen(12)
    posterior = boxcov.fit(detector, data, depth=depth, n_data=1e4, prior_precision=1.0)
    model = ExactGLM(detector, posterior)
    model(data[0][0])
    assert (
        relative(model(data[0][0]).covariance, GLM(detector, posterior)(data[0][0]).covariance)
        < 1e-4
    )


def variances(found: Separable) -> Tensor:
    """The variances (n_out, n_in) that a separable form of one layer represents."""
    sizes = [*(len(h) for _, h in found.bands), int(found.n_merged > 0)]
    *F, merged = found.F[0].split(sizes, 1)
    bands = [own @ h for own, (_, h) in zip(F, found.bands)]
    return torch.cat([*([merged.expand(-1, found.n_merged)] if found.n_merged else []), *bands], 1)


@pytest.mark.parametrize("fill", [1, 4])
def test_own_cells_per_box_give_the_same_covariance(posterior, data, fill: int) -> None:
    """The plan of a GPU, with padded boxes and windows, on a CPU."""
    detector = chosen(21)
    fast, _ = both_ways(detector, posterior, data[0][0])
    model = ExactGLM(detector, posterior)
    with torch.no_grad():
        model(data[0][0])
        point = model.linearized.at(data[0][0])
        staged = point.linearized.shadow.stages(point.raw, point.selection)
        head = model.router.staged_head.weights
        fillers = {"frame": 0, "row": 0, "column": 0, "kind": 3}
        padded = {
            name: nn.functional.pad(getattr(staged, name), (0, 11), value=value)
            for name, value in fillers.items()
        }
        staged = replace(staged, **padded)
        group = group_by_kind(staged.kind, head, 16)
        rows, plan = plan_own_cells(staged, head, group, window_tables(32, head, fill))
        C, _ = head_covariance(head, plan, rows, staged)
    assert C.shape == (32, 9, 9)
    assert bool(C.isfinite().all())
    assert relative(C[:21], fast) < 1e-5


@pytest.mark.parametrize(("side", "size"), [(1, 3), (3, 3), (5, 3), (3, 5)])
def test_taps_are_summed_over_the_larger_window(side: int, size: int) -> None:
    spread = torch.randn(2, 6, side, side, size * size, 4, dtype=torch.float64)
    expected = torch.zeros(2, 6, side + size - 1, side + size - 1, 4, dtype=torch.float64)
    for i, j in product(range(side), repeat=2):
        expected[:, :, i : i + size, j : j + size] += spread[:, :, i, j].unflatten(2, (size, size))
    torch.testing.assert_close(cells.fold_gradients(spread), expected.flatten(2, 3))


@pytest.mark.parametrize("count", [1, 40])
def test_derivatives_along_directions(posterior, data, count: int) -> None:
    detector = chosen(count)
    model = MCGLM(detector, posterior, samples=6)
    model(data[0][0])
    assert not model.router.needs_trunk() or count == 1
    found = model(data[0][0])
    assert torch.equal(found.boxes, detector.detect(data[0][0]).boxes)
    A = directional_derivatives(model.linearized.at(data[0][0]), model.etas)
    assert relative(found.covariance, sample_covariance(A)) < 1e-4


@pytest.mark.parametrize("count", [1, 5, 60])
@pytest.mark.parametrize("depth", ["neck", "backbone"])
def test_directions_that_reach_below_the_head(data, depth: str, count: int) -> None:
    """Head by stages, layers below by tangents: the first and later frames agree."""
    detector = chosen(count)
    model = MCGLM(detector, boxcov.fit(detector, data, depth=depth, prior_precision=1.0), samples=4)
    first, found = model(data[0][0]), model(data[0][0])
    assert model.router._etas_below
    assert model.router.tangents_check.state is State.VERIFIED
    assert torch.equal(first.covariance, found.covariance)
    A = directional_derivatives(model.linearized.at(data[0][0]), model.etas)
    assert relative(found.covariance, sample_covariance(A)) < 1e-4


def test_exact_head_and_sampled_rest(data) -> None:
    detector = chosen(20)
    posterior = boxcov.fit(detector, data, depth="backbone", prior_precision=1.0)
    model = ExactGLM(detector, posterior, samples=6)
    first, found = model(data[0][0]), model(data[0][0])
    assert model.router.tangents_check.state is State.VERIFIED
    assert torch.equal(first.covariance, found.covariance)
    below = {name: eta for name, eta in model.etas.items() if not name.startswith("head")}
    A = directional_derivatives(model.linearized.at(data[0][0]), below)
    head = ExactGLM(
        detector,
        posterior.restricted([name for name in posterior.blocks if name.startswith("head")]),
    )
    assert relative(found.covariance, head(data[0][0]).covariance + sample_covariance(A)) < 1e-4


def test_replacing_weights_by_equal_ones_keeps_the_result(posterior, data) -> None:
    detector = chosen(8)
    model = ExactGLM(detector, posterior)
    before = model(data[0][0])
    detector.load_state_dict(
        {name: t.clone() for name, t in detector.state_dict().items()}, assign=True
    )
    assert relative(model(data[0][0]).covariance, before.covariance) < 1e-6


@pytest.mark.parametrize("count", range(1, 600, 37))
def test_sizes_are_rounded_up_by_less_than_a_quarter(count: int) -> None:
    full = stages._round_up(count, 32)
    assert count <= full < count + max(32, count / 4)


@pytest.mark.parametrize("count", [1, 21])
def test_sizes_padded_to_fours_give_the_same_covariance(
    monkeypatch, posterior, data, count: int
) -> None:
    """The sizes that fast products on a GPU need, on a CPU."""
    detector = chosen(count)
    plain = ExactGLM(detector, posterior)(data[0][0]).covariance
    sampled = MCGLM(detector, posterior, samples=5)(data[0][0]).covariance
    for module in (covariance, weight_stacks):
        monkeypatch.setattr(module, "padding_to_four", lambda size, like: -size % 4)
    model = ExactGLM(detector, posterior)
    assert relative(model(data[0][0]).covariance, plain) < 1e-5
    assert model.router.staged_head.weights.branches[-1].W.shape[2] % 4 == 0
    assert relative(MCGLM(detector, posterior, samples=5)(data[0][0]).covariance, sampled) < 1e-5


def test_a_truncated_posterior_stays_within_its_bound(data, posterior) -> None:
    """Both by stages and along directions."""
    detector, (inputs, _) = chosen(12), data[0]
    smaller = posterior.compress(0.01)
    exact, found = (ExactGLM(detector, p) for p in (posterior, smaller))
    first, again = found(inputs), found(inputs)
    assert not found.router.needs_trunk()
    assert torch.equal(first.covariance, again.covariance)
    diagonals = [d.covariance.diagonal(dim1=1, dim2=2) for d in (again, exact(inputs))]
    assert float((diagonals[0] / diagonals[1] - 1).abs().max()) <= smaller.error + 1e-4
    drawn = MCGLM(detector, smaller, samples=200)(inputs).uncertainty / again.uncertainty
    assert float((drawn - 1).abs().max()) < 0.5


@pytest.mark.parametrize("fours", [False, True])
@pytest.mark.parametrize("count", [1, 30])
def test_merged_directions_stay_within_the_tolerance(
    monkeypatch, posterior, data, count: int, fours: bool
) -> None:
    """Also with sizes padded to fours."""
    detector, wide = chosen(count), posterior.with_prior(1e5)
    exact = ExactGLM(detector, wide)(data[0][0]).covariance
    if fours:
        for module in (covariance, weight_stacks):
            monkeypatch.setattr(module, "padding_to_four", lambda size, like: -size % 4)
    model = ExactGLM(detector, wide, engine=EngineOptions(tolerance=1e-2))
    found = model(data[0][0]).covariance
    stem = model.router.staged_head.weights.stem[0].posterior
    assert stem.has_remainder
    assert stem.U.shape[1] < 0.45 * stem.U.shape[0]
    assert not torch.equal(found, exact)
    assert (
        float((found.diagonal(dim1=1, dim2=2) / exact.diagonal(dim1=1, dim2=2) - 1).abs().max())
        < 1e-2
    )
    assert model.settings()["tolerance"] == 1e-2


def test_merged_variances_stay_within_the_tolerance(posterior) -> None:
    names = ["head.shared.0"]
    wide = posterior.with_prior(1e5)
    found = fit_separable(wide, names, 1e-2, merge=True)
    assert found.n_merged
    v = wide.variances(names[0])[0]
    assert float((variances(found) / v - 1).abs().max()) <= 1.01e-2
    assert fit_separable(wide, names, 1e-2).n_merged == 0


@pytest.mark.parametrize("count", [1, 30])
def test_equal_eigenvalues_of_a_compressed_posterior_are_merged(data, posterior, count) -> None:
    """At the default tolerance, although they are not negligible against the prior."""
    tau, names = 1e5, ["head.shared.0"]
    smaller = posterior.with_prior(tau).compress(0.01)
    found = fit_separable(smaller, names, 1e-5, merge=True)
    least = float(smaller.blocks[names[0]].Q.values[0, 0])
    assert least > 1e-3 * tau / float((smaller.n_data * smaller.blocks[names[0]].H.values).max())
    assert found.n_merged
    assert float((variances(found) / smaller.variances(names[0])[0] - 1).abs().max()) < 1.1e-5
    detector = chosen(count)
    assert relative(*both_ways(detector, smaller, data[0][0])) < 1e-4
    model = ExactGLM(detector, smaller)
    model(data[0][0])
    stem = model.router.staged_head.weights.stem[0].posterior
    assert stem.U.shape[1] == len(smaller.blocks[names[0]].Q.values[0]) - found.n_merged


@pytest.mark.parametrize("tolerance", [0, -1, 0.2, float("nan")])
def test_a_tolerance_out_of_range_is_refused(posterior, tolerance: float) -> None:
    with pytest.raises(BoxcovError, match=r"tolerance must lie between 1e-6 and 0\.1"):
        ExactGLM(chosen(3), posterior, engine=EngineOptions(tolerance=tolerance))
