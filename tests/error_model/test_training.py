"""The fit of the network: known laws are recovered, folds stay apart."""

from __future__ import annotations

import pytest
import torch

from boxcov.error_model import network
from boxcov.error_model.calibrate import fit_error_model
from boxcov.error_model.network import (
    Network,
    Outputs,
    Targets,
    TrainingOptions,
    fit_network,
    frame_folds,
)
from boxcov.error_model.unusual_frames import certainty_bound
from helpers.clipped_cases import as_detections, clipped_boxes

OUTPUTS = Outputs(thresholds=2, fields=2, has_heading=True)
DOF = (3.0, 8.0)


def synthetic(n: int, seed: int = 0, curved: float = 0.0) -> tuple[torch.Tensor, Targets, dict]:
    """Boxes whose errors and probabilities follow known laws of three inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    bend = curved * (x[:, 1] * x[:, 2])
    log_scale = torch.stack([0.7 * x[:, 0] + bend, -0.4 * x[:, 1] + 0.5], 1)
    no_object = (x[:, 2] - 1).sigmoid()
    low = 0.5 * (x[:, 0] + bend).sigmoid()
    iou_below = torch.stack([low, 0.5 + 0.5 * low], 1)
    flipped = torch.full((n,), 0.2)

    def drawn(p: torch.Tensor) -> torch.Tensor:
        return torch.rand(p.shape, generator=generator) < p

    u = torch.rand(n, generator=generator)[:, None]
    normal = torch.randn(n, 2, generator=generator)
    halves = torch.randn(n, 2, 8, generator=generator).square()
    dof = torch.tensor(DOF)
    chi = torch.stack([halves[:, d, : int(DOF[d])].sum(1) for d in range(2)], 1)
    errors = log_scale.exp() * normal * (dof / chi).sqrt()
    paired = ~drawn(no_object)
    errors[~paired] = torch.nan
    targets = Targets(paired, (u < iou_below).float(), drawn(flipped).float(), errors)
    law = {"log_scale": log_scale, "no_object": no_object, "iou": iou_below, "flipped": flipped}
    return x, targets, law


def folds_of(n: int, members: int = 3) -> torch.Tensor:
    return torch.arange(n) * members // n


@pytest.fixture(scope="module")
def fitted() -> network.Ensemble:
    x, targets, _ = synthetic(4000)
    return fit_network(x, targets, folds_of(4000), OUTPUTS, TrainingOptions(widths=(0,)))


def test_scales_of_a_known_law_are_recovered(fitted: network.Ensemble) -> None:
    x, _, law = synthetic(2000, seed=1)
    y = fitted.network(x).mean(0)
    gap = OUTPUTS.log_scale(y) - law["log_scale"]
    shift = gap.mean(0)  # the loss has other degrees of freedom than the law; calibrate corrects it
    assert float((gap - shift).abs().mean()) < 0.06
    assert float(shift.abs().max()) < 0.2
    assert not any(p.requires_grad for p in fitted.network.parameters())


def test_probabilities_are_calibrated_on_new_boxes(fitted: network.Ensemble) -> None:
    x, _, law = synthetic(4000, seed=2)
    y = fitted.network(x)
    found = {
        "no_object": OUTPUTS.no_object(y).mean(0),
        "iou": OUTPUTS.iou_below(y).mean(0),
        "flipped": OUTPUTS.flipped(y).mean(0),
    }
    for name, p in found.items():
        expected = law[name]
        assert float((p - expected).abs().mean()) < 0.03, name
        for part in p.flatten().argsort().split(p.numel() // 8):  # in each eighth, by size
            gap = p.flatten()[part].mean() - expected.flatten()[part].mean()
            assert abs(float(gap)) < 0.04, name


def test_the_mlp_is_chosen_where_the_law_is_curved() -> None:
    x, targets, _ = synthetic(800, curved=1.5)
    assert fit_network(x, targets, folds_of(800), OUTPUTS, TrainingOptions()).width == 128


def test_the_linear_model_is_chosen_for_a_linear_law() -> None:
    x, targets, _ = synthetic(600)
    assert fit_network(x, targets, folds_of(600), OUTPUTS, TrainingOptions()).width == 0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "EPOCHS", 4)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("width", [0, 8])
def test_frames_of_a_fold_never_reach_its_member(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch is chosen on all held-out frames, so it is fixed here: the last one."""
    losses = iter(range(10**6, 0, -1))
    monkeypatch.setattr(network, "_held_out_loss", lambda *args: float(next(losses)))
    x, targets, _ = synthetic(300)
    folds = folds_of(300)
    before = fit_network(x, targets, folds, OUTPUTS, TrainingOptions(widths=(width,))).network
    own = folds == 1
    spoilt = Targets(
        torch.where(own, ~targets.paired, targets.paired),
        torch.where(own[:, None], 1 - targets.iou_below, targets.iou_below),
        torch.where(own, 1 - targets.flipped, targets.flipped),
        torch.where(own[:, None], 1000 * targets.errors, targets.errors),
    )
    after = fit_network(x, spoilt, folds, OUTPUTS, TrainingOptions(widths=(width,))).network
    for p, q in zip(before.parameters(), after.parameters()):
        torch.testing.assert_close(p[1], q[1], rtol=1e-4, atol=1e-6)
        if p.shape[1] > 1:
            assert float((p[0] - q[0]).abs().max()) > 1e-4
            assert float((p[2] - q[2]).abs().max()) > 1e-4


def test_weights_of_the_mlp_decay_most_and_biases_never() -> None:
    parameters = Network.initial(2, 3, 4, 8, torch.Generator().manual_seed(0)).parameters()
    tensors = [torch.ones_like(p).requires_grad_() for p in parameters]
    optimizer, _ = network._optimizer(Network(*tensors[:2], tuple(tensors[2:])), 10, decay=0.01)
    for p in tensors:
        p.grad = torch.zeros_like(p)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()
    linear, bias, first, b1, second, b2, last = ((1 - float(p.detach().mean())) for p in tensors)
    assert linear == pytest.approx(0.01 * rate, rel=0.1)
    for decay in (first, second, last):
        assert decay == pytest.approx(0.5 * rate, rel=0.01)
    assert bias == b1 == b2 == 0


def test_a_linear_model_of_few_boxes_decays() -> None:
    """With forty inputs that say nothing, strong decay has the lower held-out loss."""
    x, targets, _ = synthetic(120)
    x = torch.cat([x, torch.randn(120, 40, generator=torch.Generator().manual_seed(3))], 1)
    options = TrainingOptions(widths=(0,))
    folds = folds_of(120)
    chosen = fit_network(x, targets, folds, OUTPUTS, options)
    weak, strong = (
        min(network._epochs(x, targets, folds, OUTPUTS, 0, decay, 120), key=lambda e: e.loss)
        for decay in (network.LINEAR_DECAY, network.STRONG_DECAY)
    )
    assert strong.loss < weak.loss
    assert chosen.loss == strong.loss


@pytest.mark.usefixtures("short")
def test_progress_counts_the_epochs_of_all_widths() -> None:
    x, targets, _ = synthetic(100)
    calls: list[tuple[int, int]] = []
    options = TrainingOptions((0, 4), progress=lambda done, total: calls.append((done, total)))
    fit_network(x, targets, folds_of(100), OUTPUTS, options)
    total = 3 * network.EPOCHS  # the linear model twice, with another decay
    assert calls == [(done, total) for done in range(1, total + 1)]


@pytest.mark.usefixtures("short")
def test_a_fit_is_deterministic() -> None:
    x, targets, _ = synthetic(200)
    first, second = (
        fit_network(x, targets, folds_of(200), OUTPUTS, TrainingOptions(widths=(8,)))
        for _ in range(2)
    )
    for p, q in zip(first.network.parameters(), second.network.parameters()):
        assert torch.equal(p, q)


@pytest.mark.usefixtures("short")
def test_a_fold_without_objects_is_no_obstacle() -> None:
    x, targets, _ = synthetic(200)
    folds = folds_of(200)
    paired = targets.paired & (folds != 2)
    errors = torch.where(paired[:, None], targets.errors, torch.nan)
    found = fit_network(
        x,
        Targets(paired, targets.iou_below, targets.flipped, errors),
        folds,
        OUTPUTS,
        TrainingOptions(widths=(8,)),
    )
    assert all(bool(p.isfinite().all()) for p in found.network.parameters())


@pytest.mark.usefixtures("short")
def test_an_unknown_field_leaves_the_others_as_they_are() -> None:
    x, targets, _ = synthetic(300)
    errors = targets.errors.clone()
    errors[:, 1] = torch.nan
    found = fit_network(
        x,
        Targets(targets.paired, targets.iou_below, targets.flipped, errors),
        folds_of(300),
        OUTPUTS,
        TrainingOptions(widths=(0,)),
    )
    assert all(bool(p.isfinite().all()) for p in found.network.parameters())
    assert float(found.network.linear[..., -1].abs().max()) == 0  # nothing was learnt about it
    assert float(found.network.linear[..., -2].abs().max()) > 0


# copies of frames


def copied(n: int, seed: int, wrong: bool = False) -> tuple[torch.Tensor, Targets, torch.Tensor]:
    """150 boxes of a curved law, and n of copies that follow it, or its opposite."""
    x, targets, _ = synthetic(150, curved=1.5)
    more, other, _ = synthetic(n, seed=seed, curved=1.5)
    if wrong:
        other = Targets(~other.paired, 1 - other.iou_below, 1 - other.flipped, 9 * other.errors)
    folds = torch.cat([folds_of(150), torch.arange(n) % 3])
    return torch.cat([x, more]), targets + other, folds


def test_copies_that_help_are_learned_from() -> None:
    rows, options = copied(3000, seed=5), TrainingOptions()
    fitted = fit_network(*rows, OUTPUTS, options, own=150)
    alone = fit_network(rows[0][:150], rows[1][:150], rows[2][:150], OUTPUTS, options)
    assert (fitted.copies, alone.copies) == (3000, 0)
    assert fitted.loss < alone.loss - 0.1
    x, _, law = synthetic(2000, seed=6, curved=1.5)
    gaps = [
        float((OUTPUTS.log_scale(f.network(x).mean(0)) - law["log_scale"]).square().mean())
        for f in (fitted, alone)
    ]
    assert gaps[0] < 0.5 * gaps[1]


def test_copies_that_mislead_are_left_out() -> None:
    rows, options = copied(600, seed=5, wrong=True), TrainingOptions(widths=(0,))
    fitted = fit_network(*rows, OUTPUTS, options, own=150)
    alone = fit_network(rows[0][:150], rows[1][:150], rows[2][:150], OUTPUTS, options)
    assert fitted.copies == 0
    for p, q in zip(fitted.network.parameters(), alone.network.parameters()):
        assert torch.equal(p, q)


@pytest.mark.usefixtures("short")
def test_copies_of_a_fold_never_reach_its_member(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter(range(10**6, 0, -1))
    monkeypatch.setattr(network, "_held_out_loss", lambda *args: float(next(losses)))
    x, targets, folds = copied(300, seed=5)
    options = TrainingOptions(widths=(8,))
    before = fit_network(x, targets, folds, OUTPUTS, options, own=150)
    errors = targets.errors.clone()
    errors[150:][folds[150:] == 1] *= 1000
    spoilt = Targets(targets.paired, targets.iou_below, targets.flipped, errors)
    after = fit_network(x, spoilt, folds, OUTPUTS, options, own=150)
    assert before.copies == after.copies == 300
    for p, q in zip(before.network.parameters(), after.network.parameters()):
        torch.testing.assert_close(p[1], q[1], rtol=1e-4, atol=1e-6)
    assert not torch.equal(before.network.linear[0], after.network.linear[0])


def test_folds_are_blocks_of_frames() -> None:
    frame = torch.tensor([9, 9, 3, 4, 4, 5, 6, 7, 8, 30])
    folds = frame_folds(frame, 3)
    assert folds.tolist() == [2, 2, 0, 0, 0, 0, 1, 1, 1, 2]
    assert frame_folds(torch.tensor([5, 6]), 5).tolist() == [0, 1]
    sizes = torch.bincount(frame_folds(torch.arange(103), 5))
    assert int(sizes.max() - sizes.min()) <= 1


@pytest.mark.usefixtures("short")
def test_default_dtype_and_device_do_not_matter() -> None:
    records = clipped_boxes(400, seed=1)
    found, about = as_detections(records), {"estimator": "exact", "fingerprint": ""}
    expected = fit_error_model(found, records, **about).apply(found).risk
    torch.set_default_dtype(torch.float64)
    try:
        model, bound = fit_error_model(found, records, **about), certainty_bound(found)
        assert torch.equal(model.apply(found).risk, expected)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        again = fit_error_model(found, records, **about)
    assert torch.equal(again.apply(found).risk, expected)
    assert {t.dtype for t in (bound, *model.tensors().values())} == {torch.float32, torch.long}
