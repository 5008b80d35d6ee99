"""spconv in the place of the gathered patches: the same numbers, and only where nobody asks for derivatives."""

from dataclasses import replace

import pytest
import torch

import boxcov
from boxcov.detectors.centerpoint import CenterPoint, Config, by_spconv
from boxcov.detectors.centerpoint.settings import Dense, Voxels
from boxcov.detectors.centerpoint.sparse import VoxelEncoder

needs_spconv = pytest.mark.skipif(
    isinstance(by_spconv.installed(), str), reason=f"needs spconv ({by_spconv.installed()})"
)


def config(size: float = 0.1) -> Config:
    side = 64 * size
    small = replace(
        Config.voxel(size),
        point_range=(-side, -side, -5.0, side, side, 3.0),
        encoder=Voxels(widths=(4, 6, 8, 8)),
    )
    dense = Dense((8, 8), (1, 1), (1, 2), (8, 8), (1, 2), shared=8, branch=8)
    return replace(small, dense=dense, reporting=replace(small.reporting, threshold=0.0, most=3))


def cloud(points: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(points, 5, generator=torch.Generator().manual_seed(seed)) * torch.tensor(
        [12.0, 12, 7, 255, 0.5]
    ) - torch.tensor([6.0, 6, 5, 0, 0])


def target() -> dict[str, torch.Tensor]:
    """An object of every class."""
    boxes = torch.tensor([[1.0, 1, -1, 2, 4, 1.5, 0.3, 0.1, 0.1]]).repeat(10, 1)
    boxes[:, 0] += torch.arange(-5.0, 5.0)
    return {"boxes": boxes, "labels": torch.arange(10)}


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch):
    """How often spconv multiplied."""
    count = [0]
    product = by_spconv.Rules.product

    def counted(self, features, weight):
        count[0] += 1
        return product(self, features, weight)

    monkeypatch.setattr(by_spconv.Rules, "product", counted)
    return count


@needs_spconv
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", [0.1, 0.075])
@pytest.mark.parametrize(
    "clouds", [[cloud(4000), cloud(50, 1)], [cloud(0), cloud(700)], [cloud(1)], [cloud(0)]]
)
def test_spconv_gives_the_same_maps(size, clouds, calls):
    encoder = VoxelEncoder(config(size)).eval()
    with torch.no_grad():
        encoder.backend = "torch"
        expected = encoder(clouds)
        assert calls[0] == 0
        encoder.backend = "auto"
        found = encoder(clouds)
        assert calls[0] == (21 if sum(map(len, clouds)) else 0)
        assert torch.equal(found, encoder(clouds))
    scale = expected.abs().max().clamp(min=1e-6)
    assert float((found - expected).abs().max() / scale) < 1e-5


@needs_spconv
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "where", [(-6.35, -6.35, -4.99), (6.35, 6.35, 2.99), (0.0, 0.0, 2.7), (-6.35, 6.35, -1.0)]
)
def test_a_single_point_at_the_border(where):
    encoder = VoxelEncoder(config()).eval()
    point = [torch.tensor([[*where, 9.0, 0.1]])]
    with torch.no_grad():
        found = encoder(point)
        encoder.backend = "torch"
        torch.testing.assert_close(found, encoder(point), rtol=1e-4, atol=1e-5)


@needs_spconv
@pytest.mark.usefixtures("one_thread")
def test_boxes_are_bit_for_bit_those_of_the_plain_detector(calls):
    detector = CenterPoint(config()).eval()
    inputs = [cloud(2000)]
    posterior = boxcov.fit(detector, [(inputs, [target()])], depth="neck")
    assert calls[0] > 0  # the encoder is below the posterior: no derivative of it is asked for
    plain = detector.detect(inputs)
    for model in (
        boxcov.MCGLM(detector, posterior, samples=2),
        boxcov.ExactGLM(detector, posterior, samples=2),
    ):
        calls[0] = 0
        found = model(inputs)
        assert calls[0] > 0
        assert torch.equal(found.boxes, plain.boxes)
        assert torch.equal(found.scores, plain.scores)
    keys = list(detector.state_dict())
    detector.encoder.backend = "torch"
    assert list(detector.state_dict()) == keys
    other = detector.detect(inputs)
    torch.testing.assert_close(other.scores, plain.scores, rtol=1e-4, atol=1e-5)


@needs_spconv
@pytest.mark.usefixtures("one_thread")
def test_derivatives_go_by_torch(calls):
    encoder = VoxelEncoder(config()).eval()
    inputs = [cloud(500)]
    encoder(inputs).sum().backward()
    assert calls[0] == 0
    assert all(p.grad is not None for name, p in encoder.named_parameters() if "conv" in name)
    weights = {name: p.detach() for name, p in encoder.named_parameters()}
    with torch.no_grad():
        _, tangent = torch.func.jvp(
            lambda w: torch.func.functional_call(encoder, w, (inputs,)), (weights,), (weights,)
        )
    assert calls[0] == 0
    assert float(tangent.norm()) > 0
    assert not by_spconv.chosen("auto", torch.zeros(2, 5, dtype=torch.float64), [], 10)
    with torch.autocast("cpu", torch.bfloat16):
        assert not by_spconv.chosen("auto", torch.zeros(2, 5), [], 10)


@needs_spconv
@pytest.mark.usefixtures("one_thread")
def test_a_posterior_of_the_encoder_is_fitted_by_torch_and_refused_by_spconv(calls):
    detector = CenterPoint(config()).eval()
    inputs = [cloud(500)]
    posterior = boxcov.fit(detector, [(inputs, [target()])], depth=["encoder.stages.3"])
    assert calls[0] == 0
    model = boxcov.MCGLM(detector, posterior, samples=2)
    with pytest.raises(boxcov.BoxcovError, match=r"set detector.encoder.backend = 'torch' first"):
        model(inputs)
    detector.encoder.backend = "torch"
    model = boxcov.MCGLM(detector, posterior, samples=2)
    assert torch.equal(model(inputs).boxes, detector.detect(inputs).boxes)


@needs_spconv
def test_more_threads_are_refused_or_left_to_torch(calls):
    before = torch.get_num_threads()
    encoder = VoxelEncoder(config()).eval()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            encoder([cloud(10)])
            assert calls[0] == 0
            encoder.backend = "spconv"
            with pytest.raises(
                boxcov.BoxcovError, match="go wrong with more than one thread, and torch has 2"
            ):
                encoder([cloud(10)])
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_without_spconv_it_is_torch_unless_asked_for(monkeypatch):
    monkeypatch.setattr(
        by_spconv, "installed", lambda: "ModuleNotFoundError: No module named 'spconv'"
    )
    encoder = VoxelEncoder(config()).eval()
    with torch.no_grad():
        auto = encoder([cloud(50)])
        encoder.backend = "torch"
        assert torch.equal(auto, encoder([cloud(50)]))
        encoder.backend = "spconv"
        with pytest.raises(
            boxcov.BoxcovError,
            match=r"cannot be imported \(ModuleNotFoundError.*set 'auto' or 'torch'",
        ):
            encoder([cloud(50)])
