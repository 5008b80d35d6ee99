"""with_logit=True: the joint covariance of score logit and box, in every method."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from boxcov import (
    GLM,
    MCGLM,
    MCI,
    BoxcovError,
    BoxcovWarning,
    Detections,
    ExactGLM,
    fit,
)
from boxcov.concatenation import concatenate
from boxcov.detector import InstanceGroup, Selection
from boxcov.detectors.tiny import TinyCenter
from oracles.dense import relative

METHODS = {
    "mcglm": lambda detector, posterior, **more: MCGLM(detector, posterior, samples=12, **more),
    "fd": lambda detector, posterior, **more: MCGLM(
        detector, posterior, samples=12, derivative="fd", epsilon=1e-5, **more
    ),
    "glm": GLM,
    "exact": ExactGLM,
    "mci": lambda detector, posterior, **more: MCI(
        detector, posterior.with_prior(1e5), **more
    ),  # weights far away give no boxes
    "dropout": lambda detector, posterior, **more: MCI(detector, **more),
}


@pytest.fixture(scope="module")
def deep(tiny, train_frames):
    return fit(tiny, train_frames[:40], depth="backbone", n_data=2000, prior_precision=1.0)


@pytest.mark.parametrize("name", METHODS)
def test_all_else_is_bit_for_bit_the_same(tiny, posterior, image, name: str) -> None:
    plain, scored = (
        METHODS[name](tiny, posterior, **more)(image) for more in ({}, {"with_logit": True})
    )
    for part in ("boxes", "scores", "labels", "frame", "covariance"):
        assert torch.equal(getattr(plain, part), getattr(scored, part)), part
    assert plain.score_variance is None
    assert scored.score_variance.shape == (len(plain),)
    assert scored.score_covariance.shape == plain.boxes.shape
    assert bool((scored.score_variance > 0).all())
    assert "with_logit" not in plain.meta
    assert scored.meta["with_logit"] is True


def test_all_else_is_the_same_below_the_head(tiny, deep, image) -> None:
    for samples in (None, 8):
        plain, scored = (
            ExactGLM(tiny, deep, samples, with_logit=flag)(image) for flag in (False, True)
        )
        assert torch.equal(plain.covariance, scored.covariance)


def test_sampled_covariance_is_bit_for_bit_the_same(tiny, posterior, image) -> None:
    plain, scored = (MCGLM(tiny, posterior, with_logit=flag)(image) for flag in (False, True))
    assert torch.equal(plain.covariance, scored.covariance)


def joint(found: Detections) -> Tensor:
    """(m, D + 1, D + 1)"""
    row = found.score_covariance.unsqueeze(1)
    return torch.cat(
        [
            torch.cat([found.covariance, row], 1),
            torch.cat([row, found.score_variance[:, None, None]], 2).transpose(1, 2),
        ],
        2,
    )


def test_exact_equals_glm(tiny, posterior, image) -> None:
    exact, glm = (joint(kind(tiny, posterior, with_logit=True)(image)) for kind in (ExactGLM, GLM))
    assert relative(exact[:, -1], glm[:, -1]) < 1e-5
    assert relative(exact, glm) < 1e-5


def test_exact_equals_glm_below_the_head(tiny, deep, image) -> None:
    tiny = _reporting(tiny, 4)
    exact, glm = (kind(tiny, deep, with_logit=True)(image) for kind in (ExactGLM, GLM))
    assert relative(exact.score_variance, glm.score_variance) < 1e-5
    assert relative(exact.score_covariance, glm.score_covariance) < 1e-5


def test_glm_equals_a_dense_jacobian(tiny, posterior, image) -> None:
    """J Sigma J^T of [box, logit] from the Jacobian of a plain functional call."""
    tiny = _reporting(tiny, 2)
    with torch.no_grad():
        selection = tiny.select(tiny(image))
    theta = {
        name: p.detach() for name, p in tiny.named_parameters() if name in posterior.parameters
    }

    def z(weights: dict[str, Tensor]) -> Tensor:
        raw = torch.func.functional_call(tiny, weights, (image,))
        frame, row, column = selection.where
        logit = torch.stack(
            [raw["heatmap"][f, c, y, x] for f, c, y, x in zip(frame, selection.labels, row, column)]
        )
        return torch.cat([tiny.decode(raw, selection), logit[:, None]], 1)

    expected = posterior.quadratic(torch.func.jacrev(z)(theta)).detach()
    assert relative(joint(GLM(tiny, posterior, with_logit=True)(image)), expected) < 1e-5


def test_samples_converge_to_the_exact_covariance(tiny, posterior, image) -> None:
    exact = joint(ExactGLM(tiny, posterior, with_logit=True)(image))
    many = joint(MCGLM(tiny, posterior, samples=800, with_logit=True)(image))
    assert relative(many, exact) < 0.1
    differences = MCGLM(
        tiny, posterior, samples=12, derivative="fd", epsilon=1e-5, with_logit=True
    )(image)
    assert (
        relative(
            joint(differences), joint(MCGLM(tiny, posterior, samples=12, with_logit=True)(image))
        )
        < 1e-2
    )


def test_box_and_logit_have_one_psd_covariance(tiny, posterior, image) -> None:
    values = torch.linalg.eigvalsh(
        joint(ExactGLM(tiny, posterior, with_logit=True)(image)).double()
    )
    assert bool((values >= -1e-6 * values.amax(1, keepdim=True)).all())


def test_a_posterior_without_the_heat_map_gives_variance_0(tiny, train_frames, image) -> None:
    """Only the size branch is in the posterior: the logit does not depend on it."""
    posterior = fit(tiny, train_frames[:10], depth=["head.branches.size"], prior_precision=1.0)
    for kind in (ExactGLM, GLM, MCGLM):
        found = kind(tiny, posterior, with_logit=True)(image)
        assert bool((found.score_variance == 0).all())
        assert bool((found.score_covariance == 0).all())
        assert bool((found.uncertainty > 0).all())


class Whole(TinyCenter):
    """Cannot run its head by instance with the logit."""

    def instances(
        self, raw: dict[str, Tensor], selection: Selection, with_logit: bool = False
    ) -> list[InstanceGroup] | None:
        return None if with_logit else super().instances(raw, selection)


@pytest.mark.parametrize("depth", ["head", "backbone"])
def test_instances_without_the_logit(tiny, train_frames, image, depth, monkeypatch) -> None:
    other = Whole(threshold=tiny.threshold, most=5)
    other.load_state_dict(tiny.state_dict())
    posterior = fit(other.eval(), train_frames[:10], depth=depth, prior_precision=1.0)
    exact, glm = (kind(other, posterior, with_logit=True) for kind in (ExactGLM, GLM))
    with pytest.warns(BoxcovWarning, match="with_logit=True takes 4 backward passes for the 4"):
        found = exact(image)
    assert relative(joint(found), joint(glm(image))) < 1e-5
    monkeypatch.setattr("boxcov.predict.backward_mode.MEMORY", 1)  # one box at a time
    again = exact(image)  # the warning comes once, and a second one would be an error here
    assert relative(joint(again), joint(found)) < 1e-5


class Wrong(TinyCenter):
    """Gives the logit of another class by instance."""

    def instances(
        self, raw: dict[str, Tensor], selection: Selection, with_logit: bool = False
    ) -> list[InstanceGroup]:
        other = Selection(selection.frame, selection.scores, 1 - selection.labels, selection.where)
        return super().instances(raw, other, with_logit)


class TooMany(TinyCenter):
    def logits(self, raw: dict[str, Tensor], selection: Selection) -> Tensor:
        return raw["heatmap"].flatten()


def test_contradictions_are_refused(tiny, posterior, image) -> None:
    wrong, many = Wrong(threshold=0.05), TooMany(threshold=0.05)
    for other in (wrong, many):
        other.load_state_dict(tiny.state_dict())
        other.eval()
    with pytest.raises(BoxcovError, match=r"Wrong\.instances\(with_logit=True\) gives box"):
        ExactGLM(wrong, posterior, with_logit=True)(image)
    with pytest.raises(
        BoxcovError,
        match=r"TooMany\.logits\(\) must give one logit for each of \d+ scores, it gave shape",
    ):
        MCGLM(many, posterior, with_logit=True)(image)


def test_a_detector_without_logits(tiny, train_frames) -> None:
    from boxcov import Detector

    plain = type("Plain", (TinyCenter,), {"logits": Detector.logits})()
    posterior = fit(plain, train_frames[:2], prior_precision=1.0)
    with pytest.raises(
        BoxcovError,
        match=r"with_logit=True needs the logits of the scores: Plain has no logits\(\)",
    ):
        MCGLM(plain, posterior, with_logit=True)


@pytest.mark.parametrize("name", METHODS)
def test_no_boxes(tiny, posterior, image, name: str) -> None:
    blind = TinyCenter(threshold=2.0)
    blind.load_state_dict(tiny.state_dict())
    found = METHODS[name](blind.eval(), posterior, with_logit=True)(image)
    assert found.score_variance.shape == (0,)
    assert found.score_covariance.shape == (0, 5)


def test_saving_slicing_moving_and_concatenating_keep_it(tiny, posterior, image, tmp_path) -> None:
    found = ExactGLM(tiny, posterior, with_logit=True)(image)
    found.save(tmp_path / "found.safetensors")
    again = Detections.load(tmp_path / "found.safetensors")
    assert torch.equal(again.score_variance, found.score_variance)
    assert torch.equal(again.score_covariance, found.score_covariance)
    assert torch.equal(found[1:].score_covariance, found.score_covariance[1:])
    assert found.to("cpu").score_variance.device.type == "cpu"
    assert np.array_equal(found.numpy()["score_variance"], found.score_variance.numpy())
    assert len(concatenate([found, found]).score_variance) == 2 * len(found)
    with pytest.raises(BoxcovError, match="score_variance has shape"):
        Detections(
            *(
                getattr(found, n)
                for n in ("boxes", "scores", "labels", "frame", "fields", "classes")
            ),
            score_variance=torch.zeros(1),
        )


def test_exact_equals_glm_once_the_stages_are_verified(tiny, posterior, train_frames) -> None:
    """From the second frame the boxes are computed by stages, the logit by instance."""
    exact, glm = (kind(tiny, posterior, with_logit=True) for kind in (ExactGLM, GLM))
    for i in range(3):
        assert relative(joint(exact(train_frames[i][0])), joint(glm(train_frames[i][0]))) < 1e-5


@pytest.mark.parametrize("kind", [ExactGLM, MCGLM])
def test_all_else_is_the_same_once_stages_are_verified(
    tiny, posterior, train_frames, kind: type
) -> None:
    plain, scored = (kind(tiny, posterior, with_logit=flag) for flag in (False, True))
    for i in range(3):
        assert torch.equal(
            plain(train_frames[i][0]).covariance, scored(train_frames[i][0]).covariance
        )


def test_half_precision(tiny, posterior, image, train_frames) -> None:
    half = TinyCenter(threshold=0.1)
    half.load_state_dict(tiny.state_dict())
    half = half.eval().bfloat16()
    own = fit(
        half,
        [(inputs.bfloat16(), targets) for inputs, targets in train_frames[:5]],
        prior_precision=1.0,
    )
    found = ExactGLM(half, own, with_logit=True)(image.bfloat16())
    assert found.score_variance.dtype == torch.float32
    assert bool((found.score_variance > 0).all())


def _reporting(tiny: TinyCenter, count: int) -> TinyCenter:
    other = TinyCenter(threshold=tiny.threshold, most=count)
    other.load_state_dict(tiny.state_dict())
    return other.eval()
