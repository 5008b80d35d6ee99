"""The router: what is verified against what, when it is refused, and how it is shown."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from boxcov import GLM, MCGLM, MCI, BoxcovWarning, ExactGLM, fit
from boxcov.detectors.tiny import TinyCenter
from boxcov.predict.linearize import short_way
from boxcov.predict.route import exact
from boxcov.predict.route.mcglm import MCGLMRouter
from boxcov.predict.route.verification import (
    State,
    Verdict,
    Verification,
    judge_boxes,
    judge_weights,
    rounding_tolerance,
)
from oracles.dense import relative

MANY = torch.full((12,), 1e-6)


def with_errors(count: int, size: float, boxes: Tensor = MANY) -> Tensor:
    errors = boxes.clone()
    errors[:count] = size
    return errors


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        (MANY, Verdict.AGREES),
        (with_errors(3, 5.0), Verdict.AGREES),  # activations at their kink
        (with_errors(4, 5.0), Verdict.CONTRADICTS),
        (with_errors(12, float("nan")), Verdict.CONTRADICTS),
        (with_errors(1, 5.0, MANY[:2]), Verdict.UNDECIDED),
        (with_errors(2, 0.1, MANY[:2]), Verdict.UNDECIDED),
        (with_errors(2, 5.0, MANY[:2]), Verdict.CONTRADICTS),
        (with_errors(1, 5.0, MANY[:1]), Verdict.UNDECIDED),
    ],
)
def test_verdict_on_boxes(errors: Tensor, verdict: Verdict) -> None:
    assert judge_boxes(errors) is verdict


@pytest.mark.parametrize(
    ("errors", "boxes", "verdict"),
    [
        ([], 1, Verdict.AGREES),
        ([1e-3, 5e-3], 1, Verdict.AGREES),
        ([1e-3, 5e-2], 8, Verdict.CONTRADICTS),
        ([1e-3, 5e-2], 7, Verdict.UNDECIDED),
        ([0.5], 2, Verdict.CONTRADICTS),
        ([0.5], 1, Verdict.UNDECIDED),
        ([float("nan")], 8, Verdict.CONTRADICTS),
    ],
)
def test_verdict_on_weights(errors: list[float], boxes: int, verdict: Verdict) -> None:
    named = dict(zip("ab", errors))
    assert judge_weights(named, dict.fromkeys(named, boxes), tolerance=1e-2) is verdict


def test_a_weight_of_few_boxes_does_not_decide() -> None:
    errors = {"common": 1e-3, "rare": 5e-2}
    assert judge_weights(errors, {"common": 90, "rare": 2}, 1e-2) is Verdict.UNDECIDED
    assert judge_weights(errors, {"common": 90, "rare": 9}, 1e-2) is Verdict.CONTRADICTS


@pytest.fixture(scope="module")
def deep(tiny, train_frames):
    return fit(tiny, train_frames[:8], depth="backbone", n_data=2000, prior_precision=1.0)


@pytest.mark.parametrize(
    ("method", "head", "below"),
    [
        (ExactGLM, "stages", "none"),
        (MCGLM, "stages", "none"),
        (GLM, "one backward pass per number", "one backward pass per number"),
        (
            lambda d, p: MCGLM(d, p, 4, derivative="fd", epsilon=1e-5),
            "finite differences",
            "finite differences",
        ),
        (lambda d, p: MCI(d, p.with_prior(1e4)), "instances", "none"),
    ],
)
def test_route_of_a_head_posterior(tiny, posterior, image, method, head: str, below: str) -> None:
    model = method(tiny, posterior)
    model(image)
    assert (model.router.route.head, model.router.route.below) == (head, below)


def test_a_route_without_choice_is_known_at_once(tiny, posterior) -> None:
    model = GLM(tiny, posterior)
    again = model.build_router(model.linearized)  # as when weights move
    assert again.route == model.router.route
    assert "route: head layers by one backward pass" in repr(model)


@pytest.mark.parametrize(
    ("method", "below"),
    [
        (lambda d, p: ExactGLM(d, p), "autograd"),
        (lambda d, p: ExactGLM(d, p, samples=4), "propagated tangents along samples"),
        (lambda d, p: MCGLM(d, p, 4), "propagated tangents"),
    ],
)
def test_route_of_a_deep_posterior(tiny, deep, image, method, below: str) -> None:
    model = method(tiny, deep)
    model(image)
    assert (model.router.route.head, model.router.route.below) == ("stages", below)
    assert model.router.route.caches_trunk == (below == "autograd")


def test_the_route_is_logged_once_and_shown(tiny, posterior, image, caplog) -> None:
    model = ExactGLM(tiny, posterior)
    assert "route: not chosen: no boxes yet" in repr(model)
    with caplog.at_level(logging.INFO, "boxcov"):
        for _ in range(3):
            model(image)
    assert [record.message for record in caplog.records] == [
        f"TinyCenter: {model.router.route}",
    ]
    assert f"route: {model.router.route}" in repr(model)
    assert len(repr(model).splitlines()) <= 10


def test_undecided_stages_give_the_oracles_numbers(tiny, posterior, image, monkeypatch) -> None:
    """Too few boxes to decide: the slow result is used, the next frame compared again."""
    judged = []
    monkeypatch.setattr(
        "boxcov.predict.route.verification.judge_boxes",
        lambda errors: judged.append(1) or Verdict.UNDECIDED,
    )
    model = ExactGLM(tiny, posterior)
    slow = model.router._head_by_instance(model.linearized.at(image)).covariance
    counts = []  # one verdict for each kind of box
    for _ in range(2):
        assert torch.equal(model(image).covariance, slow)
        counts.append(len(judged))
    assert counts == [counts[0], 2 * counts[0]] != [0, 0]
    assert model.router.stages_check.state is State.UNVERIFIED
    monkeypatch.undo()
    model(image)
    assert model.router.stages_check.state is State.VERIFIED


def test_undecided_instances_give_the_oracles_numbers(tiny, posterior, image, monkeypatch) -> None:
    monkeypatch.setattr(
        "boxcov.predict.route.instances.judge_weights", lambda *given: Verdict.UNDECIDED
    )
    calls = []
    original = exact.autograd_covariance
    monkeypatch.setattr(
        exact, "autograd_covariance", lambda *given: calls.append(1) or original(*given)
    )
    found = ExactGLM(tiny, posterior)(image).covariance
    assert calls
    assert relative(found, GLM(tiny, posterior)(image).covariance) < 1e-5


def test_wrong_tangents_are_refused_with_one_warning(tiny, deep, train_frames, monkeypatch) -> None:
    inputs = torch.cat([train_frames[i][0] for i in range(4)])
    expected = MCGLM(tiny, deep, 4)(inputs).covariance
    assert len(expected) >= 8
    original = MCGLMRouter._fast

    def wrong(self, point, staged):
        fast = original(self, point, staged)
        return None if fast is None else (2 * fast[0], 2 * fast[1])

    monkeypatch.setattr(MCGLMRouter, "_fast", wrong)
    model = MCGLM(tiny, deep, 4)
    with pytest.warns(BoxcovWarning, match=r"propagated tangents differ from vmap\(jvp\)") as seen:
        found = [model(inputs).covariance for _ in range(2)]
    assert len(seen) == 1
    assert model.router.tangents_check.state is State.REFUSED
    assert all(relative(covariance, expected) < 1e-3 for covariance in found)


class Turning(TinyCenter):
    """Its heading by instance is larger by one turn: the same box."""

    def instances(self, raw, selection, with_logit=False):
        for index, run in super().instances(raw, selection, with_logit):
            yield index, lambda run=run: run() + self._turn(run())

    def _turn(self, z: Tensor) -> Tensor:
        turn = torch.zeros_like(z)
        turn[:, self.box_fields.index("yaw")] = self.periods["yaw"]
        return turn


def test_a_wrapped_heading_is_not_a_contradiction(tiny, posterior, image) -> None:
    """Rounding can move a heading at half a turn to the other side."""
    turning = Turning(threshold=tiny.threshold)
    turning.load_state_dict(tiny.state_dict())
    found = ExactGLM(turning.eval(), posterior)(image)
    assert relative(found.covariance, GLM(tiny, posterior)(image).covariance) < 1e-5
    assert float(short_way(torch.tensor([[0.0, 0, 0, 0, 6.0]]), tiny)[0, 4]) < 0


@pytest.mark.parametrize(("is_cuda", "tf32"), [(True, True), (True, False), (False, True)])
def test_tf32_needs_the_tolerance_of_half_precision(is_cuda: bool, tf32: bool) -> None:
    weight: Any = SimpleNamespace(is_cuda=is_cuda, dtype=torch.float32)
    expected = 0.0625 if is_cuda and tf32 else 0.01
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        assert rounding_tolerance([weight]) == pytest.approx(expected)


def test_an_engine_is_verified_for_the_kinds_that_it_saw() -> None:
    stages = Verification()
    assert stages.state is State.UNVERIFIED
    stages.accept({0, 1})
    assert stages.covers({0})
    assert not stages.covers({0, 2})
    stages.refuse()
    assert not stages.covers({0})
