"""Train a LiDAR detector: AdamW with a one-cycle rate, mixed precision on a GPU, checkpoints.

The order and the augmentation of the frames depend on the seed and the step only, so a resumed run
sees the same frames as one that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from boxcov._files.input_file import open_tensors
from boxcov._files.output_file import to_json, write_safetensors
from boxcov._torch.modules import move
from boxcov._torch.process_state import item_seed
from boxcov.data.augment import Augmentation
from boxcov.data.sequence import merge
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, check_whole

Progress = Callable[[int, int, float], None]
_KEY = "boxcov.training"


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run."""

    steps: int = 2000
    batch: int = 4
    rate: float = 2e-3
    weight_decay: float = 0.01
    clip: float = 10.0  # the largest norm of a gradient
    seed: int = 0
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or not self.rate > 0:
            raise BoxcovError(
                "steps and batch must be at least 1 and the rate above 0, "
                f"got {self.steps}, {self.batch} and {self.rate}"
            )


def train(
    detector: Detector,
    frames: Sequence[Any],
    recipe: Recipe,
    *,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 500,
    resume: bool = False,
    progress: Progress | None = None,
) -> float:
    """Train ``detector`` in place, leave it in eval mode, and return its final loss.

    The final loss is the mean over the last tenth of the steps.
    frames: (inputs, targets), each a list with one entry per frame.
    checkpoint: a file to write every ``checkpoint_every`` steps, and to ``resume`` from.
    progress: called with the number of steps done, the number of all steps and the running loss.
    """
    if not len(frames):
        raise BoxcovError("the data set is empty: training needs at least one frame")
    check_whole("checkpoint_every", checkpoint_every)
    device = next(detector.parameters()).device
    optimiser = torch.optim.AdamW(
        detector.parameters(),
        recipe.rate,
        weight_decay=recipe.weight_decay,
        betas=(0.9, 0.99),
        fused=device.type == "cuda",
    )
    done = 0
    if resume and checkpoint is not None and Path(checkpoint).exists():
        done = _load(Path(checkpoint), detector, optimiser, recipe, len(frames))
    detector.train()
    running = torch.zeros((), device=device)
    last: list[Tensor] = []
    for step in range(done, recipe.steps):
        optimiser.param_groups[0]["lr"] = rate_at(step, recipe)
        loss = _step(detector, optimiser, _batch(frames, recipe, step, device), recipe)
        running = loss if step == done else 0.98 * running + 0.02 * loss
        if step >= recipe.steps - max(1, recipe.steps // 10):
            last.append(loss)
        if progress is not None:
            progress(step + 1, recipe.steps, float(running))
        due = (step + 1) % checkpoint_every == 0 or step + 1 == recipe.steps
        if checkpoint is not None and due:
            _save(Path(checkpoint), detector, optimiser, recipe, step + 1, len(frames))
    detector.eval()
    return float(torch.stack(last).mean()) if last else float("nan")


def rate_at(step: int, recipe: Recipe) -> float:
    """Return the learning rate of a step: one cycle of two cosines.

    It rises from a tenth of the rate over the first 30 % of the steps, then falls to almost 0.
    """
    part = step / max(1, recipe.steps - 1)
    if part < 0.3:
        return recipe.rate * (0.55 - 0.45 * cos(pi * part / 0.3))
    return recipe.rate * (0.5 + 0.5 * cos(pi * (part - 0.3) / 0.7)) + 1e-9


def _step(
    detector: Detector, optimiser: torch.optim.Optimizer, batch: tuple[Any, Any], recipe: Recipe
) -> Tensor:
    inputs, targets = batch
    device = next(detector.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        raw = detector(inputs)
    raw = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, raw)
    loss = detector.loss(raw, targets).mean()
    if not bool(loss.isfinite()):
        raise BoxcovError(
            f"the training loss is {loss.item()}: lower the rate ({recipe.rate}), "
            "or look for NaN in the frames"
        )
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(detector.parameters(), recipe.clip)
    optimiser.step()
    return loss.detach()


def _batch(
    frames: Sequence[Any], recipe: Recipe, step: int, device: torch.device
) -> tuple[Any, Any]:
    """Return the frames of one step. The seed decides the order in each epoch."""
    first = step * recipe.batch
    places = [divmod(first + i, len(frames)) for i in range(recipe.batch)]
    items = [frames[_order(recipe.seed, epoch, len(frames))[i]] for epoch, i in places]
    inputs, targets = move(merge([tuple(item) for item in items]), device)
    if recipe.augmentation is not None:
        generator = torch.Generator().manual_seed(item_seed(recipe.seed + 1, step))
        inputs, targets = recipe.augmentation(inputs, targets, generator)
    return inputs, targets


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _order(seed: int, epoch: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(7_919 * (seed + 1) + epoch)
    return torch.randperm(count, generator=generator).tolist()


def _save(
    path: Path,
    detector: Detector,
    optimiser: torch.optim.Optimizer,
    recipe: Recipe,
    done: int,
    frames: int,
) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in detector.state_dict().items()}
    for name, parameter in detector.named_parameters():
        for key, value in optimiser.state[parameter].items():
            tensors[f"optimiser.{key}.{name}"] = value
    about = {"done": done, "frames": frames, "recipe": asdict(recipe)}
    write_safetensors(path, tensors, {_KEY: to_json(about)})


def _load(
    path: Path, detector: Detector, optimiser: torch.optim.Optimizer, recipe: Recipe, frames: int
) -> int:
    with open_tensors(path, "a training checkpoint", _KEY) as (about, file):
        there, counted, done = about["recipe"], about["frames"], about["done"]
        if there != asdict(recipe) or counted != frames:
            raise BoxcovError(
                f"{path}: belongs to another run ({there} on {counted} frames): "
                "remove it to start again"
            )
        if type(done) is not int or not 0 <= done <= recipe.steps:
            raise ValueError(f"{done!r} of {recipe.steps} steps are done")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        names = [name for name in tensors if name.startswith("model.")]
        detector.load_state_dict({name.removeprefix("model."): tensors[name] for name in names})
        _restore_moments(detector, optimiser, tensors)
    return int(done)


def _restore_moments(
    detector: Detector, optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    for name, parameter in detector.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = tensors.get(f"optimiser.{key}.{name}")
            if value is not None and value.shape != (() if key == "step" else parameter.shape):
                raise ValueError(f"{key} of {name} has shape {tuple(value.shape)}")
            if value is not None:
                # the moments are on the weight's device, the step only if the optimiser is fused
                on_cpu = key == "step" and not optimiser.defaults["fused"]
                optimiser.state[parameter][key] = value if on_cpu else value.to(parameter.device)
