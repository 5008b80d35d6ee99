"""Stages are verified in the first frame: on every kind of box, at a bounded cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import boxcov
from boxcov import GLM, MCGLM, BoxcovError, ExactGLM
from boxcov.predict.route import mcglm
from helpers.centerpoint_cases import frames, pillar_config
from helpers.chosen_cells import TASKS, Chosen, chosen
from oracles.dense import relative


@pytest.fixture(scope="module")
def data():
    return frames(pillar_config(tasks=TASKS))


@pytest.fixture(scope="module")
def posterior(data):
    return boxcov.fit(chosen(1), data, n_data=1e6, prior_precision=1.0)


def kinds_verified(model: ExactGLM) -> set[int]:
    return {kind for _, kind in model.router.stages_check.subjects}


def test_a_new_kind_of_box_is_verified_when_it_appears(posterior, data) -> None:
    detector = chosen(10, 0)
    model = ExactGLM(detector, posterior)
    model(data[0][0])
    assert kinds_verified(model) == {0}
    model.linearized.shadow.only = None
    found = model(data[0][0])
    assert kinds_verified(model) == {0, 1, 2}
    assert relative(found.covariance, GLM(chosen(10), posterior)(data[0][0]).covariance) < 1e-4


@pytest.mark.parametrize(("count", "most"), [(100, 100), (600, 130)])
def test_many_boxes_are_verified_on_a_sample(posterior, data, monkeypatch, count, most) -> None:
    model, seen = ExactGLM(chosen(count), posterior), []
    run = model.router.instances.run
    monkeypatch.setattr(
        model.router.instances, "run", lambda index, own: seen.append(len(index)) or run(index, own)
    )
    first = model(data[0][0])
    assert 90 <= sum(seen) <= most
    assert kinds_verified(model) == {0, 1, 2}
    assert torch.equal(model(data[0][0]).covariance, first.covariance)


def test_a_sample_names_the_box_that_contradicts(posterior, data, monkeypatch) -> None:
    model = ExactGLM(chosen(600), posterior)
    run = model.router.staged_head.run

    def spoiled(point):
        staged = run(point)
        staged.head[staged.kind == 1] *= 3
        staged.head[300:][staged.kind[300:] == 1] *= 3
        return staged

    monkeypatch.setattr(model.router.staged_head, "run", spoiled)
    with pytest.raises(BoxcovError, match=r"contradicts .* box [345]\d\d: relative difference"):
        model(data[0][0])


def test_first_frame_of_mcglm_runs_the_oracle_once(posterior, data, monkeypatch) -> None:
    model, seen = MCGLM(chosen(600), posterior, samples=6), []
    derive, run = mcglm.directional_derivatives, model.router.staged_head.run

    def counted(point, etas):
        seen.append(len(next(iter(etas.values()))))
        return derive(point, etas)

    monkeypatch.setattr(mcglm, "directional_derivatives", counted)
    monkeypatch.setattr(
        model.router.staged_head, "run", lambda *given: seen.append(0) or run(*given)
    )
    first = model(data[0][0])
    assert kinds_verified(model) == {0, 1, 2}
    assert seen.count(0) == 1
    assert sum(seen) <= 6 + 2  # and two to see that no layer below the head moves boxes
    assert torch.equal(model(data[0][0]).covariance, first.covariance)


class FewTrucks(Chosen):
    """One box in ten is of the second task."""

    def select(self, raw):
        found = super().select(raw)
        task = torch.where(torch.arange(len(found)) % 10 == 3, 1, 2 * (found.labels > 0))
        return replace(found, labels=task, where=replace(found.where, task=task))


def spoil_trucks(model, monkeypatch) -> None:
    """Let the stages give wrong numbers for boxes of the second task."""
    run = model.router.staged_head.run

    def spoiled(*given):
        staged = run(*given)
        staged.head[staged.kind == 1] *= 3
        return staged

    monkeypatch.setattr(model.router.staged_head, "run", spoiled)


@pytest.mark.parametrize("method", [ExactGLM, MCGLM])
def test_wrong_stages_of_a_rare_kind_are_refused(posterior, data, monkeypatch, method) -> None:
    detector = chosen(600)
    detector.__class__ = FewTrucks
    model = method(detector, posterior)
    spoil_trucks(model, monkeypatch)
    with pytest.raises(BoxcovError, match=r"contradicts .* box \d*3: relative difference"):
        model(data[0][0])


class OneTruck(Chosen):
    """One box alone is of the second task."""

    def select(self, raw):
        found = super().select(raw)
        task = torch.where(torch.arange(len(found)) == 3, 1, 2 * (found.labels > 0))
        return replace(found, labels=task, where=replace(found.where, task=task))


@pytest.mark.parametrize("depth", ["head", "neck"])
@pytest.mark.parametrize("method", [ExactGLM, MCGLM])
def test_one_box_of_a_kind_decides_nothing(posterior, data, monkeypatch, method, depth) -> None:
    detector = chosen(40)
    detector.__class__ = OneTruck
    posterior = posterior if depth == "head" else boxcov.fit(detector, data, depth)
    expected = method(detector, posterior)(data[0][0]).covariance
    model = method(detector, posterior)
    spoil_trucks(model, monkeypatch)
    for _ in range(2):
        assert relative(model(data[0][0]).covariance, expected) < 1e-3
        assert kinds_verified(model) == {0, 2}
    model.linearized.shadow.__class__ = Chosen  # no box of the undecided kind any more
    detector.__class__ = Chosen
    model.linearized.shadow.only = 0
    detector.only = 0
    expected = method(detector, posterior)(data[0][0]).covariance
    assert relative(model(data[0][0]).covariance, expected) < 1e-3


class Listed(Chosen):
    """Its ``where`` is no table of boxes."""

    def select(self, raw):
        found = super().select(raw)
        return replace(found, where=[found.where])

    def decode(self, raw, selection):
        return super().decode(raw, replace(selection, where=selection.where[0]))

    def stages(self, raw, selection):
        return super().stages(raw, replace(selection, where=selection.where[0]))


def test_a_selection_that_is_not_by_box_is_verified_whole(posterior, data) -> None:
    detector = chosen(200)
    detector.__class__ = Listed
    model = ExactGLM(detector, posterior)
    assert model.linearized.at(data[0][0]).subset(torch.arange(9)) is None
    assert len(model(data[0][0])) == 200
    assert kinds_verified(model) == {0, 1, 2}
