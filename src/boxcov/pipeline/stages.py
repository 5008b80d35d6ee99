"""``boxcov bench --stages``: the stages of a CenterPoint's frame beside the machine's limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from boxcov._files.plain_text import aligned
from boxcov._torch.process_state import Precision, matrix_precision, seconds
from boxcov.detectors.centerpoint import CenterPoint
from boxcov.detectors.centerpoint.fused_network import FusedCenterPoint
from boxcov.detectors.centerpoint.selection import rank_candidates, static_suppressions
from boxcov.posterior.posterior import Posterior
from boxcov.predict.compile import CompiledModel
from boxcov.predict.cuda.static_graph import Graphs
from boxcov.predict.engine_options import EngineOptions
from boxcov.predict.exact import ExactGLM
from boxcov.predict.predictor import add_signals, detector_signals
from boxcov.static_selection import StaticLimits, static_nms

WARM_UP = 4


@dataclass(frozen=True)
class Machine:
    """What a device can do, measured: operations and bytes per second."""

    operations: float
    bytes: float

    @staticmethod
    def measure(device: str, rounds: int) -> Machine:
        """Time a large product, in the precision that is set, and a large copy."""
        is_gpu = device.startswith("cuda")
        n = 8192 if is_gpu else 1024
        a, b = (torch.randn(n, n, device=device) for _ in range(2))
        big = torch.empty(2**28 if is_gpu else 2**24, device=device)
        other = torch.empty_like(big)
        product = milliseconds(lambda: a @ b, device, rounds)
        copy = milliseconds(lambda: other.copy_(big), device, rounds)
        return Machine(2e3 * n**3 / product, 8e3 * big.numel() / copy)


@dataclass(frozen=True)
class Stage:
    """One stage of a frame: a function of tensors, what it is given, and the weights it reads."""

    name: str
    run: Callable[..., Any]
    given: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()


def measure_stages(
    detector: CenterPoint,
    posterior: Posterior,
    inputs: Any,
    limits: StaticLimits,
    precision: Precision,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Yield one row per stage of a frame by ``boxcov.compile(fused=True)``.

    Columns: ``stage``, ``precision``, ``ms`` (the median of ``rounds``), ``busy_ms`` (the sum of
    the times of all kernels), ``launches`` (of kernels and copies), ``gflop`` (of products and
    convolutions), ``mb`` (inputs, weights and outputs, each once) and ``limit_ms`` (the larger of
    the times for GFLOP and MB at the rates of ``Machine``). On a GPU a stage is a CUDA graph; on a
    CPU it runs step by step, and nothing counts launches.
    """
    device = str(next(detector.parameters()).device)
    with matrix_precision(precision), torch.no_grad():
        machine = Machine.measure(device, rounds)
        model = ExactGLM(detector, posterior, engine=EngineOptions(precision))
        compiled = CompiledModel(model, inputs, limits, fused=True)
        for stage in stages_of_frame(detector, compiled, inputs, limits):
            run = _as_graph(stage, device)
            launches, busy = _launches(run) if device.startswith("cuda") else (None, None)
            operations, moved = _work(stage)
            floor = 1e3 * max(operations / machine.operations, moved / machine.bytes)
            yield {
                "stage": stage.name,
                "precision": precision,
                "ms": milliseconds(run, device, rounds),
                "busy_ms": busy,
                "launches": launches,
                "gflop": operations / 1e9,
                "mb": moved / 1e6,
                "limit_ms": floor,
            }
        if find_spec("torchvision") is not None:
            nms = torchvision_nms(detector, inputs, limits)
            ms = milliseconds(nms, device, rounds)
            yield {"stage": "NMS of torchvision", "precision": precision, "ms": ms}


def milliseconds(run: Callable[[], Any], device: str, rounds: int) -> float:
    """Return the median time of a call, after a warm-up."""
    times = []
    for _ in range(WARM_UP + rounds):
        start = seconds(device)
        run()
        times.append(1e3 * (seconds(device) - start))
    return median(times[WARM_UP:])


def stages_of_frame(
    detector: CenterPoint, compiled: CompiledModel, inputs: Any, limits: StaticLimits
) -> Iterator[Stage]:
    """Yield the stages of a fused frame in order. NMS, part of the selection, follows it."""
    function, network = compiled.function, compiled.network
    assert isinstance(network, FusedCenterPoint)
    assert function.covariance is not None
    packed = network.pack(inputs)
    assert packed is not None
    bev, _ = network.encode(*packed)
    features = network.dense(bev)
    raw: Any = {"bev": bev, "features": features, "tasks": network.head(features)}
    weights = {name: tuple(part.parameters()) for name, part in detector.named_children()}
    yield Stage("encoder", network.encode, packed, weights["encoder"])
    yield Stage("backbone and neck", network.dense, (bev,), weights["backbone"] + weights["neck"])
    yield Stage("head", lambda x: network.head(x).stacked, (features,), weights["head"])

    def select(_: Tensor) -> Any:
        chosen = detector.select_static(raw, limits)
        return chosen.selection.scores, detector.decode(raw, chosen.selection), chosen.left_off

    yield Stage("selection and decoding", select, (features,))
    ranked = rank_candidates(raw["tasks"], detector.config, limits.candidates)

    def nms(_: Tensor) -> Any:
        return static_nms(static_suppressions(ranked, detector.config, limits.pairs)[0])

    yield Stage("of which NMS", nms, (features,))
    point, static = function.linearize(packed)
    covariance, model = function.covariance(point, static), function.error_model
    yield Stage("covariance", lambda _: function.covariance(point, static), (features,))  # type: ignore[misc]
    if model is not None:
        yield Stage("points for the signals", network.signal_inputs, packed)
        yield Stage("signals", lambda _: detector_signals(point), (features,))
        found = add_signals(point.detections(covariance=covariance), detector_signals(point))
        yield Stage("error model", lambda _: model.apply(found, check=False).risk, (features,))


def torchvision_nms(detector: CenterPoint, inputs: Any, limits: StaticLimits) -> Callable[[], Any]:
    """Return torchvision's NMS of the same candidates, as boxes without rotation."""
    from torchvision.ops import batched_nms

    ranked = rank_candidates(detector(inputs)["tasks"], detector.config, limits.candidates)
    x, y, _, w, l, *_ = ranked.boxes.flatten(0, 1).unbind(1)
    boxes = torch.stack([x - l / 2, y - w / 2, x + l / 2, y + w / 2], 1)
    groups, candidates = ranked.scores.shape
    group = torch.arange(groups, device=x.device).repeat_interleave(candidates)
    overlap = detector.config.reporting.overlap
    return lambda: batched_nms(boxes, ranked.scores.flatten(), group, overlap)


def _as_graph(stage: Stage, device: str) -> Callable[[], Any]:
    if not device.startswith("cuda"):
        return lambda: stage.run(*stage.given)
    graphs = Graphs()

    def flat(*x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t for t in tree_flatten(stage.run(*x))[0] if isinstance(t, Tensor))

    return lambda: graphs("stage", flat, *stage.given)


def _launches(run: Callable[[], Any]) -> tuple[int, float]:
    """Return the number of launches of a call, and the milliseconds in which the GPU works."""
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    return len(events), sum(e.device_time for e in events) / 1e3


def _work(stage: Stage) -> tuple[float, float]:
    """Return operations of products and convolutions, and bytes of inputs, weights and outputs."""
    counter = FlopCounterMode(display=False)
    # two kernels are not counted: sparse convolutions, and convolutions with their ReLU
    with (
        patch("boxcov.detectors.centerpoint.voxel_encoder.can_gather", return_value=False),
        patch("torch.backends.cudnn.is_acceptable", return_value=False),
        counter,
    ):
        out = stage.run(*stage.given)
    tensors = [t for t in tree_flatten((stage.given, out))[0] if isinstance(t, Tensor)]
    moved = sum(t.numel() * t.element_size() for t in (*tensors, *stage.weights))
    return counter.get_total_flops(), moved


def format_stages(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table for a terminal."""
    digits = {"boxes": 0, "ms": 2, "busy_ms": 2, "launches": 0, "gflop": 1, "mb": 0, "limit_ms": 2}
    titles = ("boxes", "ms", "busy ms", "launches", "GFLOP", "MB", "limit ms")
    lines = [("stage", "precision", *titles)]
    for row in rows:
        cells = ("-" if row.get(k) is None else f"{row[k]:.{n}f}" for k, n in digits.items())
        lines.append((row["stage"], row["precision"], *cells))
    return "\n".join(aligned(lines))
