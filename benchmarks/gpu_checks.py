"""Checks that need a GPU: a script that needs only torch, numpy and safetensors.

    PYTHONPATH=src python benchmarks/gpu_checks.py [cuda | cpu] [words of the checks to run ...]

The simulator renders the same streets as on the CPU in every scenario. Posteriors and predictors
agree with the CPU, and boxes are those of the plain detector bit for bit. Prints one line per check
and exits with 1 if one failed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from threading import Event, Thread
from time import perf_counter
from unittest.mock import patch

import torch
from torch import Tensor

import boxcov
from boxcov._torch.modules import fingerprint
from boxcov.data import shapes, simulated
from boxcov.detectors import centerpoint
from boxcov.detectors.centerpoint import CenterPoint, Config
from boxcov.detectors.tiny import TinyCenter
from boxcov.predict.head import weight_stacks
from boxcov.static_selection import StaticLimits

Check = tuple[str, Callable[[], str]]
DEVICE = "cuda"  # "cpu" tries the script itself


def relative(found: Tensor, expected: Tensor) -> float:
    return float(
        (found.cpu().double() - expected.cpu().double()).norm()
        / expected.cpu().double().norm().clamp(min=1e-30)
    )


def require(true: bool, what: str) -> None:
    if not true:
        raise AssertionError(what)


# the simulator


def streets(scenario: str) -> str:
    here, there = (
        simulated.frames(scenario, seed=5, count=4, sweeps=3, device=device)
        for device in ("cpu", DEVICE)
    )
    points, near = [], []
    for i in range(4):
        (cloud,), (target,) = there[i]
        (expected,), (labelled,) = here[i]
        require(cloud.device.type == DEVICE, "the points are not on the device")
        points.append(len(cloud) / len(expected))
        seen = (
            target["points"] >= 10
        )  # an object with few points may be labelled on one device only: the rays' noise differs
        apart = torch.cdist(target["boxes"].cpu().double(), labelled["boxes"].double()).amin(
            1
        )  # in float32 cdist is centimetres off
        near += (apart < 1e-3)[seen.cpu()].tolist()
        dimmer = float(cloud[:, 3].mean()) / float(expected[:, 3].mean())
        require(
            abs(dimmer - 1) < 0.03,
            f"mean intensity of frame {i} is {dimmer:.3f} times that on the CPU",
        )
    share = sum(near) / len(near)
    require(all(abs(ratio - 1) < 0.01 for ratio in points), f"points relative to the CPU: {points}")
    require(
        share > 0.95, f"only {share:.0%} of the objects with ten points are on the CPU's street"
    )
    off = max(abs(ratio - 1) for ratio in points)
    return f"points within {off:.2%} of the CPU's, {share:.0%} of the objects the same"


def batches() -> str:
    frames = simulated.frames("rain", seed=5, count=3, sweeps=3, device=DEVICE)
    clouds, targets = frames.batch([2, 0])
    for k, i in enumerate((2, 0)):
        (cloud,), (target,) = frames[i]
        require(torch.equal(clouds[k], cloud), f"the points of frame {i} are others in a batch")
        require(
            all(torch.equal(targets[k][key], target[key]) for key in target),
            f"the targets of frame {i} are others in a batch",
        )
    return "bit for bit as one by one"


# posteriors and predictors


def samples() -> str:
    posterior = boxcov.fit(
        TinyCenter(), shapes.frames(count=4), depth="backbone", prior_precision=1.0
    )
    here = posterior.sample(2, torch.Generator().manual_seed(0))
    there = posterior.to(DEVICE).sample(2, torch.Generator().manual_seed(0))
    worst = max(relative(there[name], here[name]) for name in here)
    require(worst < 1e-4, f"{worst:.1e} off")
    return f"{worst:.1e} off"


def factors() -> str:
    detector, frames = TinyCenter().double(), [(x.double(), t) for x, t in shapes.frames(count=4)]
    here, there = (
        boxcov.fit(detector, frames, depth="backbone", prior_precision=1.0),
        boxcov.fit(deepcopy(detector).to(DEVICE), frames, depth="backbone", prior_precision=1.0),
    )
    pairs = [
        (getattr(there.blocks[name], factor).matrix, getattr(block, factor).matrix)
        for name, block in here.blocks.items()
        for factor in ("Q", "H")
    ]
    worst = max(relative(found, expected) for found, expected in pairs)
    require(worst < 1e-6, f"a factor is {worst:.1e} off")
    return f"{len(pairs)} factors, {worst:.1e} off"


def predictors() -> Iterator[Check]:
    """Compare on a small float64 detector, where differences are errors, not rounding."""
    detector, frames = (
        TinyCenter(threshold=0.05, most=6).double().eval(),
        [(x.double(), t) for x, t in shapes.frames(count=4)],
    )
    posterior, moved, inputs = (
        boxcov.fit(detector, frames, depth="backbone", prior_precision=1.0),
        deepcopy(detector).to(DEVICE),
        frames[0][0],
    )
    models: dict[str, Callable[[TinyCenter], Callable[[Tensor], boxcov.Detections]]] = {
        "MCGLM, jvp": lambda net: boxcov.MCGLM(net, posterior),
        "MCGLM, fd": lambda net: boxcov.MCGLM(net, posterior, derivative="fd", epsilon=1e-6),
        "GLM": lambda net: boxcov.GLM(net, posterior),
        "ExactGLM": lambda net: boxcov.ExactGLM(net, posterior),
        "ExactGLM, Monte Carlo below the head": lambda net: boxcov.ExactGLM(
            net, posterior, samples=10
        ),
        "MCI, Laplace": lambda net: boxcov.MCI(
            net, posterior.with_prior(1e4)
        ),  # the prior of an untrained one is too wide for it
    }
    for name, make in models.items():
        yield name, lambda make=make: same(make, detector, moved, inputs)


def same(
    make: Callable[[TinyCenter], Callable[[Tensor], boxcov.Detections]],
    here: TinyCenter,
    there: TinyCenter,
    inputs: Tensor,
) -> str:
    before = fingerprint(there)
    expected, found, plain = (
        make(here)(inputs),
        make(there)(inputs),
        there.detect(inputs.to(DEVICE)),
    )
    require(found.boxes.device.type == DEVICE, "the boxes are not on the device")
    if found.meta.get("method") != "mci":
        require(
            torch.equal(found.boxes, plain.boxes) and torch.equal(found.scores, plain.scores),
            "not the plain detector's boxes",
        )
    require(fingerprint(there) == before, "the detector was changed")
    boxes, covariance = (
        relative(found.boxes, expected.boxes),
        relative(found.covariance, expected.covariance),
    )
    require(
        boxes < 1e-8 and covariance < 1e-5,
        f"boxes {boxes:.1e}, covariance {covariance:.1e} off the CPU's",
    )
    return f"{len(found)} boxes {boxes:.1e}, covariance {covariance:.1e} off the CPU's"


def lidar(detector: CenterPoint) -> str:
    """CenterPoint in float32: boxes bit for bit, exact against sampled covariances."""
    detector = detector.to(DEVICE).eval()
    frames = simulated.frames(count=2, sweeps=2, device=DEVICE)
    posterior = boxcov.fit(detector, frames, prior_precision=1.0)
    inputs = frames[0][0]
    plain = detector.detect(inputs)
    exact, sampled = (
        boxcov.ExactGLM(detector, posterior)(inputs),
        boxcov.MCGLM(detector, posterior, samples=200)(inputs),
    )
    for found in (exact, sampled):
        require(
            torch.equal(found.boxes, plain.boxes) and torch.equal(found.scores, plain.scores),
            "not the plain detector's boxes",
        )
    if not len(plain):
        return "no boxes"
    ratio = float((sampled.uncertainty / exact.uncertainty).median())
    require(0.8 < ratio < 1.25, f"the median ratio of sampled to exact uncertainty is {ratio:.2f}")
    return f"{len(plain)} boxes, median ratio of sampled (200) to exact uncertainty {ratio:.2f}"


def graphs(detector: CenterPoint) -> str:
    """Compare with and without CUDA graphs, at borders and for few and many boxes."""
    detector = detector.to(DEVICE).eval()
    frames = simulated.frames(count=3, sweeps=2, device=DEVICE)
    posterior = boxcov.fit(detector, [frames[0]], prior_precision=100.0)
    worst, boxes = 0.0, []
    for tolerance in (1e-5, 1e-2):
        for threshold in (0.9, 0.3, 0.02):
            detector.config = replace(
                detector.config, reporting=replace(detector.config.reporting, threshold=threshold)
            )
            ours, plain = (
                boxcov.ExactGLM(
                    detector,
                    posterior,
                    engine=boxcov.EngineOptions(tolerance=tolerance, cuda_graphs=with_graphs),
                )
                for with_graphs in (True, False)
            )
            for inputs, _ in [frames[i] for i in (0, 1, 2, 1, 0)]:
                found, expected = ours(inputs), plain(inputs)
                require(
                    torch.equal(found.boxes, detector.detect(inputs).boxes),
                    "not the plain detector's boxes",
                )
                boxes.append(len(found))
                worst = (
                    max(worst, relative(found.covariance, expected.covariance))
                    if len(found)
                    else worst
                )
    require(worst < 1e-4, f"covariances are {worst:.1e} off those without graphs")
    return f"{min(boxes)} to {max(boxes)} boxes, {worst:.1e} off those without graphs"


def kernels(detector: CenterPoint) -> str:
    """Covariances by Triton kernels against those in plain torch, of few and many boxes."""
    runs = weight_stacks.has_kernels(torch.ones(1, device=DEVICE))
    require(DEVICE == "cpu" or runs, "Triton's kernels do not run on this device")
    detector = detector.to(DEVICE).eval()
    frames = simulated.frames(count=2, sweeps=2, device=DEVICE)
    posterior = boxcov.fit(detector, [frames[0]], prior_precision=100.0)
    rules, worst, boxes = detector.config.reporting, 0.0, []
    for threshold in (0.9, 0.3, 0.02):
        detector.config = replace(detector.config, reporting=replace(rules, threshold=threshold))
        fast, plain = (boxcov.ExactGLM(detector, posterior) for _ in range(2))
        for inputs, _ in (frames[0], frames[1]):
            found = fast(inputs)
            with patch.object(weight_stacks, "has_kernels", lambda _: False):
                expected = plain(inputs)
            boxes.append(len(found))
            if len(found):
                worst = max(worst, relative(found.covariance, expected.covariance))
    require(worst < 1e-5, f"covariances are {worst:.1e} off those in plain torch")
    return f"{min(boxes)} to {max(boxes)} boxes, {worst:.1e} off those in plain torch"


def float16(detector: CenterPoint) -> str:
    """Tangents in float16 against those in float32, along the same directions."""
    detector = detector.to(DEVICE).eval()
    frames = simulated.frames(count=3, sweeps=2, device=DEVICE)
    posterior = boxcov.fit(detector, [frames[0]], depth="backbone", prior_precision=100.0)
    half, plain = (
        boxcov.MCGLM(detector, posterior, samples=6, engine=boxcov.EngineOptions(precision))
        for precision in ("tf32", "float32")
    )
    apart = []
    for inputs, _ in [frames[i] for i in (0, 1, 2, 1, 0)]:
        found, expected = half(inputs), plain(inputs)
        require(torch.equal(found.boxes, expected.boxes), "not the plain detector's boxes")
        apart.append((found.uncertainty / expected.uncertainty - 1).abs())
    off = torch.cat(apart)
    require(half.router.propagation.in_half == (DEVICE == "cuda"), "float16 was refused")
    require("propagated tangents" in str(half.router.route), "tangents were refused")
    # a few boxes may be at a kink, on another side in TF32
    median, most = float(off.median()), float(off.quantile(0.95))
    require(median < 5e-3 and most < 5e-2, f"traces are off by {median:.1e}, 95 % by {most:.1e}")
    return f"{len(off)} boxes, traces off by {median:.1e} (median), {most:.1e} (95 %)"


def compiled(detector: CenterPoint) -> str:
    """``boxcov.compile``: boxes of the model, and up to rounding those of a fused network."""
    detector = detector.to(DEVICE).eval()
    frames = simulated.frames(count=3, sweeps=2, device=DEVICE)
    posterior = boxcov.fit(detector, frames, prior_precision=1.0)
    model, example = boxcov.ExactGLM(detector, posterior), frames[0][0]
    limits = StaticLimits(boxes=500, candidates=500, pairs=100_000)
    exact, plain = boxcov.compile(model, example, limits), boxcov.compile(detector, example, limits)
    fused, bare = (boxcov.compile(m, example, limits, fused=True) for m in (model, detector))
    worst, boxes, apart = 0.0, [], []
    empty = [example[0][:0]]
    for inputs in (*(frames[i][0] for i in range(3)), empty, [example[0][:50]]):
        found, expected = exact(inputs), model(inputs)
        require(torch.equal(found.boxes, expected.boxes), "compiled: other boxes than the model")
        require(torch.equal(found.boxes, plain(inputs).boxes), "compiled: other than plain boxes")
        other = fused(inputs)
        require(torch.equal(other.boxes, bare(inputs).boxes), "fused: other than plain boxes")
        boxes.append(len(found))
        if len(found):
            worst = max(worst, relative(found.covariance, expected.covariance))
        if len(found) and len(other):
            near = torch.cdist(found.boxes[:, :2].double(), other.boxes[:, :2].double()).amin(1)
            apart.append(float((near > 0.01).double().mean()))
    require(worst < 1e-4, f"covariances are {worst:.1e} off those of the model")
    require(max(apart) <= 0.02, f"{max(apart):.1%} of the boxes are elsewhere in a fused network")
    require(not fused.fallbacks + exact.fallbacks, "a frame was computed by the model itself")
    return f"{min(boxes)} to {max(boxes)} boxes, {worst:.1e} off, {max(apart):.1%} of boxes moved"


def calibrated() -> str:
    """Risk and regions of the shipped error model, on a GPU, compiled and fused, as on a CPU."""
    frames, worst = simulated.frames(count=2, sweeps=2), 0.0
    here = centerpoint.load("small")
    there = deepcopy(here).to(DEVICE)
    expected = boxcov.ExactGLM(here, boxcov.Posterior.load("small", here))(frames[0][0])
    points = [cloud.to(DEVICE) for cloud in frames[0][0]]
    model = boxcov.ExactGLM(there, boxcov.Posterior.load("small", there))
    limits = StaticLimits(boxes=500, candidates=500, pairs=100_000)
    for fused in (None, False, True):
        run = model if fused is None else boxcov.compile(model, points, limits, fused=fused)
        found = run(points)
        apart = torch.cdist(expected.boxes.double(), found.boxes.cpu().double())
        near, index = apart.min(1)
        require(float((near < 0.01).double().mean()) > 0.97, "other boxes than on the CPU")
        off = (found.risk.cpu()[index] - expected.risk).abs()[near < 0.01]
        worst = max(worst, float(off.max()))
    require(worst < 0.02, f"a risk is {worst:.3f} off the CPU's")
    return f"{len(expected)} boxes, risk at most {worst:.1e} off the CPU's"


# streaming


def threads(kind: type[boxcov.ExactGLM] | type[boxcov.MCGLM], detector: CenterPoint) -> str:
    """Eight threads share one model while CUDA graphs are captured and a ninth thread works."""
    detector = detector.to(DEVICE).eval()
    frames = simulated.frames(count=6, sweeps=2, device=DEVICE)
    posterior = boxcov.fit(detector, [frames[0]], prior_precision=100.0)
    inputs = [frames[i][0] for i in range(6)] * 4
    alone = kind(detector, posterior)
    expected = [alone(x) for x in inputs]
    model, over = kind(detector, posterior), Event()

    def busy() -> None:
        own = torch.ones(
            512, 512, device=DEVICE
        )  # drawing numbers is what torch forbids while another thread captures a graph
        while not over.is_set():
            own.mm(own).sum().item()

    neighbour = Thread(target=busy)
    neighbour.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(model, inputs))
    finally:
        over.set()
        neighbour.join()
    require(
        all(torch.equal(a.boxes, b.boxes) for a, b in zip(found, expected)),
        "other boxes than in one thread",
    )
    worst = max(relative(a.covariance, b.covariance) for a, b in zip(found, expected))
    require(worst < 1e-5, f"covariances are {worst:.1e} off those of one thread")
    return f"24 frames, covariances {worst:.1e} off those of one thread"


def steady(count: int = 20_000) -> str:
    """Device memory does not grow over frames with varying numbers of boxes."""
    detector = TinyCenter(threshold=0.3).to(DEVICE).eval()
    torch.nn.init.constant_(detector.head.branches["heatmap"][-1].bias, -0.5)
    frames = [inputs.to(DEVICE) for inputs, _ in shapes.frames(count=16)]
    model = boxcov.MCGLM(
        detector, boxcov.fit(detector, shapes.frames(count=2), prior_precision=1.0), 4
    )
    began = boxes = held = 0
    for number in range(count):
        if number == 500:
            torch.cuda.synchronize() if DEVICE == "cuda" else None
            held, began = (torch.cuda.memory_allocated() if DEVICE == "cuda" else 0), perf_counter()
        boxes += len(model(frames[number % 16]))
    grown = (torch.cuda.memory_allocated() if DEVICE == "cuda" else 0) - held
    require(grown < 2**20, f"{grown} bytes more on the device after {count} frames")
    require(boxes > count, f"only {boxes} boxes")
    ms = 1e3 * (perf_counter() - began) / (count - 500)
    return f"{count} frames, {boxes} boxes, {ms:.2f} ms per frame, {grown} more bytes on the device"


def voxel_network() -> CenterPoint:
    config = replace(Config.voxel(), point_range=(-25.6, -25.6, -5.0, 25.6, 25.6, 3.0))
    return CenterPoint(replace(config, reporting=replace(config.reporting, max_boxes=8)))


def checks() -> Iterator[Check]:
    for scenario in simulated.SCENARIOS:
        yield f"simulator, {scenario}", lambda scenario=scenario: streets(scenario)
    yield "simulator, batches", batches
    yield "posterior, samples", samples
    yield "posterior, factors", factors
    yield from predictors()
    yield "graphs", lambda: graphs(centerpoint.load("small"))
    yield "kernels", lambda: kernels(centerpoint.load("small"))
    yield "CenterPoint small", lambda: lidar(centerpoint.load("small"))
    yield "CenterPoint voxel, untrained", lambda: lidar(voxel_network())
    yield "float16, CenterPoint small", lambda: float16(centerpoint.load("small"))
    yield "compiled, small", lambda: compiled(centerpoint.load("small"))
    yield "compiled, voxel", lambda: compiled(voxel_network())
    yield "error model", calibrated
    yield "threads, MCGLM", lambda: threads(boxcov.MCGLM, centerpoint.load("small"))
    yield "threads, ExactGLM", lambda: threads(boxcov.ExactGLM, centerpoint.load("small"))
    yield "steady streaming", steady


def main() -> None:
    global DEVICE
    DEVICE = sys.argv[1] if len(sys.argv) > 1 else DEVICE
    if DEVICE == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU: torch.cuda.is_available() is False")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(
        f"torch {torch.__version__},",
        torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        flush=True,
    )
    failed = 0
    for name, check in checks():
        if sys.argv[2:] and not any(word in name for word in sys.argv[2:]):
            continue
        try:
            print(f"ok      {name}: {check()}", flush=True)
        except Exception as error:  # the other checks are to be seen, too
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
