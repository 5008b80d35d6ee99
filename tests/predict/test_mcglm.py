from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from boxcov import MCGLM, BoxcovError, BoxcovWarning, ExactGLM, Posterior, fit
from boxcov.detectors.tiny import TinyCenter
from boxcov.predict.forward_mode import derivatives
from boxcov.predict.forward_mode.derivatives import directional_derivatives
from helpers.nets import CASES
from oracles.dense import box_covariance, box_jacobian, relative


@pytest.fixture(scope="module")
def small():
    case = next(case for case in CASES if case.name == "conv2d")
    detector = case.detector()
    inputs, targets = case.frames(detector)
    return detector, fit(detector, [(inputs, targets)], n_data=50, prior_precision=0.5), inputs[:1]


def test_jvp_converges_to_exact_as_one_over_root_k(small) -> None:
    detector, posterior, inputs = small
    exact = box_covariance(detector, posterior, inputs)
    counts = torch.tensor([8.0, 32.0, 128.0, 512.0])
    errors = [
        torch.tensor(
            [
                relative(
                    MCGLM(detector, posterior, samples=int(k), seed=s)(inputs).covariance, exact
                )
                for s in range(40)
            ]
        )
        .square()
        .mean()
        .sqrt()
        for k in counts
    ]
    x, y = counts.log(), torch.stack(errors).log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert float(slope) == pytest.approx(-0.5, abs=0.1)
    assert errors[-1] < 0.15


def test_fd_converges_to_jvp_as_epsilon_falls(small) -> None:
    detector, posterior, inputs = small
    exact = MCGLM(detector, posterior, seed=3)(inputs).covariance
    errors = []
    for epsilon in (1e-2, 1e-3, 1e-4, 1e-5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BoxcovWarning)
            errors.append(
                relative(
                    MCGLM(detector, posterior, derivative="fd", epsilon=epsilon, seed=3)(
                        inputs
                    ).covariance,
                    exact,
                )
            )
    for coarse, fine in itertools.pairwise(errors):
        assert coarse / fine == pytest.approx(10, rel=0.3)  # first order


def test_fd_is_the_papers_algorithm(small) -> None:
    """Algorithm 1, word for word, on weights changed by hand."""
    detector, posterior, inputs = small
    epsilon, k = 1e-4, 5
    etas = posterior.sample(k, torch.Generator().manual_seed(4))
    with torch.no_grad():
        selection = detector.select(detector(inputs))
        z0 = detector.decode(detector(inputs), selection)
        named = dict(detector.named_parameters())
        A = []
        for i in range(k):
            for name, eta in etas.items():
                named[name].add_(epsilon * eta[i])
            A.append((detector.decode(detector(inputs), selection) - z0) / epsilon)
            for name, eta in etas.items():
                named[name].sub_(epsilon * eta[i])
        A = torch.stack(A, 2)
        tilde = A - A.mean(2, keepdim=True)
        expected = tilde @ tilde.transpose(1, 2) / (k - 1)
    # adding and subtracting leaves rounding in the weights, which changes their fingerprint
    fresh = next(case for case in CASES if case.name == "conv2d").detector()
    found = MCGLM(fresh, posterior, samples=k, derivative="fd", epsilon=epsilon, seed=4)(inputs)
    assert relative(found.covariance, expected) < 1e-8
    detector.load_state_dict(fresh.state_dict())


# the step, in float32: the table of the design


def off(tiny: TinyCenter, posterior: Posterior, image: torch.Tensor, epsilon: float) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoxcovWarning)
        fd = MCGLM(tiny, posterior, derivative="fd", epsilon=epsilon)(image).covariance
    return relative(fd, MCGLM(tiny, posterior)(image).covariance)


def test_fd_with_the_papers_epsilon_is_lost_in_rounding(tiny, posterior, image) -> None:
    assert off(tiny, posterior, image, 1e-7) >= 0.05
    assert off(tiny, posterior, image, 1e-5) < 0.02


def test_fd_with_a_longer_step_fails_under_the_paper_form(tiny, posterior, image) -> None:
    """Its eta are thousands of times longer: a step of 1e-3 leaves the linear region."""
    paper = posterior.paper()
    rms = [
        torch.cat([e.flatten() for e in p.sample(2).values()]).square().mean().sqrt()
        for p in (paper, posterior)
    ]
    assert rms[0] / rms[1] > 100
    assert off(tiny, paper, image, 1e-7) < 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BoxcovWarning)
        try:
            far = off(tiny, paper, image, 1e-3)
        except BoxcovError:  # not even finite
            far = float("inf")
    assert far > 1


def test_jvp_in_float32_agrees_with_float64(tiny, posterior, image) -> None:
    """Along the same directions, also the paper's wide ones, against a float64 Jacobian."""
    import copy

    J = box_jacobian(copy.deepcopy(tiny).double(), image.double())
    point = MCGLM(tiny, posterior).linearized.at(image)
    for form in (posterior, posterior.paper()):
        etas = form.sample(8, torch.Generator().manual_seed(2))
        with torch.no_grad():
            found = directional_derivatives(point, etas)
        exact = sum(
            torch.einsum("mdw,kw->mdk", J[name].flatten(2), eta.double().flatten(1))
            for name, eta in etas.items()
        )
        assert found.dtype == torch.float32
        assert relative(found.double(), exact) < 1e-4


def test_exact_in_float32_agrees_with_float64(tiny, image, train_frames) -> None:
    import copy

    twin = copy.deepcopy(tiny).double()
    exact = ExactGLM(
        twin,
        fit(
            twin, [(x.double(), y) for x, y in train_frames[:20]], n_data=2000, prior_precision=1.0
        ),
    )(image.double())
    found = ExactGLM(tiny, fit(tiny, train_frames[:20], n_data=2000, prior_precision=1.0))(image)
    assert relative(found.covariance.double(), exact.covariance) < 1e-3


@pytest.mark.parametrize("epsilon", [1e-7, 1e-2])
def test_fd_warns_once_of_a_bad_step(tiny, posterior, image, epsilon: float) -> None:
    model = MCGLM(tiny, posterior, derivative="fd", epsilon=epsilon)
    with pytest.warns(BoxcovWarning, match=r"a relative error of .* or use derivative='jvp'"):
        model(image)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(image)  # said once
        MCGLM(tiny, posterior, derivative="fd", epsilon=1e-5)(image)


# samples


def test_samples_are_reused_for_every_frame(tiny, posterior, image) -> None:
    model = MCGLM(tiny, posterior, seed=1)
    first, second = model(image).covariance, model(image).covariance
    assert torch.equal(first, second)
    assert torch.equal(MCGLM(tiny, posterior, seed=1)(image).covariance, first)
    assert not torch.equal(MCGLM(tiny, posterior, seed=2)(image).covariance, first)


def test_chunks_of_directions_do_not_change_the_numbers(
    tiny, posterior, image, monkeypatch
) -> None:
    whole = MCGLM(tiny, posterior, samples=7)
    A = directional_derivatives(whole.linearized.at(image), whole.etas)
    monkeypatch.setattr(derivatives, "_DIRECTIONS_AT_ONCE", 2)
    parts = directional_derivatives(whole.linearized.at(image), whole.etas)
    assert relative(parts, A) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 1}, "samples must be a whole number of at least 2, got 1"),
        ({"derivative": "backward"}, "derivative must be one of jvp, fd, got 'backward'"),
        ({"epsilon": 0.0}, "epsilon must be above 0, got 0.0"),
    ],
)
def test_bad_arguments(tiny, posterior, arguments: dict, message: str) -> None:
    with pytest.raises(BoxcovError, match=message):
        MCGLM(tiny, posterior, **arguments)


def test_half_precision_detectors_are_supported(train_frames, image) -> None:
    """The paper's eta would overflow float16: they are normalised, the derivatives rescaled."""
    import copy

    from boxcov.detectors.tiny import train

    detector = train(TinyCenter(seed=0), train_frames[:64], epochs=3)
    frames = train_frames[:16]
    reference = ExactGLM(detector, fit(detector, frames, prior_precision=1.0))(image)
    half = copy.deepcopy(detector).bfloat16()
    posterior = fit(half, [(x.bfloat16(), y) for x, y in frames], prior_precision=1.0)
    exact = ExactGLM(half, posterior)(image.bfloat16())
    # the same objects, though perhaps in another order: bfloat16 has three digits
    apart = torch.cdist(exact.boxes[:, :2].float(), reference.boxes[:, :2])
    assert len(exact) == len(reference) == len(apart.argmin(1).unique()) > 3
    assert float(apart.amin(1).max()) < 0.2
    ratio = exact.uncertainty / reference.uncertainty[apart.argmin(1)]
    assert float(ratio.min()) > 0.8
    assert float(ratio.max()) < 1.25
    for form in (posterior, posterior.paper()):
        whole = ExactGLM(half, form)(image.bfloat16())
        found = MCGLM(half, form, samples=50)(image.bfloat16())
        assert found.covariance.dtype == whole.covariance.dtype == torch.float32
        # 50 samples: a variance has a standard error of sqrt(2 / 49), 20 %
        assert relative(found.covariance, whole.covariance) < 0.4
        ratio = found.uncertainty / whole.uncertainty
        assert float(ratio.min()) > 0.4
        assert float(ratio.max()) < 1.8


@pytest.mark.parametrize("precision", [1e-12, 1e18], ids=["too long", "too short"])
def test_directions_beyond_the_range_of_float16_work(precision: float) -> None:
    case = next(case for case in CASES if case.name == "conv2d")
    detector = case.detector().half()
    inputs, targets = (t.half() for t in case.frames(case.detector()))
    posterior = fit(
        detector, [(inputs, targets)], n_data=min(precision, 1e15), prior_precision=precision
    )
    length = torch.cat([eta.flatten() for eta in posterior.sample(20).values()]).abs().max()
    assert not 1e-7 < float(length) < 65504
    exact = ExactGLM(detector, posterior)(inputs[:1])
    assert bool((exact.uncertainty > 0).all())
    assert (
        relative(MCGLM(detector, posterior, samples=400)(inputs[:1]).covariance, exact.covariance)
        < 0.3
    )
