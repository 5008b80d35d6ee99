"""``prior_precision="auto"``: the marginal likelihood, or the RMS of the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from boxcov import (
    GLM,
    BoxcovError,
    BoxcovWarning,
    Checkpoint,
    ExactGLM,
    FitOptions,
    Posterior,
    fit,
)
from boxcov.data import simulated
from boxcov.detectors import centerpoint
from boxcov.detectors.tiny import TinyCenter
from boxcov.posterior.kronecker_block import Eigendecomposition
from boxcov.posterior.posterior import EVIDENCE_LAYERS
from boxcov.posterior.prior import auto_prior_precision
from oracles.dense import box_jacobian, log_evidence, relative

SHARED = "head.shared.0"


def rms_precision(detector: TinyCenter, posterior: Posterior, name: str) -> float:
    weight = detector.get_parameter(posterior.blocks[name].layer.weight).detach()
    return 1 / float(weight.double().square().mean())


def informed(posterior: Posterior, name: str, curvature: float) -> Posterior:
    """The posterior with one layer whose Fisher is ``curvature`` in all directions."""
    block = posterior.blocks[name]
    flat = replace(
        block,
        Q=Eigendecomposition(block.Q.vectors, torch.ones_like(block.Q.values)),
        H=Eigendecomposition(block.H.vectors, torch.full_like(block.H.values, curvature)),
    )
    return replace(posterior, blocks={**posterior.blocks, name: flat}, n_data=1.0)


def test_few_frames_give_the_rms_of_the_weights(tiny, train_frames) -> None:
    posterior = fit(tiny, train_frames[:3])
    assert posterior.meta[EVIDENCE_LAYERS] == ""
    for name in posterior.blocks:
        assert posterior.tau(name) == pytest.approx(rms_precision(tiny, posterior, name))


def test_the_evidence_decides_where_data_determine_the_weights(tiny, posterior) -> None:
    rms = rms_precision(tiny, posterior, SHARED)
    # with the curvature c in all directions, tau = RMS^-2 c / (c + tau): RMS^-2 / 2 if c is that
    for share, is_determined in ((0.1, False), (0.49, False), (0.51, True), (1e7, True)):
        c = share * rms
        chosen = auto_prior_precision(informed(posterior, SHARED, c), tiny)
        assert (SHARED in chosen.meta[EVIDENCE_LAYERS].split(",")) == is_determined
        expected = (-c + (c * c + 4 * c * rms) ** 0.5) / 2 if is_determined else rms
        assert chosen.tau(SHARED) == pytest.approx(expected, rel=1e-4)


def test_the_optimum_is_that_of_a_fine_grid(tiny, posterior) -> None:
    best = posterior.optimize_prior_precision(per_layer=True)
    grid = 10 ** torch.linspace(-8, 8, 3201, dtype=torch.float64)
    for name in (SHARED, "head.branches.rot.3"):
        layer = posterior.restricted([name])
        evidence = [log_evidence(layer.with_prior(float(tau))) for tau in grid]
        at = int(torch.tensor(evidence).argmax())
        assert grid[at - 1] < best.tau(name) < grid[at + 1]
        assert evidence[:at] == sorted(evidence[:at])  # one maximum
        assert evidence[at:] == sorted(evidence[at:], reverse=True)


def test_a_layer_without_gradient_has_the_rms_prior(tiny, posterior) -> None:
    dead = informed(posterior, SHARED, 0.0)
    chosen = auto_prior_precision(dead, tiny)
    assert chosen.tau(SHARED) == pytest.approx(rms_precision(tiny, posterior, SHARED))
    assert SHARED not in chosen.meta[EVIDENCE_LAYERS]


def test_a_layer_of_zeros_is_named(train_frames) -> None:
    empty = TinyCenter()
    torch.nn.init.zeros_(empty.head.shared[0].weight)
    options = FitOptions(exclude=["head.branches"])
    with pytest.warns(BoxcovWarning, match=r"weights of head\.shared\.0 are 0.*number") as warned:
        posterior = fit(empty, train_frames[:1], fisher="identity", options=options)
    assert warned[0].filename == __file__
    assert posterior.tau(SHARED) == pytest.approx(1e8)
    torch.nn.init.constant_(empty.head.shared[0].weight, 1e-30)  # must not overflow float32
    posterior = fit(empty, train_frames[:1], fisher="identity", options=options)
    assert posterior.tau(SHARED) == pytest.approx(1e8)
    assert bool((posterior.variances(SHARED) > 0).all())


def test_biases_do_not_widen_the_prior(train_frames) -> None:
    detector, shifted = TinyCenter(), TinyCenter()
    name = "head.branches.heatmap.3"
    with torch.no_grad():
        shifted.get_parameter(f"{name}.bias").fill_(-50.0)
    taus = [
        fit(d, train_frames[:1], depth=[name], fisher="identity", n_data=n_data).tau(name)
        for n_data in (1, 1e6)
        for d in (detector, shifted)
    ]
    assert taus[0] == taus[1] == taus[3]
    assert taus[2] == pytest.approx(taus[0], rel=0.01)  # by evidence, which equals the RMS


def test_the_choice_follows_the_second_pass(tiny, train_frames) -> None:
    frames = train_frames[:2]
    posterior = fit(tiny, frames, options=FitOptions(ekfac=True))
    plain = fit(tiny, frames, prior_precision=1.0, options=FitOptions(ekfac=True))
    assert not posterior.blocks["head.branches.size.3"].is_kronecker
    assert posterior.prior_precision == auto_prior_precision(plain, tiny).prior_precision


def test_the_choice_is_shown_and_stored(tmp_path, tiny, posterior) -> None:
    rms = rms_precision(tiny, posterior, SHARED)
    chosen = auto_prior_precision(informed(posterior, SHARED, 0.9 * rms), tiny)
    lines = repr(chosen).splitlines()
    words = "(1 layer set by the frames, 8 by the size of the weights)"
    assert any("auto" in line and words in line for line in lines)
    chosen.save(tmp_path / "p")
    assert repr(Posterior.load(tmp_path / "p", tiny)) == repr(chosen)
    part = chosen.restricted(["head.branches.rot.3"])
    assert "(0 layers set by the frames, 1 by the size of the weights)" in repr(part)
    assert "auto" not in repr(chosen.with_prior(2.0))
    assert "prior precision: none" in repr(chosen.paper())
    assert ExactGLM(tiny, chosen).settings()["prior_precision"] == chosen.prior_summary


def test_the_form_paper_has_no_prior(tiny, train_frames) -> None:
    options = FitOptions(form="paper", jitter=1e-3)
    auto = fit(tiny, train_frames[:2], options=options)
    number = fit(tiny, train_frames[:2], prior_precision=7.0, options=options)
    assert (auto.form, auto.prior_summary) == ("paper", "none")
    for name in auto.blocks:
        assert torch.equal(auto.variances(name), number.variances(name))


def test_compress_and_resume_keep_the_choice(tmp_path, tiny, train_frames) -> None:
    whole = fit(tiny, train_frames[:4], n_data=1000)
    smaller = whole.compress(0.01)
    assert smaller.prior_summary == whole.prior_summary
    assert 0 < smaller.error <= 0.01

    def stop(done: int, total: int | None) -> None:
        if done == 2:
            raise KeyboardInterrupt

    path = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        fit(tiny, train_frames[:4], checkpoint=Checkpoint(path, 0), progress=stop)
    checkpoint = Checkpoint(path, resume=True)
    resumed = fit(tiny, train_frames[:4], n_data=1000, checkpoint=checkpoint)
    assert resumed.prior_precision == whole.prior_precision


def test_a_lidar_detector_is_uncertain_by_decimetres() -> None:
    """The median error of its positions is 0.1 m; tau = 1 gave standard deviations of metres."""
    detector = centerpoint.load("small")
    frames = simulated.frames(count=2, sweeps=1)
    options = FitOptions(exclude=["head.tasks.3.vel"])  # of barriers: no gradient, a warning
    for n_data in (None, 3500):
        posterior = fit(detector, frames, n_data=n_data, options=options)
        found = ExactGLM(detector, posterior)(frames[0][0])
        found = found[found.scores > 0.3]
        assert len(found) > 10
        for field in ("x", "y", "z"):
            assert 0.05 < float(found.std(field).median()) < 0.5


def test_without_data_weights_are_independent_with_their_rms(tiny, train_frames, image) -> None:
    control = fit(tiny, train_frames[:2], fisher="identity", n_data=1e-9)
    J = box_jacobian(tiny, image)
    squares = {
        layer.weight: tiny.get_parameter(layer.weight).square().mean()
        for layer in (b.layer for b in control.blocks.values())
    }
    expected = 0
    for block in control.blocks.values():
        for name in (block.layer.weight, block.layer.bias):
            if name is not None:
                rows = J[name].flatten(2)
                expected = expected + squares[block.layer.weight].detach() * rows @ rows.transpose(
                    1, 2
                )
    assert relative(ExactGLM(tiny, control)(image).covariance, expected) < 1e-4
    assert relative(GLM(tiny, control)(image).covariance, expected) < 1e-4


@pytest.mark.parametrize("text", ["Auto", "automatic", "1.0"])
def test_another_word_is_refused(tiny, text) -> None:
    with pytest.raises(BoxcovError, match=f"must be 'auto' or a number, got '{text}'"):
        fit(tiny, [], prior_precision=text)


def test_fit_refuses_a_precision_per_layer(tiny) -> None:
    with pytest.raises(BoxcovError, match=r"Posterior\.with_prior sets one per layer"):
        fit(tiny, [], prior_precision={"stem.weight": 1.0})
