"""Stages that contradict the detector are refused; heads without stages fall back to instances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import boxcov
from boxcov import BoxcovError, EngineOptions, ExactGLM
from boxcov.detectors.tiny import TinyCenter
from boxcov.head_stages import Stage, stage_instances
from oracles.dense import relative


class NoNorm(TinyCenter):
    """Its stages leave out a norm."""

    def stages(self, raw, selection):
        staged = super().stages(raw, selection)
        return replace(staged, stem=(Stage(staged.stem[0].layers, None, torch.relu),))


class Strided(TinyCenter):
    """A head with a stride, which stages cannot describe."""

    def stages(self, raw, selection):
        staged = super().stages(raw, selection)
        odd = nn.Conv2d(32, 16, 3, stride=2, padding=1, bias=False)
        return replace(staged, stem=(Stage(((odd,),), staged.stem[0].norms, torch.relu),))


class OwnInstances(NoNorm):
    """Wrong stages, and right instances."""

    def instances(self, raw, selection, with_logit=False):
        return stage_instances(TinyCenter.stages(self, raw, selection), with_logit)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoNorm, r"NoNorm\.stages\(\) gives box \d+ as .* decode\(\) gives"),
        (
            OwnInstances,
            r"stages\(\) contradicts instances\(\) or decode\(\): box \d+: relative difference "
            r"[\d.]+ between stages\(\) and the reference \(tolerance 0\.03\); is a stage missing",
        ),
    ],
)
def test_wrong_stages_are_refused(tiny, train_frames, kind, message: str) -> None:
    wrong = kind()
    wrong.load_state_dict(tiny.state_dict())
    posterior = boxcov.fit(wrong.eval(), train_frames[:4], prior_precision=1.0)
    with pytest.raises(BoxcovError, match=message):
        ExactGLM(wrong, posterior)(train_frames[0][0])


def test_a_strided_head_falls_back_to_instances(tiny, train_frames) -> None:
    odd = Strided()
    odd.load_state_dict(tiny.state_dict())
    posterior = boxcov.fit(odd.eval(), train_frames[:4], prior_precision=1.0)
    found = ExactGLM(odd, posterior)(train_frames[0][0])
    assert (
        relative(found.covariance, ExactGLM(tiny, posterior)(train_frames[0][0]).covariance) < 1e-5
    )


def test_an_unknown_precision_is_refused(tiny, train_frames) -> None:
    with pytest.raises(BoxcovError, match="precision must be one of float32, tf32, got 'double'"):
        ExactGLM(
            tiny,
            boxcov.fit(tiny, train_frames[:2], prior_precision=1.0),
            engine=EngineOptions(precision="double"),
        )
