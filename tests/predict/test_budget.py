"""A latency budget: fewer directions, then the head alone, and the result says so."""

from __future__ import annotations

import pytest
import torch

import boxcov
from boxcov import MCGLM, BoxcovError
from boxcov.predict.budget import Budget, Choice


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def deep(tiny, train_frames) -> boxcov.Posterior:
    return boxcov.fit(tiny, train_frames[:8], depth="backbone", n_data=2000)


# the draws are a sequence


def test_fewer_draws_are_the_first_of_more(posterior) -> None:
    many, few = (posterior.sample(k, torch.Generator().manual_seed(5)) for k in (9, 4))
    for name, eta in few.items():
        torch.testing.assert_close(eta, many[name][:4])


def test_a_layers_draws_do_not_depend_on_other_layers(posterior) -> None:
    names = list(posterior.blocks)[2:4]
    whole, part = (
        p.sample(3, torch.Generator().manual_seed(5))
        for p in (posterior, posterior.restricted(names))
    )
    assert part
    for name, eta in part.items():
        torch.testing.assert_close(eta, whole[name])


def test_draws_of_one_generator_go_on(posterior) -> None:
    generator = torch.Generator().manual_seed(5)
    first, second = (next(iter(posterior.sample(2, generator).values())) for _ in range(2))
    assert not torch.allclose(first, second)


# the choice


def test_choices_fall_to_two_and_then_to_the_head() -> None:
    assert [(c.samples, c.head) for c in Budget(5, 10, below=True).choices] == [
        (10, False),
        (5, False),
        (2, False),
        (10, True),
        (5, True),
        (2, True),
    ]
    assert [c.samples for c in Budget(5, 7, below=False).choices] == [7, 3, 2]
    assert [c.samples for c in Budget(5, 2, below=False).choices] == [2]


def test_what_was_too_slow_is_tried_again_after_a_while() -> None:
    budget = Budget(10, 10, below=False)
    budget.took(Choice(10), 40.0)
    frames = 0
    while budget.choose(8.0) != Choice(10):
        budget.took(budget.choose(8.0), 3.0)
        frames += 1
        assert frames < 200
    assert frames > 20


def test_one_slow_frame_is_believed_at_once_and_forgotten_slowly() -> None:
    budget = Budget(10, 4, below=False)
    for _ in range(5):
        budget.took(Choice(4), 2.0)
    budget.took(Choice(4), 9.0)
    assert budget.expected(Choice(4)) == 9.0
    budget.took(Choice(4), 2.0)
    assert 2.0 < budget.expected(Choice(4)) < 9.0


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "10", True])
def test_a_budget_is_a_number_of_milliseconds(tiny, posterior, wrong) -> None:
    with pytest.raises(BoxcovError, match="budget_ms must be a number of milliseconds above 0"):
        MCGLM(tiny, posterior, budget_ms=wrong)


def test_finite_differences_have_no_budget(tiny, posterior) -> None:
    with pytest.raises(BoxcovError, match="budget_ms is for derivative='jvp'"):
        MCGLM(tiny, posterior, derivative="fd", budget_ms=10)


# the numbers


class Forced(Budget):
    """Takes what the test says."""

    choice = Choice(2)

    def choose(self, left: float) -> Choice:
        return self.choice


@pytest.fixture
def with_budget(monkeypatch):
    monkeypatch.setattr("boxcov.predict.mcglm.Budget", Forced)
    return lambda *args, **kwargs: MCGLM(*args, **kwargs, budget_ms=1e6)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_result_of_fewer_samples_is_that_of_a_model_with_so_many(
    tiny, posterior, image, with_budget, fresh: bool
) -> None:
    model = with_budget(tiny, posterior, 8, seed=3, fresh=fresh)
    fewer = MCGLM(tiny, posterior, 4, seed=3, fresh=fresh)
    for k in (8, 4, 4):
        Forced.choice = Choice(k)
        found, plain = model(image), fewer(image)
        assert found.meta["samples"] == k
        assert found.meta["note"] == ("" if k == 8 else "4 of 8 samples")
        assert torch.equal(found.boxes, plain.boxes)
        if k == 4:
            assert relative(found.covariance, plain.covariance) < 1e-5


def test_the_head_alone_is_the_posterior_of_the_head(tiny, deep, image, with_budget) -> None:
    head = deep.restricted([name for name in deep.blocks if name.startswith("head.")])
    assert 0 < len(head.blocks) < len(deep.blocks)
    model = with_budget(tiny, deep, 8)
    for choice in (
        Choice(8),
        Choice(4),
        Choice(4, head=True),
        Choice(8, head=True),
        Choice(4, head=True),
    ):
        Forced.choice = choice
        found = model(image)
        plain = MCGLM(tiny, head if choice.head else deep, choice.samples)(image)
        assert relative(found.covariance, plain.covariance) < 1e-5
        assert found.meta["depth"] == ("head" if choice.head else "backbone")
    assert found.meta["note"] == "4 of 8 samples, the head's layers alone"


def test_cross_box_and_scores_of_fewer_samples(tiny, posterior, image, with_budget) -> None:
    model = with_budget(tiny, posterior, 8, cross_box=True, score=True)
    Forced.choice = Choice(4)
    found, plain = model(image), MCGLM(tiny, posterior, 4, cross_box=True, score=True)(image)
    assert found.factor.shape[2] == 4
    assert relative(found.factor, plain.factor) < 1e-5
    assert relative(found.score_variance, plain.score_variance) < 1e-5


def test_a_budget_that_cannot_be_met_says_so_and_takes_the_least(tiny, deep, image) -> None:
    model = MCGLM(tiny, deep, 8, budget_ms=1e-3)
    for _ in range(8):
        found = model(image)
    assert found.meta["samples"] == 2
    assert found.meta["depth"] == "head"
    assert (
        found.meta["note"] == "2 of 8 samples, the head's layers alone, over the budget of 0.001 ms"
    )
    assert found.meta["milliseconds"] > found.meta["budget_ms"] == 1e-3


def test_within_the_budget_all_is_as_without(tiny, posterior, image) -> None:
    found, plain = MCGLM(tiny, posterior, 6, budget_ms=1e6)(image), MCGLM(tiny, posterior, 6)(image)
    assert torch.equal(found.covariance, plain.covariance)
    assert found.meta["note"] == ""
    assert {name: value for name, value in found.meta.items() if name in plain.meta} == plain.meta


def test_a_frame_without_boxes(tiny, posterior, image) -> None:
    found = MCGLM(tiny, posterior, 6, budget_ms=1e6)(torch.zeros_like(image))
    assert len(found) == 0
    assert found.meta["note"] == ""
