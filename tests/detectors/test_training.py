from __future__ import annotations

import pytest
import torch

from boxcov import BoxcovError
from boxcov.data import shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.detectors.training import Recipe, _order, rate_at, train

FRAMES = list(shapes.frames(count=10))
RECIPE = Recipe(steps=8, batch=4, seed=3)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path) -> None:
    whole, parts = TinyCenter(width=4), TinyCenter(width=4)
    train(whole, FRAMES, RECIPE)

    class Cut(Exception):
        pass

    def cut(done: int, total: int, loss: float) -> None:
        if done == 6:
            raise Cut

    with pytest.raises(Cut):
        train(parts, FRAMES, RECIPE, checkpoint=tmp_path / "c", checkpoint_every=5, progress=cut)
    fresh = TinyCenter(width=4, seed=9)
    train(fresh, FRAMES, RECIPE, checkpoint=tmp_path / "c", resume=True)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), fresh.state_dict().values())
    )
    assert not fresh.training


def test_every_frame_comes_once_an_epoch() -> None:
    assert sorted(_order(0, 0, 10)) == list(range(10))
    assert _order(0, 0, 10) != _order(0, 1, 10)
    assert _order(0, 0, 10) != _order(1, 0, 10)


def test_the_loss_falls() -> None:
    losses = []
    train(
        TinyCenter(width=8),
        FRAMES,
        Recipe(steps=60, batch=5),
        progress=lambda done, total, loss: losses.append(loss),
    )
    assert losses[-1] < 0.5 * losses[0]


def test_bad_input(tmp_path) -> None:
    with pytest.raises(BoxcovError, match="the data set is empty"):
        train(TinyCenter(), [], RECIPE)
    with pytest.raises(BoxcovError, match="steps and batch must be at least 1"):
        Recipe(steps=0)
    with pytest.raises(BoxcovError, match="checkpoint_every must be a whole number of at least 1"):
        train(TinyCenter(width=4), FRAMES, RECIPE, checkpoint=tmp_path / "c", checkpoint_every=0)
    (tmp_path / "c").write_text("no")
    with pytest.raises(BoxcovError, match="not a training checkpoint"):
        train(TinyCenter(), FRAMES, RECIPE, checkpoint=tmp_path / "c", resume=True)
    train(TinyCenter(width=4), FRAMES, Recipe(steps=1), checkpoint=tmp_path / "d")
    with pytest.raises(BoxcovError, match="belongs to another run"):
        train(TinyCenter(width=4), FRAMES, RECIPE, checkpoint=tmp_path / "d", resume=True)
    with pytest.raises(BoxcovError, match="the training loss is nan"):
        train(
            TinyCenter(width=4),
            [(inputs * float("nan"), targets) for inputs, targets in FRAMES],
            RECIPE,
        )


def test_the_rate_rises_then_falls() -> None:
    recipe = Recipe(steps=101, rate=1.0)
    assert [round(rate_at(step, recipe), 3) for step in (0, 30, 100)] == [0.1, 1.0, 0.0]
