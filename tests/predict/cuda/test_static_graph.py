"""The static part as a CUDA graph; without a GPU a stand-in runs the function again."""

from __future__ import annotations

import pytest
import torch

import boxcov
from boxcov.predict.cuda import static_graph as module
from boxcov.predict.cuda.static_graph import Graphs
from boxcov.predict.route.verification import State
from helpers.centerpoint_cases import cloud, detector_of, pillar_config


class Again:
    """A slow stand-in for a CUDA graph."""

    def __init__(self, run, inputs):
        self.run, self.inputs = run, inputs
        self.out = run(*inputs)

    def replay(self):
        with torch.no_grad():
            for kept, new in zip(self.out, self.run(*self.inputs)):
                kept.copy_(new)


class Stand(Graphs):
    def _wait_for_last(self, device):
        pass  # a CPU has no streams

    def _capture(self, run, given):
        inputs = self._copy_inputs(given)
        graph = Again(run, inputs)
        for tensor in graph.out:
            tensor.fill_(float("nan"))  # as a capture leaves them
        return graph, graph.out


@pytest.fixture(scope="module")
def detector():
    return detector_of(pillar_config())


@pytest.fixture(scope="module")
def frames():
    return [([cloud(pillar_config(), seed)], None) for seed in range(3)]


@pytest.fixture(scope="module")
def deep(detector, frames):
    return boxcov.fit(
        detector,
        [frames[0]],
        fisher="identity",
        depth="backbone",
        n_data=1000,
        prior_precision=100.0,
    )


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(module, "Graphs", Stand)

    def on(model):
        model.router.graph_check.state = State.UNVERIFIED
        model.router.graph.graphs = Stand(2)
        return model

    return on


def test_graphs_keep_deep_derivatives_and_boxes(detector, deep, frames, kept):
    plain, model = boxcov.MCGLM(detector, deep, 4), kept(boxcov.MCGLM(detector, deep, 4))
    results = []
    for i in (0, 1, 2, 1, 0):
        found, expected = model(frames[i][0]), plain(frames[i][0])
        assert torch.equal(found.boxes, detector.detect(frames[i][0]).boxes)
        assert torch.equal(found.scores, expected.scores)
        torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-5, atol=1e-9)
        results.append((found, found.covariance.clone(), found.boxes.clone()))
    assert model.router.graph.graphs.replayed
    assert all(
        torch.equal(found.covariance, c) and torch.equal(found.boxes, b) for found, c, b in results
    )  # no later frame wrote over them


def test_exact_head(detector, frames, kept):
    posterior = boxcov.fit(
        detector, [frames[0]], fisher="identity", n_data=1000, prior_precision=100.0
    )
    plain, model = boxcov.ExactGLM(detector, posterior), kept(boxcov.ExactGLM(detector, posterior))
    for i in (0, 1, 2, 1, 0):
        found, expected = model(frames[i][0]), plain(frames[i][0])
        assert torch.equal(found.boxes, expected.boxes)
        torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-5, atol=1e-9)
    assert model.router.graph.graphs.replayed


def test_a_graph_with_other_bits_is_refused(detector, deep, frames, kept, monkeypatch):
    """A library that chooses another algorithm while capturing must not change the boxes."""
    model = kept(boxcov.MCGLM(detector, deep, 2))
    replay = Again.replay
    monkeypatch.setattr(Again, "replay", lambda self: (replay(self), self.out[0].mul_(1 + 1e-6)))
    model(frames[0][0])
    model(frames[0][0])
    with pytest.warns(boxcov.BoxcovWarning, match="gives a different result as a CUDA graph"):
        found = [model(frames[0][0]) for _ in range(2)][-1]
    assert model.router.graph_check.is_refused
    assert torch.equal(found.boxes, detector.detect(frames[0][0]).boxes)


def test_a_detector_that_cannot_be_captured_runs_plain(detector, deep, frames, kept, monkeypatch):
    model = kept(boxcov.MCGLM(detector, deep, 2))

    def refuse(self, run, given):
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")

    monkeypatch.setattr(Stand, "_capture", refuse)
    with pytest.warns(
        boxcov.BoxcovWarning,
        match=r"cannot be captured as a CUDA graph \(operation not permitted when stream is",
    ):
        found = [model(frames[0][0]) for _ in range(4)]
    assert all(torch.equal(f.boxes, detector.detect(frames[0][0]).boxes) for f in found)


def test_weights_before_the_static_part_are_included(detector, frames, kept):
    """A posterior of the encoder: its derivatives start before the graph."""
    posterior = boxcov.fit(
        detector,
        [frames[0]],
        fisher="identity",
        depth=["encoder", "backbone", "neck", "head"],
        n_data=1000,
        prior_precision=100.0,
    )
    model = kept(boxcov.MCGLM(detector, posterior, 2))
    expected = boxcov.MCGLM(detector, posterior, 2, engine=boxcov.EngineOptions(cuda_graphs=False))
    found = [model(frames[0][0]) for _ in range(4)][-1]
    torch.testing.assert_close(
        found.covariance, expected(frames[0][0]).covariance, rtol=1e-3, atol=1e-7
    )
    assert not model.router.graph.graphs.replayed


def test_hooks_are_called(detector, deep, frames):
    twin = detector_of(pillar_config())
    twin.neck.register_forward_hook(lambda *_: None)
    model = boxcov.MCGLM(twin, deep, 2)
    assert model.router.graph_check.is_refused


def test_flags_that_change_bits_make_another_graph(detector, deep, frames, kept):
    model = kept(boxcov.MCGLM(detector, deep, 2))
    for _ in range(5):
        model(frames[0][0])
    assert len(model.router.graph.graphs._graphs) == 1
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = not before
        model(frames[0][0])
        assert not model.router.graph.graphs.replayed
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_other_directions_make_a_new_graph_that_is_compared(
    detector, deep, frames, kept, monkeypatch
):
    model = kept(boxcov.MCGLM(detector, deep, 2))
    for _ in range(4):
        model(frames[0][0])
    graph, compared = model.router.graph, []
    monkeypatch.setattr(
        type(graph), "matches_plain", lambda self, done: not compared.append(len(done.tensors))
    )
    other = deep.sample(2, torch.Generator().manual_seed(5))
    model.router._etas_below = {name: other[name] for name in model.router._etas_below}
    found = [model(frames[0][0]) for _ in range(4)]
    assert graph.graphs.replayed
    assert len(compared) == 1
    assert not torch.equal(
        found[0].covariance, boxcov.MCGLM(detector, deep, 2)(frames[0][0]).covariance
    )
    assert torch.equal(found[0].covariance, found[-1].covariance)


def test_without_graphs_nothing_is_captured(detector, deep):
    model = boxcov.MCGLM(detector, deep, 2, engine=boxcov.EngineOptions(cuda_graphs=False))
    assert model.router.graph_check.is_refused
