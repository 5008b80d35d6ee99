"""Stages and instances that are right for the first boxes alone: later frames are not trusted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from boxcov import GLM, MCGLM, MCI, BoxcovError, BoxcovWarning, Detector, ExactGLM, fit
from boxcov.detectors.tiny import TinyCenter
from boxcov.head_stages import HeadStages, stage_instances
from oracles.dense import relative


class FirstFrame(TinyCenter):
    """Takes the features of all boxes from the first frame of the batch."""

    def stages(self, raw, selection) -> HeadStages | None:
        staged = super().stages(raw, selection)
        return replace(staged, frame=0 * staged.frame)


class FirstFrameInstances(TinyCenter):
    def stages(self, raw, selection) -> HeadStages | None:
        return None

    def instances(self, raw, selection, with_logit=False):
        staged = TinyCenter.stages(self, raw, selection)
        return stage_instances(replace(staged, frame=0 * staged.frame), with_logit)


class RightInstances(FirstFrame):
    """Wrong stages, and right instances."""

    def instances(self, raw, selection, with_logit=False):
        return stage_instances(TinyCenter.stages(self, raw, selection), with_logit)


class BorderRepeated(FirstFrameInstances):
    """Repeats the features beyond the border, where the whole map has zeros."""

    def instances(self, raw, selection, with_logit=False):
        own, r = TinyCenter.stages(self, raw, selection), 8
        wide = F.pad(own.features, (r, r, r, r), mode="replicate")
        moved = replace(
            own,
            features=wide,
            row=own.row + r,
            column=own.column + r,
            decode=lambda values, row, column: own.decode(values, row - r, column - r),
        )
        return stage_instances(moved, with_logit)


def of_kind(kind: type[TinyCenter], tiny: TinyCenter) -> TinyCenter:
    detector = kind()
    detector.load_state_dict(tiny.state_dict())
    return detector.eval()


def at_border(detector: Detector, inputs: torch.Tensor) -> bool:
    _, row, column = detector.select(detector(inputs)).where
    return int(torch.stack([row, column]).min()) < 3 or int(torch.stack([row, column]).max()) > 28


@pytest.mark.parametrize("kind", [FirstFrame, FirstFrameInstances])
@pytest.mark.parametrize("method", [ExactGLM, MCI])
def test_the_first_frame_of_a_batch_for_all(tiny, train_frames, kind, method) -> None:
    wrong = of_kind(kind, tiny)
    model = method(wrong, fit(wrong, train_frames[:4], prior_precision=1e4))
    model(train_frames[0][0])  # is right for a single frame
    batch = torch.cat([inputs for inputs, _ in train_frames[1:4]])
    with pytest.raises(BoxcovError, match=r"gives box \d+ as .* decode\(\).* gives"):
        model(batch)


@pytest.mark.parametrize(("kind", "method"), [(RightInstances, ExactGLM), (FirstFrame, MCGLM)])
def test_wrong_stages_are_replaced_by_the_oracle(tiny, train_frames, kind, method) -> None:
    wrong = of_kind(kind, tiny)
    posterior = fit(wrong, train_frames[:4], prior_precision=1.0)
    model, expected = method(wrong, posterior), method(tiny, posterior)
    model(train_frames[0][0])
    batch = torch.cat([inputs for inputs, _ in train_frames[1:4]])
    with pytest.warns(BoxcovWarning, match=r"stages\(\) gives other boxes than decode\(\)"):
        found = model(batch)
    assert relative(found.covariance, expected(batch).covariance) < 1e-4


def test_a_wrong_border_is_seen_when_a_box_reaches_it(tiny, train_frames) -> None:
    wrong = of_kind(BorderRepeated, tiny)
    model = ExactGLM(wrong, fit(wrong, train_frames[:4], prior_precision=1.0))
    inner = [inputs for inputs, _ in train_frames if not at_border(tiny, inputs)]
    outer = [inputs for inputs, _ in train_frames if at_border(tiny, inputs)]
    oracle = GLM(wrong, model.posterior)
    for inputs in inner[:3]:
        expected = oracle(inputs).covariance
        assert relative(model(inputs).covariance, expected) < 1e-4
    with pytest.raises(BoxcovError, match=r"gives box \d+ as .* decode\(\).* gives"):
        model(torch.cat(outer))
