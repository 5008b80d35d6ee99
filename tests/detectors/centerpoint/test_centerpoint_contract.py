"""The whole contract: fit and every predictor on small networks, with boxes at the border."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import boxcov
from boxcov.detector import Selection
from boxcov.detectors.centerpoint import CenterPoint, Config
from boxcov.detectors.centerpoint.config import Pillars
from boxcov.detectors.centerpoint.decode import CellIndex
from helpers.centerpoint_cases import (
    cloud,
    detector_of,
    frames,
    pillar_config,
    target,
    voxel_config,
)

CONFIGS = {
    "one pfn": pillar_config(),
    "two pfn": pillar_config(encoder=Pillars(widths=(8, 8), centre_z=False)),
    "dynamic": pillar_config(
        encoder=Pillars(widths=(8, 8), padded=False, max_points=None, max_cells=None)
    ),
    "voxel": voxel_config(),
    "no velocity": pillar_config(velocity=False, tasks=(("car",), ("pedestrian", "cyclist"))),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Corners(CenterPoint):
    """Reports the corners and borders of the map, in every task."""

    def select(self, raw):
        cells = [(0, 0), (0, 7), (7, 0), (7, 7), (0, 3), (3, 0), (7, 2), (1, 6), (3, 4)]
        n = len(cells) * len(self.config.tasks)
        row, column = torch.tensor(cells * len(self.config.tasks)).T
        where = CellIndex(
            torch.zeros(n, dtype=torch.long), torch.arange(n) // len(cells), row, column
        )
        return Selection(where.frame, torch.ones(n), where.task, where)


def close(a, b, slack=1e-5):
    return float((a - b).abs().max()) <= slack * float(b.abs().max())


@each_config
def test_every_predictor_runs_and_leaves_the_plain_boxes(config: Config):
    detector = detector_of(config)
    data = frames(config)
    posterior = boxcov.fit(detector, data, prior_precision=1e4)
    plain = detector.detect(data[0][0])
    assert 0 < len(plain) <= 2 * len(config.tasks)
    exact = boxcov.ExactGLM(detector, posterior)(data[0][0])
    glm = boxcov.GLM(detector, posterior)(data[0][0])
    mc = boxcov.MCGLM(detector, posterior, samples=800, seed=3)(data[0][0])
    for found in (exact, glm, mc):
        assert torch.equal(found.boxes, plain.boxes)
        assert torch.equal(found.scores, plain.scores)
        assert torch.equal(found.labels, plain.labels)
    assert close(exact.covariance, glm.covariance)
    assert close(mc.covariance, glm.covariance, 0.2)
    assert boxcov.MCI(detector, posterior)(data[0][0]).covariance.isfinite().all()


@pytest.mark.parametrize("kind", ["pillar", "voxel"])
@pytest.mark.parametrize("depth", ["head", "encoder"])
def test_exact_equals_one_backward_per_output_on_the_border(kind: str, depth: str):
    make = pillar_config if kind == "pillar" else voxel_config
    config = make(tasks=(("car",), ("truck", "trailer")))
    detector = detector_of(config)
    detector.__class__ = Corners
    data = frames(config, 1)
    posterior = boxcov.fit(detector, data, depth=depth, prior_precision=1.0)
    exact = boxcov.ExactGLM(detector, posterior, with_logit=True)(data[0][0])
    glm = boxcov.GLM(detector, posterior, with_logit=True)(data[0][0])
    assert len(exact) == 9 * 2
    assert close(exact.covariance, glm.covariance)
    assert close(exact.score_variance, glm.score_variance)
    assert close(exact.score_covariance, glm.score_covariance)


@pytest.mark.parametrize("kind", ["pillar", "voxel"])
def test_the_logits_are_those_of_the_scores(kind: str):
    config = (pillar_config if kind == "pillar" else voxel_config)(
        tasks=(("car",), ("truck", "trailer"), ("bus",))
    )
    detector = detector_of(config)
    raw = detector(frames(config, 1)[0][0])
    selection = detector.select(raw)
    assert len(set(selection.labels.tolist())) > 2
    assert torch.allclose(detector.logits(raw, selection).sigmoid(), selection.scores)


@pytest.mark.parametrize("kind", ["pillar", "voxel"])
def test_the_vectorised_way_agrees_without_instances(kind: str):
    config = pillar_config() if kind == "pillar" else voxel_config()
    detector = detector_of(config)
    data = frames(config, 1)
    posterior = boxcov.fit(detector, data, prior_precision=1.0)
    exact = boxcov.ExactGLM(detector, posterior)(data[0][0])
    detector.instances = lambda raw, selection, with_logit=False: None
    assert close(boxcov.ExactGLM(detector, posterior)(data[0][0]).covariance, exact.covariance)


@each_config
def test_every_depth_can_be_fitted_and_sampled(config: Config):
    detector = detector_of(config)
    data = frames(config, 1)
    names = {}
    for depth in ("head", "neck", "backbone", "encoder"):
        posterior = boxcov.fit(detector, data, depth=depth, prior_precision=1.0)
        names[depth] = set(posterior.blocks)
    assert names["head"] < names["neck"] < names["backbone"] < names["encoder"]
    weights = {n.removesuffix(".weight") for n, p in detector.named_parameters() if p.dim() > 1}
    assert names["encoder"] == weights
    found = boxcov.MCGLM(detector, posterior, samples=4)(data[0][0])
    assert bool((found.uncertainty > 0).all())


def test_jvp_agrees_with_finite_differences_through_the_encoder():
    for config in (pillar_config(), voxel_config()):
        detector = detector_of(config, dtype=torch.float64)
        data = [([points.double()], targets) for (points,), targets in frames(config, 1)]
        posterior = boxcov.fit(detector, data, depth="encoder", prior_precision=100.0)
        jvp = boxcov.MCGLM(detector, posterior, samples=4)(data[0][0])
        fd = boxcov.MCGLM(detector, posterior, samples=4, derivative="fd", epsilon=1e-7)(data[0][0])
        assert close(fd.covariance, jvp.covariance, 1e-3)


@pytest.mark.parametrize("kind", ["pillar", "voxel"])
def test_drawn_targets(kind: str):
    config = pillar_config() if kind == "pillar" else voxel_config()
    detector = detector_of(config)
    inputs = frames(config, 2)
    posterior = boxcov.fit(
        detector,
        [(clouds, None) for clouds, _ in inputs],
        depth="encoder",
        prior_precision=1.0,
        fisher="mc",
    )
    again = boxcov.fit(
        detector,
        [(clouds, None) for clouds, _ in inputs],
        depth="encoder",
        prior_precision=1.0,
        fisher="mc",
    )
    assert posterior.loss == again.loss
    assert boxcov.MCGLM(detector, posterior)(inputs[0][0]).covariance.isfinite().all()


def test_a_batch_gives_what_its_frames_give():
    for config in (pillar_config(), voxel_config()):
        detector = detector_of(config)
        first, second = frames(config)
        clouds = first[0] + second[0]
        both = detector.detect(clouds)
        alone = [detector.detect(item[0]) for item in (first, second)]
        for b, one in enumerate(alone):
            mine = both.frame == b
            assert torch.equal(both.labels[mine], one.labels)
            torch.testing.assert_close(both.boxes[mine], one.boxes, rtol=1e-4, atol=1e-4)
        raw = detector(clouds)
        losses = detector.loss(raw, first[1] + second[1])
        single = torch.cat([detector.loss(detector(item[0]), item[1]) for item in (first, second)])
        torch.testing.assert_close(losses, single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [CONFIGS[name] for name in ("two pfn", "dynamic", "voxel")])
@pytest.mark.parametrize("points", ["none", "one", "outside"])
def test_clouds_with_next_to_nothing_in_them(config: Config, points: str):
    detector = detector_of(config)
    inputs = {
        "none": torch.zeros(0, 5),
        "one": torch.zeros(1, 5) + 0.01,
        "outside": torch.full((7, 5), 500.0),
    }[points]
    raw = detector([inputs])
    losses = detector.loss(raw, [target(config)])
    assert losses.shape == (1,)
    assert bool(losses.isfinite())
    found = detector.detect([inputs])
    assert found.boxes.isfinite().all()
    empty = {"boxes": torch.zeros(0, 9), "labels": torch.zeros(0, dtype=torch.long)}
    assert bool(detector.loss(raw, [empty]).isfinite().all())
    posterior = boxcov.fit(
        detector, [*frames(config, 1), ([inputs], [empty])], depth="encoder", prior_precision=1.0
    )
    assert boxcov.MCGLM(detector, posterior, samples=2)([inputs]).covariance.isfinite().all()


def test_no_boxes_above_the_threshold():
    config = pillar_config(reporting=replace(pillar_config().reporting, threshold=0.999))
    detector = detector_of(config)
    data = frames(config, 1)
    assert len(detector.detect(data[0][0])) == 0
    posterior = boxcov.fit(detector, data, prior_precision=1.0)
    for model in (
        boxcov.MCGLM(detector, posterior),
        boxcov.GLM(detector, posterior),
        boxcov.ExactGLM(detector, posterior),
    ):
        assert model(data[0][0]).covariance.shape == (0, 9, 9)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([torch.zeros(3, 5).numpy()], "frame 0: points must be a tensor .* got ndarray"),
        (
            [torch.zeros(3, 5).int()],
            "points must be a tensor of floats .* got torch.int32",
        ),
        ([torch.zeros(3, 4)], r"frame 0: points must have the shape \(N, 5\).*got \(3, 4\)"),
        ([], "at least one frame"),
        (torch.zeros(3, 5), "a list with one tensor"),
    ],
)
def test_inputs_of_another_form_are_refused(inputs, message):
    with pytest.raises(boxcov.BoxcovError, match=message):
        detector_of(pillar_config())(inputs)


@pytest.mark.parametrize("config", [pillar_config(), voxel_config()], ids=["pillar", "voxel"])
def test_half_precision_trains_and_detects(config):
    """In half precision 1 - 1e-4 is 1, and its logarithm would be lost."""
    detector = detector_of(config)
    inputs, targets = frames(config, 1)[0]
    with torch.autocast("cpu", torch.bfloat16):
        raw = detector.train()(inputs)
        losses = detector.loss(raw, targets)
    assert {m.dtype for maps in raw["tasks"] for m in maps.values()} == {torch.float32}
    losses.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in detector.parameters() if p.grad is not None)
    plain = detector.eval().detect(inputs)
    half = detector_of(config).bfloat16().detect(inputs)
    assert half.boxes.dtype == torch.float32
    assert plain.boxes.isfinite().all()


def test_a_warning_if_every_velocity_is_unknown():
    config = pillar_config()
    targets = target(config)
    targets["boxes"][:, 7:] = torch.nan
    with pytest.warns(boxcov.BoxcovWarning, match="vel"):
        boxcov.fit(detector_of(config), [([cloud(config)], [targets])], prior_precision=1.0)


def test_copies_are_turned_and_mirrored_where_the_range_is() -> None:
    config = pillar_config()
    detector, (points, targets) = detector_of(config), frames(config)[0]
    low, high = config.point_range[:2], config.point_range[3:5]
    assert low == (-high[0], -high[1])
    before = points[0].clone()
    signs = set()
    for seed in range(40):
        (cloud,), (target,) = detector.augment(points, targets, torch.Generator().manual_seed(seed))
        x, y = points[0][:, :2].T, cloud[:, :2].T
        plane = y @ torch.linalg.pinv(x)  # the map of the plane
        torch.testing.assert_close(plane @ plane.T, torch.eye(2), atol=1e-4, rtol=0)
        angle = torch.atan2(plane[1, 0] * plane[0, 0].sign(), plane[0, 0].abs())
        assert abs(float(angle)) <= torch.pi / 8 + 1e-4
        signs.add((float(plane[0, 0].sign()), float(plane[1, 1].sign())))
        assert torch.equal(cloud[:, 2:], points[0][:, 2:])
        assert torch.equal(target["labels"], targets[0]["labels"])
    assert len(signs) == 4
    assert torch.equal(points[0], before)
    ahead = replace(config, point_range=(0.0, *config.point_range[1:]))
    half = CenterPoint(ahead)
    for seed in range(10):
        cloud = half.augment(points, targets, torch.Generator().manual_seed(seed))[0][0]
        assert float((cloud[:, 0] * points[0][:, 0]).sum()) > 0  # never behind the sensor
