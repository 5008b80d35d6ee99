from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boxcov import BoxcovError, BoxcovWarning, FitOptions, Posterior, fit
from boxcov.data import batched, shapes
from boxcov.detectors.tiny import TinyCenter
from helpers.nets import NetDetector

NAN = float("nan")


def item(count: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 2, 5, 5), torch.randn(count, 2, 25)


class Root(nn.Module):
    """A square root at 0: a finite loss with an infinite gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


@pytest.fixture
def detector() -> NetDetector:
    torch.manual_seed(0)
    return NetDetector(
        nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, bias=False),
            nn.Tanh(),
            nn.Conv2d(3, 2, 1, bias=False),
            Root(),
        )
    )


def bad_items() -> dict[str, tuple[Any, Any]]:
    x, y = item()
    loss = y.clone()
    loss[1, 0, 3] = NAN
    return {
        "inputs": (torch.where(torch.arange(5) == 2, NAN, x), y),
        "loss": (x, loss),
        "gradient": (torch.zeros_like(x), y),
    }


MESSAGES = {
    "inputs": r"inputs of item 2 holds 20 NaN or infinite values of 100",
    "loss": r"the loss of item 2 is nan in its frame 1",
    "gradient": r"item 2 gives a NaN or infinite input or gradient "
    r"at net\.0\.weight, net\.2\.weight, though its loss is finite",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_frame_that_is_not_finite_is_fatal_and_named(detector, kind) -> None:
    frames = [item(), item(), bad_items()[kind], item()]
    with pytest.raises(BoxcovError, match=rf"{MESSAGES[kind]}.*nonfinite='skip'"):
        fit(detector, frames)


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("kind", MESSAGES)
def test_skipped_frames_leave_no_trace_but_their_number(detector, kind, place, tmp_path) -> None:
    good = [item(), item(), item()]
    frames = [*good[:place], bad_items()[kind], *good[place:]]
    with pytest.warns(BoxcovWarning, match=f"item {place} .*: left out"):
        found = fit(detector, frames, prior_precision=1.0, options=FitOptions(nonfinite="skip"))
    expected = fit(detector, good, n_data=8, prior_precision=1.0)
    assert (found.frames, found.skipped, found.n_data, found.loss) == (6, 1, 8, expected.loss)
    for name, block in expected.blocks.items():
        assert torch.equal(found.variances(name), expected.variances(name))
        assert torch.equal(found.blocks[name].Q.vectors, block.Q.vectors)
    found.save(tmp_path / "p")
    assert Posterior.load(tmp_path / "p", detector).skipped == 1


def test_a_second_pass_leaves_out_the_same_frames(detector) -> None:
    good = [item(), item(), item()]
    with pytest.warns(BoxcovWarning, match="left out") as warned:
        found = fit(
            detector,
            [good[0], bad_items()["loss"], *good[1:]],
            prior_precision=1.0,
            options=FitOptions(nonfinite="skip", ekfac=True),
        )
    assert warned[0].filename == __file__  # the line that calls fit()
    expected = fit(detector, good, n_data=8, prior_precision=1.0, options=FitOptions(ekfac=True))
    for name in expected.blocks:
        assert torch.equal(found.variances(name), expected.variances(name))


def test_skipping_every_frame_is_an_error(detector) -> None:
    with (
        pytest.warns(BoxcovWarning),
        pytest.raises(BoxcovError, match="gradients of all 2 items are not finite"),
    ):
        fit(detector, [bad_items()["loss"]] * 2, options=FitOptions(nonfinite="skip"))


def test_frames_are_named_as_the_data_set_has_them() -> None:
    inputs, targets = batched(shapes.frames(count=2), 2)[0]
    targets = [{**target, "token": f"token-{i}"} for i, target in enumerate(targets)]
    with pytest.raises(BoxcovError, match=r"item 0 holds 8192 NaN .*\(token-0, token-1\)"):
        fit(TinyCenter(), [(inputs * NAN, targets)])


def test_other_choices_are_refused(detector) -> None:
    with pytest.raises(BoxcovError, match="nonfinite must be one of error, skip, got 'ignore'"):
        fit(detector, [item()], options=FitOptions(nonfinite="ignore"))
