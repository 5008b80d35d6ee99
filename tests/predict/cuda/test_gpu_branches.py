"""What runs on a GPU alone, on a pretend GPU: numbers of the CPU, boxes bit for bit.

The pretence shows no kernels, no TF32 and no timing: ``benchmarks/gpu_checks.py`` is for those.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import boxcov
from boxcov.predict.cuda.static_graph import Graphs
from boxcov.result_check import rows_in_range
from boxcov.static_selection import StaticLimits
from helpers.centerpoint_cases import cloud, detector_of, pillar_config, voxel_config
from helpers.centerpoint_cases import frames as labelled
from helpers.error_models import with_error_model
from helpers.plain_kernels import use_plain_kernels
from helpers.pretend_gpu import pretend_gpu, waits

ROOMY = StaticLimits(boxes=300, candidates=500, pairs=100_000)
TASKS = (("car",), ("pedestrian", "bicycle"))
TF32 = boxcov.EngineOptions(precision="tf32")
METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "exact": lambda d, p: boxcov.ExactGLM(d, p),
    "exact, logit": lambda d, p: boxcov.ExactGLM(d, p, with_logit=True),
    "exact, samples": lambda d, p: boxcov.ExactGLM(d, p, samples=6),
    "mcglm": lambda d, p: boxcov.MCGLM(d, p, 4),
    "mcglm, logit": lambda d, p: boxcov.MCGLM(d, p, 4, with_logit=True),
    "exact, samples, tf32": lambda d, p: boxcov.ExactGLM(d, p, samples=6, engine=TF32),
    "mcglm, tf32": lambda d, p: boxcov.MCGLM(d, p, 4, engine=TF32),
    "mcglm, fd": lambda d, p: boxcov.MCGLM(d, p, 4, derivative="fd", epsilon=1e-3),
    "always verified": lambda d, p: boxcov.ExactGLM(
        d, p, engine=boxcov.EngineOptions(verify="always")
    ),
    "without graphs": lambda d, p: boxcov.ExactGLM(
        d, p, engine=boxcov.EngineOptions(cuda_graphs=False)
    ),
}


def detector_with(config: Any, threshold: float = 0.1, most: int = 6) -> Any:
    reporting = replace(config.reporting, threshold=threshold, max_boxes=most)
    return detector_of(replace(config, tasks=TASKS, reporting=reporting))


def fitted(detector: Any, depth: str = "head") -> Any:
    frames = labelled(detector.config)
    return boxcov.fit(detector, frames, depth=depth, prior_precision=10.0, n_data=100)


@pytest.fixture(scope="module")
def pillars() -> Any:
    return detector_with(pillar_config())


@pytest.fixture(scope="module")
def posterior(pillars: Any) -> Any:
    return fitted(pillars)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with pretend_gpu():
        yield


def moved(inputs: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(device), inputs)


def clouds(detector: Any, seeds: tuple[int, ...] = (0, 1, 0, 1)) -> list[Any]:
    return [[cloud(detector.config, seed)] for seed in seeds]


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.cpu().double(), expected.cpu().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def check(make: Any, detector: Any, posterior: Any, frames: list[Any], device: str) -> Any:
    """Compare with the CPU, and the boxes with those of the plain detector on the device."""
    here, twin = make(detector, posterior), deepcopy(detector).to(device)
    there, results = make(twin, posterior), []
    tolerance = 2e-3 if getattr(there, "derivative", "") == "fd" else 1e-4
    if there.engine.precision == "tf32":  # tangents are in float16
        tolerance = 1e-2
    for inputs in frames:
        on_device = moved(inputs, device)
        expected, found, plain = here(inputs), there(on_device), twin.detect(on_device)
        assert found.boxes.device == found.covariance.device == torch.device(device)
        for name in ("boxes", "scores", "labels"):
            assert torch.equal(getattr(found, name), getattr(plain, name))
        for name in ("boxes", "covariance", "score_covariance", "score_variance"):
            if getattr(expected, name) is not None:
                assert relative(getattr(found, name), getattr(expected, name)) < tolerance, name
        results.append((found, found.to("cpu")))
    for found, copy in results:  # no later frame wrote over it
        assert torch.equal(found.boxes.cpu(), copy.boxes)
        assert torch.equal(found.covariance.cpu(), copy.covariance)
    return there


@pytest.mark.parametrize("method", METHODS)
def test_pillars(pillars: Any, posterior: Any, method: str) -> None:
    model = check(METHODS[method], pillars, posterior, clouds(pillars), "cuda:0")
    has_graph = method not in ("exact, logit", "mcglm, fd", "without graphs")
    assert model.router.route.cuda_graph == has_graph


@pytest.fixture(scope="module")
def deep(pillars: Any) -> Any:
    return fitted(pillars, "backbone")


SAMPLES = ["exact, samples", "mcglm"]


@pytest.mark.parametrize("method", [*SAMPLES, *(f"{m}, tf32" for m in SAMPLES)])
def test_whole_network(pillars: Any, deep: Any, method: str) -> None:
    model = check(METHODS[method], pillars, deep, clouds(pillars), "cuda:0")
    assert model.router.graph.graphs.replayed
    assert "propagated tangents" in str(model.router.route)
    assert model.router.propagation.in_half == ("tf32" in method)


@pytest.mark.parametrize("method", ["mcglm", "mcglm, tf32"])
def test_whole_network_without_stages(
    pillars: Any, deep: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(pillars), "stages", lambda *_: None)
    model = check(METHODS[method], pillars, deep, clouds(pillars), "cuda:0")
    assert model.router.graph.graphs.replayed
    assert "head layers by propagated tangents" in str(model.router.route)


def test_voxels() -> None:
    detector = detector_with(voxel_config())
    model = check(METHODS["exact"], detector, fitted(detector), clouds(detector), "cuda:0")
    assert model.router.graph.graphs.replayed


@pytest.mark.parametrize("most", [0, 1, 65])
def test_few_and_many_boxes(posterior: Any, most: int) -> None:
    detector = detector_with(pillar_config(), threshold=0.0 if most else 1.0, most=most or 1)
    frames = [moved(inputs, "cuda") for inputs in clouds(detector)]
    twin = detector.to("cuda")
    model = boxcov.ExactGLM(twin, posterior)
    plain = boxcov.ExactGLM(twin, posterior, engine=boxcov.EngineOptions(cuda_graphs=False))
    for inputs in frames:
        found, expected = model(inputs), plain(inputs)
        assert torch.equal(found.boxes, twin.detect(inputs).boxes)
        assert len(found) in range(2 * most - 5, 2 * most + 1)
        assert torch.equal(found.covariance, expected.covariance)


def test_a_second_gpu(pillars: Any, posterior: Any) -> None:
    """A graph is captured on the GPU that holds the model, which need not be the current one."""
    model = check(METHODS["exact"], pillars, posterior, clouds(pillars), "cuda:1")
    assert model.router.graph.graphs.replayed
    assert_compiled_agrees(pillars, posterior, clouds(pillars), device="cuda:1")


def assert_compiled_agrees(
    detector: Any,
    posterior: Any,
    frames: list[Any],
    fused: bool = False,
    device: str = "cuda:0",
    make: Any = boxcov.ExactGLM,
) -> Any:
    """Compare a compiled model with the model on the CPU."""
    model, twin = make(detector, posterior), deepcopy(detector).to(device)
    fast = boxcov.compile(make(twin, posterior), moved(frames[0], device), ROOMY, fused=fused)
    for inputs in frames:
        on_device = moved(inputs, device)
        waits.clear()
        found, expected = fast(on_device), model(inputs)
        assert not fused or waits == {"tolist": 1}
        assert fused or torch.equal(found.boxes.cpu(), expected.boxes)
        assert relative(found.boxes, expected.boxes) < 1e-4
        assert relative(found.covariance, expected.covariance) < 1e-4
        if model.error_model is not None:
            for name in ("risk", "scale", "predictive"):
                assert relative(getattr(found, name), getattr(expected, name)) < 1e-4, name
    assert fast._graphs.replayed
    assert not fast.fallbacks
    return fast


@pytest.mark.parametrize("fused", [False, True])
def test_compiled_with_its_error_model(pillars: Any, posterior: Any, fused: bool) -> None:
    own = with_error_model(
        boxcov.ExactGLM(pillars, posterior), posterior, clouds(pillars)[0], "exact"
    )
    assert_compiled_agrees(pillars, own, clouds(pillars), fused)


def test_compiled_batches(pillars: Any, posterior: Any) -> None:
    frames = [[cloud(pillars.config, i + j) for j in range(3)] for i in range(2)]
    assert_compiled_agrees(pillars, posterior, frames, fused=True, make=METHODS["mcglm"])


def test_compiled_voxels() -> None:
    detector = detector_with(voxel_config())
    assert_compiled_agrees(detector, fitted(detector), clouds(detector), fused=True)


@pytest.mark.parametrize("method", ["exact", "exact, samples, tf32", "without graphs"])
def test_code_around_kernels(
    pillars: Any, posterior: Any, deep: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chosen when the weights are arranged: kernels are Triton's on a GPU, plain here."""
    called = use_plain_kernels(monkeypatch)
    own = deep if "samples" in method else posterior
    own = own.compress(0.1) if method == "without graphs" else own
    check(METHODS[method], pillars, own, clouds(pillars), "cuda:0")
    assert {"gram_matrices", "quadratic_forms", "convolve_back"} <= set(called)


@pytest.mark.parametrize("fused", [False, True])
def test_code_around_kernels_of_a_compiled_model(
    pillars: Any, posterior: Any, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = use_plain_kernels(monkeypatch)
    assert_compiled_agrees(pillars, posterior, clouds(pillars), fused)
    assert set(called) == {"gram_matrices", "quadratic_forms", "convolve_back", "project"}


def test_threads_with_streams_of_their_own(pillars: Any, posterior: Any) -> None:
    """A replay waits until the stream of the last call has copied that call's results."""
    twin, frames = deepcopy(pillars).to("cuda"), clouds(pillars, (0, 1))
    model = boxcov.ExactGLM(twin, posterior)
    inputs = [moved(each, "cuda") for each in frames]
    fast = boxcov.compile(model, inputs[0], ROOMY)
    for call in (fast, model):
        for number in range(4):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                call(inputs[number % 2])


@pytest.mark.parametrize("method", [None, "exact"])
def test_weights_that_return_to_the_gpu(pillars: Any, posterior: Any, method: str | None) -> None:
    """A graph must not read the memory in which the weights were when it was captured."""
    twin, frames = deepcopy(pillars).to("cuda"), clouds(pillars, (0, 1))
    model = twin if method is None else METHODS[method](twin, posterior)
    inputs = [moved(each, "cuda") for each in frames]
    fast = boxcov.compile(model, inputs[0], ROOMY)
    twin.to("cpu")
    twin.to("cuda")
    for _ in range(3):
        for each in inputs:
            assert torch.equal(fast(each).boxes, twin.detect(each).boxes)
            assert method is None or torch.equal(model(each).boxes, twin.detect(each).boxes)


def test_a_detector_that_was_moved(pillars: Any, posterior: Any) -> None:
    twin, (inputs,) = deepcopy(pillars), clouds(pillars, (0,))
    model = METHODS["exact"](twin, posterior)
    twin.to("cuda")
    with pytest.raises(boxcov.BoxcovError, match="moved to cuda:0 after"):
        model(inputs)
    for make in (METHODS["exact"], lambda detector, _: detector):
        twin = deepcopy(pillars)
        fast = boxcov.compile(make(twin, posterior), inputs, ROOMY)
        twin.to("cuda")
        with pytest.raises(boxcov.BoxcovError, match="moved to cuda:0 after"):
            fast(inputs)


def test_writes_in_place_are_followed(pillars: Any) -> None:
    twin, (inputs,) = deepcopy(pillars).to("cuda"), clouds(pillars, (0,))
    inputs = moved(inputs, "cuda")
    fast = boxcov.compile(twin, inputs, ROOMY)
    for _ in range(3):
        with torch.no_grad():
            next(twin.parameters()).mul_(0.9)
        assert torch.equal(fast(inputs).boxes, twin.detect(inputs).boxes)
    fast(inputs)
    assert fast._graphs.replayed


def test_a_failed_capture_leaves_stream_and_gpu() -> None:
    def waiting(x: Tensor) -> tuple[Tensor]:
        return (x * float(x.sum()),)

    graphs, x = Graphs(), torch.ones(3, device="cuda:1")
    before = torch.cuda.current_stream(), torch.cuda.current_stream("cuda:1")
    graphs("key", waiting, x)
    with pytest.raises(RuntimeError, match="capturing"):
        graphs("key", waiting, x)
    assert graphs.capturing
    assert (torch.cuda.current_stream(), torch.cuda.current_stream("cuda:1")) == before
    assert torch.cuda.current_device() == 0
    graphs("other", waiting, x)
    assert not graphs.capturing


def test_two_captures_at_once() -> None:
    """The beginning of a capture waits for the device: it would end the capture of another thread.

    The second thread does not wait either, but runs its function without a graph.
    """
    begun, over, x = Event(), Event(), torch.ones(3, device="cuda")
    graphs, errors = (Graphs(), Graphs()), []

    def slow(x: Tensor) -> tuple[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            begun.set()
            over.wait(5)
        return (2 * x,)

    def first() -> None:
        for _ in range(3):
            (found,) = graphs[0]("key", slow, x)
        assert found.tolist() == [2.0] * 3

    def second() -> None:
        begun.wait(5)
        for _ in range(3):
            (found,) = graphs[1]("key", lambda x: (x + 3,), x)
            assert found.tolist() == [4.0] * 3
        over.set()

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=run, args=(work,)) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [each.replayed for each in graphs] == [True, False]


# the checks that a GPU runs

CHEAP = ("samples", "factors", "batches", "sparse", "MCGLM", "GLM", "MCI")


def gpu_checks() -> Any:
    path = Path(__file__).parents[3] / "benchmarks" / "gpu_checks.py"
    spec = importlib.util.spec_from_file_location("gpu_checks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cheap_checks_of_a_gpu() -> None:
    done = []
    for name, check in gpu_checks().checks():
        if name == "graphs":  # this and what follows takes minutes with its detectors
            break
        if any(word in name for word in CHEAP):
            done.append(check())
    assert len(done) == 10


def test_checks_of_boxes_whose_velocities_come_first() -> None:
    """As in every compiled frame: a list of columns would be copied to the device."""
    numbers = torch.zeros(3, device="cuda")
    boxes = torch.tensor([torch.nan, torch.nan, 1.0, 2.0], device="cuda").repeat(3, 1)
    names = ("vx", "vy", "x", "y"), ("car",)
    found = boxcov.Detections(boxes, numbers, numbers.long(), numbers.long(), *names)
    before = waits.total()
    holds = rows_in_range(found, None)
    assert waits.total() == before
    assert holds.tolist() == [True] * 3


@pytest.mark.filterwarnings("ignore:the loss of 1 frame has a zero gradient")
def test_check_of_threads() -> None:
    gpu_checks().threads(boxcov.ExactGLM, detector_of(pillar_config()))
