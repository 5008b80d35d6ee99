"""Speed of the core as ratios within one run: a fit step, ExactGLM against GLM, trunk passes.

    python benchmarks/core.py [--threads 2] [--device cpu] [--json]

Medians after a warm-up. Compared pairs are measured alternately, so a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import boxcov
from boxcov import Selection
from boxcov.data import batched, shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.kfac.accumulate import Accumulator
from boxcov.kfac.losses import FrameLosses, select_parameters


class Boxes(TinyCenter):
    """The reference detector, wider and on larger images, with a chosen number of boxes."""

    count = 50

    def select(self, raw: dict[str, Tensor]) -> Selection:
        heat = raw["heatmap"].sigmoid().amax(1)
        scores, cells = heat.flatten(1).topk(self.count)
        frame = torch.arange(len(heat), device=heat.device).repeat_interleave(self.count)
        cells = cells.flatten()
        return Selection(
            frame,
            scores.flatten(),
            torch.zeros_like(frame),
            (frame, cells // heat.shape[2], cells % heat.shape[2]),
        )


def medians(repeats: int, device: str, *functions: Callable[[], object]) -> list[float]:
    """Return the seconds of each function, measured in turns."""
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, spent in zip(functions, times):
            synchronise(device)
            start = time.perf_counter()
            function()
            synchronise(device)
            spent.append(time.perf_counter() - start)
    return [statistics.median(spent) for spent in times]


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def plain_kfac(detector: TinyCenter, names: list[str], inputs: Tensor, targets: object) -> None:
    """Run a plain hook implementation: unfold every input, one product per factor."""
    kept: list[tuple[nn.Module, Tensor, Tensor]] = []

    def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        out.retain_grad()
        kept.append((module, args[0], out))
        return out.clone()

    handles = [detector.get_submodule(name).register_forward_hook(hook) for name in names]
    detector.loss(detector(inputs), targets).sum().backward()
    for module, x, out in kept:
        if isinstance(module, nn.Conv2d) and module.groups == 1:
            a = (
                nn.functional.unfold(
                    x, module.kernel_size, module.dilation, module.padding, module.stride
                )
                .transpose(1, 2)
                .flatten(0, 1)
            )
            _ = a.T @ a
        d = out.grad.flatten(2).transpose(1, 2).flatten(0, 1)
        _ = d.T @ d
    detector.zero_grad()
    for handle in handles:
        handle.remove()


def fit_times(
    detector: TinyCenter, inputs: Tensor, targets: object, depth: str, device: str, repeats: int
) -> list[float]:
    """Return the seconds of a training step, of our fit step, and of one with plain hooks."""
    accumulator = Accumulator(FrameLosses(detector, select_parameters(detector, depth)))
    # the first batch is checked, the others are not
    accumulator.add(accumulator.terms(inputs, targets, 0))
    names = [sums.layer.name for sums in accumulator.sums.values()]

    def train() -> None:
        detector.loss(detector(inputs), targets).mean().backward()
        detector.zero_grad()

    return medians(
        repeats,
        device,
        train,
        lambda: accumulator.add(accumulator.terms(inputs, targets, 1)),
        lambda: plain_kfac(detector, names, inputs, targets),
    )


def fit_step(device: str, repeats: int) -> list[dict[str, object]]:
    rows = []
    for width, size, batch in ((32, 128, 2), (64, 128, 1)):
        detector = TinyCenter(width=width).to(device).eval()
        inputs = torch.randn(batch, 1, size, size, device=device)
        _, targets = batched(shapes.frames(count=batch), batch)[0]
        encoded = detector.encode(
            targets, torch.zeros(batch, 2, size // 2, size // 2, device=device)
        )
        for depth in ("head", "backbone"):
            plain, ours, hooks = fit_times(detector, inputs, encoded, depth, device, repeats)
            what = f"fit step, {depth}, width {width}, {size // 2}x{size // 2} map"
            rows.append(
                {
                    "what": what,
                    "baseline": "forward + backward",
                    "baseline_ms": 1e3 * plain,
                    "ms": 1e3 * ours,
                    "ratio": ours / plain,
                }
            )
            rows.append(
                {
                    "what": "  by plain hooks",
                    "baseline": "",
                    "baseline_ms": 1e3 * plain,
                    "ms": 1e3 * hooks,
                    "ratio": hooks / plain,
                }
            )
    return rows


def exact(device: str, repeats: int) -> list[dict[str, object]]:
    detector, twice = (Boxes(width=32).to(device).eval() for _ in range(2))
    twice.count = 100
    posterior = boxcov.fit(detector, shapes.frames(count=4), prior_precision=1.0)
    image = torch.randn(1, 1, 128, 128, device=device)
    fast, more = boxcov.ExactGLM(detector, posterior), boxcov.ExactGLM(twice, posterior)
    glm_model, sampled = boxcov.GLM(detector, posterior), boxcov.MCGLM(detector, posterior)
    plain, t50, t100, mc = medians(
        repeats,
        device,
        lambda: detector.detect(image),
        lambda: fast(image),
        lambda: more(image),
        lambda: sampled(image),
    )
    _, glm = medians(2, device, lambda: fast(image), lambda: glm_model(image))
    return [
        {
            "what": "GLM, 50 boxes",
            "baseline": "ExactGLM, 50 boxes",
            "baseline_ms": 1e3 * t50,
            "ms": 1e3 * glm,
            "ratio": glm / t50,
        },
        {
            "what": "ExactGLM, 100 boxes",
            "baseline": "ExactGLM, 50 boxes",
            "baseline_ms": 1e3 * t50,
            "ms": 1e3 * t100,
            "ratio": t100 / t50,
        },
        {
            "what": "ExactGLM, 50 boxes, all included",
            "baseline": "plain detector",
            "baseline_ms": 1e3 * plain,
            "ms": 1e3 * t50,
            "ratio": t50 / plain,
        },
        {
            "what": "MCGLM, k = 10, all included",
            "baseline": "plain detector",
            "baseline_ms": 1e3 * plain,
            "ms": 1e3 * mc,
            "ratio": mc / plain,
        },
    ]


def trunk_passes(device: str) -> list[dict[str, object]]:
    """Count the passes through the backbone for one frame of MCGLM with a head posterior."""
    passes = [0]

    class Counting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            passes[0] += 1
            return super().forward(x)

    detector = Boxes(width=16).eval()
    detector.backbone = Counting(*detector.backbone)
    detector.to(device)
    model = boxcov.MCGLM(
        detector, boxcov.fit(detector, shapes.frames(count=2), prior_precision=1.0), samples=10
    )
    passes[0] = 0
    model(torch.randn(1, 1, 64, 64, device=device))
    return [
        {
            "what": "trunk passes of MCGLM, head posterior",
            "baseline": "plain detector",
            "baseline_ms": None,
            "ms": None,
            "ratio": float(passes[0]),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = (
        fit_step(options.device, options.repeats)
        + exact(options.device, options.repeats)
        + trunk_passes(options.device)
    )
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"torch {torch.__version__}, {options.device}, {options.threads} threads, "
        f"medians of {options.repeats}\n"
    )
    print(f"{'':52}{'ms':>9}  {'against':24}{'ms':>9}{'ratio':>8}")
    for row in rows:
        ms, base = (
            f"{row[key]:.1f}" if row[key] is not None else "-" for key in ("ms", "baseline_ms")
        )
        print(f"{row['what']:52}{ms:>9}  {row['baseline']:24}{base:>9}{row['ratio']:8.2f}")


if __name__ == "__main__":
    main()
