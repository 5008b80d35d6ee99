"""instances() with mixed or reordered items, or with copied weights, are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from boxcov import BoxcovError, Detector, ExactGLM, Posterior, Selection, fit
from oracles.dense import box_covariance, relative


class Queries(Detector):
    """A linear head on tokens."""

    box_fields = ("x", "y")
    classes = ("a",)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pre, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        tokens = self.body(inputs).tanh()
        return {"tokens": tokens, "boxes": self.boxes(tokens)}

    def boxes(self, tokens: Tensor) -> Tensor:
        return self.head(self.pre(tokens).tanh())

    def select(self, raw: dict[str, Tensor]) -> Selection:
        frame, token = torch.ones(raw["tokens"].shape[:2]).nonzero(as_tuple=True)
        return Selection(
            frame, torch.ones(len(frame)), torch.zeros(len(frame), dtype=torch.long), (frame, token)
        )

    def decode(self, raw: dict[str, Tensor], selection: Selection) -> Tensor:
        return raw["boxes"][selection.where].exp()

    def instances(self, raw: dict[str, Tensor], selection: Selection, with_logit: bool = False):
        yield torch.arange(len(selection)), lambda: self.boxes(raw["tokens"][selection.where]).exp()

    def loss(self, raw: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (raw["boxes"] - targets).square().flatten(1).sum(1)

    def parts(self):
        return {"head": (self.pre, self.head), "backbone": self.body}


class Permuting(Queries):
    """The right boxes, but the layers see the instances in another order."""

    def instances(self, raw: dict[str, Tensor], selection: Selection, with_logit: bool = False):
        index = torch.arange(len(selection))
        order = index.flip(0)
        yield index, lambda: self.boxes(raw["tokens"][selection.where][order])[order].exp()


class Attending(Queries):
    """Every query attends to the others, so a box depends on several items."""

    def boxes(self, tokens: Tensor) -> Tensor:
        q = self.pre(tokens)
        return self.head(torch.softmax(q @ q.transpose(-1, -2), -1) @ tokens)


class CopyingOne(Queries):
    """The right boxes, but by a copy of a weight, whose gradient is lost."""

    copied: tuple[str, ...] = ("pre",)

    def instances(self, raw: dict[str, Tensor], selection: Selection, with_logit: bool = False):
        copy = type(self)().double()
        copy.load_state_dict(self.state_dict())
        layers = [getattr(copy if n in self.copied else self, n) for n in ("pre", "head")]
        tokens = raw["tokens"][selection.where]
        yield torch.arange(len(selection)), lambda: layers[1](layers[0](tokens).tanh()).exp()


class CopyingAll(CopyingOne):
    """No weight of the posterior is used."""

    copied = ("pre", "head")


def queries(kind: type[Queries]) -> tuple[Queries, Posterior, Tensor]:
    torch.manual_seed(0)
    detector = kind().double()
    x, targets = (
        torch.randn(6, 5, 3, dtype=torch.float64),
        torch.randn(6, 5, 2, dtype=torch.float64),
    )
    return detector, fit(detector, [(x, targets)], n_data=50, prior_precision=0.3), x


@pytest.mark.parametrize("kind", [Permuting, Attending])
def test_mixed_instances_are_refused(kind: type[Queries]) -> None:
    detector, posterior, x = queries(kind)
    model = ExactGLM(detector, posterior)
    for _ in range(2):  # and not only once
        with pytest.raises(BoxcovError, match=rf"{kind.__name__}\.instances\(\)"):
            model(x[:1])


@pytest.mark.parametrize("kind", [Permuting, Attending, CopyingOne, CopyingAll])
def test_wrong_instances_are_refused_after_a_frame_of_one_box(
    kind: type[Queries],
) -> None:
    """A single box decides nothing: its covariance is that of a backward pass."""
    detector, posterior, x = queries(kind)
    model = ExactGLM(detector, posterior)
    assert (
        relative(model(x[:1, :1]).covariance, box_covariance(detector, posterior, x[:1, :1])) < 1e-9
    )
    with pytest.raises(BoxcovError, match=rf"{kind.__name__}\.instances\(\)"):
        model(x[:1])
